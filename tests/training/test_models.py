import pytest
import torch

from training.models.gpt import GPT
from training.models.mlp import MLP
from training.optim import adamw


def small():
    torch.manual_seed(0)
    return GPT(context=16, layers=2, heads=2, width=16, dropout=0.0)


def test_no_byte_sees_what_follows_it():
    model = small()
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    with torch.no_grad():
        one, two = model(tokens), model(changed)
    assert torch.equal(one[:, :10], two[:, :10])
    assert not torch.equal(one[:, 10:], two[:, 10:])


def test_the_default_size_is_about_two_million_with_a_tied_output():
    model = GPT()
    assert 2_000_000 < sum(p.numel() for p in model.parameters()) < 3_000_000
    assert model.head.weight is model.embed.weight


def test_gpt_learns_a_repeating_text_and_continues_it():
    model = small()
    text = torch.tensor(list(b"abcdefgh" * 6), dtype=torch.uint8)
    batch = {"tokens": torch.stack([text[i : i + 17] for i in range(8)])}
    optimizer = adamw(model, lr=1e-2, weight_decay=0.0)
    first = model.loss(batch).item()
    assert 5.0 < first < 6.5  # near log(256): it knows nothing yet
    for _ in range(60):
        optimizer.zero_grad()
        model.loss(batch).backward()
        optimizer.step()
    assert model.loss(batch).item() < 0.2
    assert bytes(model.generate(torch.tensor(list(b"abcdefghabcdefgh")), 8).tolist()) == b"abcdefgh"


def test_too_long_a_text_is_refused_with_the_setting():
    with pytest.raises(ValueError, match=r"17 bytes .*model.context=16"):
        small()(torch.zeros(1, 17, dtype=torch.int64))


def test_mlp_has_the_hidden_size_asked_for():
    assert MLP(hidden=4).layers[0].weight.shape == (4, 64)


def test_only_matrices_decay():
    groups = adamw(GPT(layers=1, width=16, heads=2), weight_decay=0.3).param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all(p.dim() >= 2 for p in groups[0]["params"])
    assert groups[1]["params"]
    assert all(p.dim() < 2 for p in groups[1]["params"])
