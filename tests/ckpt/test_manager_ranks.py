import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckpt
from ckpt.errors import StorageError
from ckpt.policies import EverySteps, KeepLast
from tests.ckpt.managing import copy_of, manager, same, steps, stored, wait_until
from tests.ckpt.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


class Shared:
    """A DDP model with its optimizer, and a value and a tensor of this rank's own."""

    def __init__(self, rank):
        torch.manual_seed(0)
        self.model = DistributedDataParallel(
            nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 2))
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.own = Own(rank)
        self.generator = torch.Generator().manual_seed(rank)

    @property
    def state(self):
        return {"model": self.model, "optim": self.optim, "own": self.own}

    def train(self):
        self.optim.zero_grad()
        self.model(torch.randn(8, 6, generator=self.generator)).square().mean().backward()
        self.optim.step()


class Own:
    per_rank = True

    def __init__(self, rank):
        self.rank = rank
        self.noise = torch.full((3,), float(rank))

    def state_dict(self):
        return {"rank": self.rank, "noise": self.noise}

    def load_state_dict(self, state):
        self.rank, self.noise = state["rank"], state["noise"]


def opened(rank, folder, shared, **options):
    group = dist.group.WORLD
    return manager(Path(folder), shared.state, process_group=group, **options)


def _every_step_with_collectives(rank, folder):
    shared = Shared(rank)
    m = opened(
        rank, folder, shared, save=EverySteps(1), when_busy="wait", rank_timeout_s=20, keep=KeepLast(2)
    )
    total = torch.zeros(1)
    for step in range(1, 31):
        shared.train()
        m.step(step, {"step": step})
        total += 1
        dist.all_reduce(total)
        dist.barrier()
    m.close()
    return copy_of(shared.state), m.stats.committed


@pytest.mark.long
def test_collectives_of_training_never_meet_those_of_saving(tmp_path, ranks):
    results = ranks.run(_every_step_with_collectives, str(tmp_path))
    assert steps(tmp_path) == [30, 29]
    expected, committed = results[0]
    assert committed >= 15
    found = stored(tmp_path)
    assert same({k: v for k, v in found.items() if "rank-00001" not in k}, expected)
    assert torch.equal(found["own/rank-00001.noise"], torch.ones(3))
    checkpoint = ckpt.checkpoints(str(tmp_path / "run"))[0]
    assert checkpoint.manifest.world_size == 2 and checkpoint.metrics == {"step": 30}
    assert not any("module" in key for key in found)
    sizes = [entry.size for entry in checkpoint.manifest.files]
    assert max(sizes) < 0.75 * sum(sizes)
    assert ckpt.verify(checkpoint).ok


def _slow(rank, folder):
    shared = Shared(rank)
    m = opened(rank, folder, shared, save=EverySteps(5), rank_timeout_s=2.5, keep=KeepLast(-1))
    for step in range(1, 11):
        shared.train()
        m.step(step)
        dist.barrier()
        if step == 5:
            wait_until(lambda: m.stats.backlog == 0, 30)
            dist.barrier()
    m.close(timeout=30)
    return m.stats, m.said


def test_a_slow_rank_voids_its_save_and_the_next_one_works(tmp_path, ranks):
    rules = {1: [{"match": "writer:pwrite:", "nth": 1, "do": "delay", "seconds": 3.5}]}
    results = ranks.run(_slow, str(tmp_path), faults_of=rules)
    assert steps(tmp_path) == [10]
    for stats, said in results:
        assert stats.failed == 1 and stats.committed == 1
        assert any("rank 1 was not done" in line for line in said)
    folders = {entry.name[:14] for entry in (tmp_path / "run").iterdir() if entry.name.startswith("step-")}
    assert folders == {"step-000000010"}


def _failing(rank, folder):
    shared = Shared(rank)
    m = opened(rank, folder, shared, save=EverySteps(3), rank_timeout_s=20, max_failed_saves=2)
    raised = None
    for step in range(1, 20):
        shared.train()
        try:
            m.step(step)
        except StorageError as error:
            raised = (step, str(error))
            break
        wait_until(lambda: m.stats.backlog == 0, 30)
    m.close(save=False)
    return raised


def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_at_the_same_step(tmp_path, ranks):
    rules = {1: [{"match": "writer:.*step-00000000[6-9]", "do": "raise", "errno": 28}]}
    first, second = ranks.run(_failing, str(tmp_path), faults_of=rules)
    assert steps(tmp_path) == [3]
    assert first == second
    assert "rank 1" in first[1] and "No space left" in first[1]


def _moving(rank, folder):
    shared = Shared(rank)
    m = opened(rank, folder, shared, save=EverySteps(4), rank_timeout_s=20, keep=KeepLast(-1))
    expected = None
    for step in range(1, 8):
        shared.train()
        expected = copy_of(shared.state) if step <= 6 else expected
        m.step(step)
        if step == 4 and rank == 1:
            for parameter in shared.model.parameters():
                parameter.data.add_(1)
        dist.barrier()
        wait_until(lambda: m.stats.backlog == 0, 30)
        dist.barrier()
    m.close(save=False)
    return m.stats.voided, m.said


def test_a_state_written_to_on_one_rank_voids_the_save_on_all(tmp_path, ranks):
    rules = {1: [{"match": "trainer:stage:begin", "nth": 1, "do": "delay", "seconds": 0.5}]}
    results = ranks.run(_moving, str(tmp_path), faults_of=rules)
    assert [voided for voided, _ in results] == [1, 1]
    assert all(any("rank 1" in line for line in said) for _, said in results)
    assert steps(tmp_path)[0] in (5, 6)


def _growing(rank, folder):
    shared = Shared(rank)
    late = nn.Linear(3, 3)
    second = torch.optim.Adam(late.parameters())
    state = {**shared.state, "late": late, "second": second}
    m = manager(Path(folder), state, process_group=dist.group.WORLD, save=EverySteps(3), rank_timeout_s=20)
    expected = {}
    for step in range(1, 9):
        shared.train()
        if step > 4:
            late(torch.ones(1, 3)).sum().backward()
            second.step()
        expected[step] = copy_of(state)
        m.step(step)
        wait_until(lambda: m.stats.backlog == 0, 30)
    m.close()
    return {step: {k: v for k, v in tensors.items() if "own" not in k} for step, tensors in expected.items()}


def test_ranks_plan_anew_together_when_the_structure_changes(tmp_path, ranks):
    expected = ranks.run(_growing, str(tmp_path))[0]
    done = steps(tmp_path)
    assert done[0] == 8 and 3 in done
    for step in done:
        assert same({k: v for k, v in stored(tmp_path, step).items() if "own" not in k}, expected[step])


def _stopping(rank, folder):
    shared = Shared(rank)
    m = opened(rank, folder, shared, save=EverySteps(1000), rank_timeout_s=20)
    for step in range(1, 2000):
        shared.train()
        if rank == 1 and step == 5:
            m.request_stop()
        m.step(step)
        if m.stop_agreed(step):
            break
        dist.barrier()
    m.close()
    return step


def test_all_ranks_stop_at_the_same_step_and_commit_it(tmp_path, ranks):
    first, second = ranks.run(_stopping, str(tmp_path))
    assert first == second < 2000
    assert steps(tmp_path) == [first]


def _by_hand(rank, folder):
    shared = Shared(rank)
    m = opened(rank, folder, shared, save=EverySteps(1000), rank_timeout_s=20)
    shared.train()
    m.save(1, {"loss": 0.5}, wait=True)
    if rank == 1:
        time.sleep(0.3)
    m.save(2)
    m.close(final_step=2)
    again = Shared(rank)
    second = opened(rank, folder, again, rank_timeout_s=20)
    found = second.restore()
    second.close(save=False)
    # Buffers are rank 0's after a restore, as they are after any forward under DDP.
    mine, theirs = (
        {k: v for k, v in copy_of(one.state).items() if rank == 0 or "running_" not in k}
        for one in (again, shared)
    )
    return found.step, same(mine, theirs), again.own.rank


def test_ranks_save_by_hand_and_restore_what_is_theirs(tmp_path, ranks):
    assert ranks.run(_by_hand, str(tmp_path)) == [(2, True, 0), (2, True, 1)]


def _busy(rank, folder):
    try:
        opened(rank, folder, Shared(rank), rank_timeout_s=20)
    except ckpt.RunBusy as error:
        return str(error)
    return "not refused"


def test_a_run_that_is_busy_is_refused_on_every_rank(tmp_path, ranks):
    holder = manager(tmp_path, {"x": 1})
    texts = ranks.run(_busy, str(tmp_path))
    holder.close(save=False)
    assert all("being written to by launch 1" in text for text in texts)


def _sharded(rank, folder):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False), nn.Linear(3, 1))
    model[3].weight.requires_grad_(False)
    fully_shard(model[0])
    fully_shard(model)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    state = {"model": model, "optim": optim}
    options = {"process_group": dist.group.WORLD, "rank_timeout_s": 20}
    m = manager(Path(folder), state, save=EverySteps(1), when_busy="wait", keep=KeepLast(-1), **options)
    expected = {}
    for step in range(1, 5):
        optim.zero_grad()
        model(torch.full((4, 5), float(rank + step))).square().mean().backward()
        optim.step()
        with torch.no_grad():
            model(torch.ones(4, 5))  # leaves the root unsharded, as an evaluation does
        whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in copy_of(state).items()}
        expected[step] = {k: v.clone() for k, v in whole.items()}
        m.step(step)
    m.close()
    return expected, m.stats.voided, m.said


def test_sharded_parameters_and_their_optimizer_state_are_saved_whole(tmp_path, ranks):
    (expected, voided, said), (_, also_voided, _) = ranks.run(_sharded, str(tmp_path))
    assert (voided, also_voided) == (0, 0), said
    assert steps(tmp_path) == [4, 3, 2, 1]
    for step, tensors in expected.items():
        found = stored(tmp_path, step)
        assert found.keys() == tensors.keys()
        assert same(found, tensors)
