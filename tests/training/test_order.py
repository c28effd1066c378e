from training import order


def test_every_epoch_has_each_sample_once():
    for epoch in range(3):
        drawn = order.samples(seed=5, size=64, start=64 * epoch, count=64)
        assert {e for e, _ in drawn} == {epoch}
        assert sorted(index for _, index in drawn) == list(range(64))


def test_the_order_of_an_epoch_never_changes_between_versions():
    assert order.epoch_order(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert order.epoch_order(0, 1, 8).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert order.sample_seed(1, 2, 3) == 13041116711478803063


def test_epochs_and_seeds_are_ordered_differently():
    orders = {tuple(order.epoch_order(seed, epoch, 64)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_f7_another_batch_size_goes_on_with_the_next_sample():
    whole = order.samples(seed=1, size=64, start=0, count=128)
    five_of_four = order.samples(1, 64, 0, 20)
    then_eight = [drawn for i in range(13) for drawn in order.samples(1, 64, 20 + 8 * i, 8)]
    assert (five_of_four + then_eight)[:124] == whole[:124]


def test_negative_and_huge_seeds_are_taken_and_told_apart():
    seeds = (-1, -2, 2**63, 2**63 + 1, 2**64 - 5)
    orders = {tuple(order.epoch_order(seed, 0, 16).tolist()) for seed in seeds}
    assert len(orders) == len(seeds)
    assert all(sorted(drawn) == list(range(16)) for drawn in orders)
