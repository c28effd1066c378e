from hypothesis import given
from hypothesis import strategies as st

from ckpt.lineage import Attempt, order


def attempts(*pairs):
    return [Attempt(f"step-{step:09d}-{launch:05d}-ab", step, launch) for launch, step in pairs]


def ordered(made, launches, parents):
    line, abandoned = order(made, launches, parents.get)
    return [(a.launch, a.step) for a in line], [(a.launch, a.step) for a in abandoned]


def parent(launch, step):
    return {"attempt": "x", "step": step, "launch": launch}


def test_h1_steps_are_numbers_not_text():
    made = attempts(*((1, step) for step in (8, 100, 9, 11, 99, 10)))
    assert ordered(made, [1], {})[0] == [(1, s) for s in (100, 99, 11, 10, 9, 8)]


def test_a_launch_that_went_back_on_purpose_outranks_what_it_left_behind():
    made = attempts((1, 10), (1, 20), (1, 30), (2, 15))
    assert ordered(made, [1, 2], {2: parent(1, 10)}) == ([(2, 15), (1, 10)], [(1, 30), (1, 20)])


def test_a_launch_that_committed_nothing_stands_for_its_parent():
    made = attempts((1, 10), (1, 30))
    assert ordered(made, [1, 2], {2: parent(1, 10)}) == ([(1, 10)], [(1, 30)])


def test_a_launch_that_neither_restored_nor_committed_is_passed_over():
    made = attempts((1, 10), (2, 20))
    assert ordered(made, [1, 2, 3, 4], {2: parent(1, 10)}) == ([(2, 20), (1, 10)], [])


def test_a_fresh_launch_that_committed_nothing_is_passed_over():
    made = attempts((1, 10))
    assert ordered(made, [1, 2], {2: {"fresh": True}}) == ([(1, 10)], [])


def test_the_line_skips_launches_between_a_launch_and_its_parent():
    made = attempts((1, 5), (1, 10), (2, 8), (2, 15), (3, 12))
    parents = {2: parent(1, 5), 3: parent(1, 10)}
    assert ordered(made, [1, 2, 3], parents) == ([(3, 12), (1, 10), (1, 5)], [(2, 15), (2, 8)])


def test_a_zombies_late_commit_lands_on_an_abandoned_branch():
    made = attempts((1, 10), (1, 15), (2, 12))
    assert ordered(made, [1, 2], {2: parent(1, 10)})[0] == [(2, 12), (1, 10)]


def test_a_parent_that_was_pruned_still_bounds_the_line():
    made = attempts((1, 5), (1, 30), (2, 12))
    assert ordered(made, [1, 2], {2: parent(1, 10)}) == ([(2, 12), (1, 5)], [(1, 30)])


def test_attempts_of_launches_that_left_no_file_are_still_ordered():
    assert ordered(attempts((1, 10), (7, 3)), [], {})[0] == [(7, 3), (1, 10)]


def test_parents_that_can_not_be_count_as_not_recorded():
    made = attempts((1, 10), (2, 20))
    for nonsense in (
        {"launch": 2, "step": 1},
        {"launch": 9, "step": 1},
        {"launch": "1", "step": 1},
        {"step": 3},
        {},
    ):
        assert ordered(made, [1, 2], {2: nonsense})[0] == [(2, 20), (1, 10)]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), unique=True),
    st.dictionaries(
        st.integers(1, 6), st.fixed_dictionaries({"launch": st.integers(0, 7), "step": st.integers(0, 20)})
    ),
)
def test_every_attempt_has_exactly_one_place_whatever_the_parents_say(pairs, parents):
    line, abandoned = ordered(attempts(*pairs), range(1, 7), parents)
    assert sorted(line + abandoned) == sorted(pairs)
    assert line == sorted(line, key=lambda pair: (-pair[0], -pair[1]))
