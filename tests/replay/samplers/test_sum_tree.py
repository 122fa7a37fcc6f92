"""SumTree against running sums of numpy, and the numbering of slots."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_lightning.replay.samplers.base import Arrivals, Places, Stored
from claw_lightning.replay.samplers.sum_tree import MAX_TOP, WIDTH, RowSlots, SumTree
from claw_lightning.rollout.ring import LaneRing, RowLayout

SIZES = (1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 63, 64, 65, 500, WIDTH * MAX_TOP, WIDTH * MAX_TOP + 1, 140_000)


def check_sums(tree):
    """Every node is the sum of its children, so nothing can have drifted."""
    for children, parents in zip(tree._nodes, tree._nodes[1:], strict=False):
        sums = children.reshape(-1, WIDTH).sum(axis=1, dtype=np.float64)
        np.testing.assert_allclose(parents, sums, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("size", SIZES)
def test_whole_numbers_are_found_exactly(size, dtype):
    rng = np.random.default_rng(size)
    tree, leaves = SumTree(size, dtype), rng.integers(0, 4, size) * (rng.random(size) < 0.3)
    leaves[rng.integers(size)] = 3
    tree.set_range(0, size, leaves)
    cumulative = leaves.cumsum()
    assert len(tree) == size
    assert tree.total == cumulative[-1]
    mass = rng.integers(0, cumulative[-1], 2000)
    mass[:2] = 0, cumulative[-1] - 1
    np.testing.assert_array_equal(tree.find(mass.astype(float)), cumulative.searchsorted(mass, side="right"))
    np.testing.assert_array_equal(tree.find(mass + 0.5), cumulative.searchsorted(mass, side="right"))
    np.testing.assert_array_equal(tree[:], leaves)
    check_sums(tree)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from((1, 5, 8, 9, 70, 513, 20_000)), st.booleans())
def test_any_history_of_settings(data, size, whole):
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    tree, leaves = SumTree(size, np.uint8 if whole else np.float32), np.zeros(size, np.float32)
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(1, 40))
        values = rng.integers(0, 3, count) if whole else np.exp(rng.normal(0, 8, count)) * rng.integers(0, 2, count)
        if data.draw(st.booleans()):
            index = rng.integers(0, size, count)
            if data.draw(st.booleans()):
                index[:] = index[0]
            tree.set(index, values)
            for i, value in zip(index, values, strict=True):
                leaves[i] = value
        else:
            start = int(rng.integers(size))
            stop = min(size, start + count)
            tree.set_range(start, stop, values[: stop - start])
            leaves[start:stop] = values[: stop - start]
    np.testing.assert_array_equal(tree[:], leaves)
    np.testing.assert_array_equal(tree.get(np.arange(size)), leaves)
    check_sums(tree)
    cumulative = leaves.cumsum(dtype=np.float64)
    np.testing.assert_allclose(tree.total, cumulative[-1], rtol=1e-13)
    if tree.total == 0:
        with pytest.raises(ValueError, match="all leaves are zero"):
            tree.find(np.zeros(3))
        return
    # Borders themselves, a hair to either side of them, the ends, and whatever lies between.
    borders = cumulative[rng.integers(0, size, 50)]
    mass = np.concatenate(
        [
            [0.0, tree.total],
            borders,
            np.nextafter(borders, 0),
            np.nextafter(borders, np.inf),
            rng.random(50) * tree.total,
        ]
    )
    found = tree.find(mass)
    assert (leaves[found] > 0).all()
    slack = 1e-12 * tree.total
    assert (cumulative[found] >= mass - slack).all()
    assert (cumulative[found] - leaves[found] <= mass + slack).all()


def test_rounding_never_leads_to_a_leaf_without_value():
    rng = np.random.default_rng(0)
    for scale in (1e-30, 1.0, 1e30):
        leaves = np.zeros(5000, np.float32)
        some = rng.choice(5000, 700, replace=False)
        leaves[some] = (rng.random(700) + 0.1) * scale * 10.0 ** rng.integers(-6, 6, 700)
        tree = SumTree(5000)
        tree.set_range(0, 5000, leaves)
        borders = np.concatenate([leaves.cumsum(dtype=np.float64), [tree.total, 2 * tree.total]])
        for mass in (borders, np.nextafter(borders, 0), np.nextafter(borders, np.inf)):
            assert (leaves[tree.find(mass)] > 0).all()
            np.testing.assert_array_equal(leaves[tree._find_carefully(mass)] > 0, True)


def test_the_careful_way_finds_the_same_leaves():
    rng = np.random.default_rng(1)
    tree = SumTree(30_000, np.uint8)
    tree.set_range(0, 30_000, rng.integers(0, 5, 30_000))
    mass = rng.integers(0, int(tree.total), 3000) + 0.25
    np.testing.assert_array_equal(tree.find(mass), tree._find_carefully(mass))


def test_the_last_of_several_values_for_one_leaf_wins():
    tree = SumTree(100)
    tree.set(np.array([7, 3, 7, 7, 3]), np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert tree.get(np.array([7, 3])).tolist() == [4.0, 5.0]
    assert tree.total == 9.0


def test_leaves_in_proportion_to_their_values():
    rng = np.random.default_rng(2)
    tree, leaves = SumTree(70), rng.random(70).astype(np.float32) * (rng.random(70) < 0.7)
    tree.set_range(0, 70, leaves)
    counts = np.bincount(tree.find(rng.random(100_000) * tree.total), minlength=70)
    some = leaves > 0
    expected = 100_000 * leaves[some] / leaves.sum()
    assert counts[~some].sum() == 0
    assert ((counts[some] - expected) ** 2 / expected).sum() < some.sum() + 4 * np.sqrt(2 * some.sum())


def test_no_mass_finds_nothing():
    tree = SumTree(10)
    tree.set_range(0, 10, 1.0)
    assert tree.find(np.zeros(0)).shape == (0,)
    tree.set_range(4, 4, 9.0)
    assert tree.total == 10.0


def test_a_tree_without_leaves_is_refused():
    with pytest.raises(ValueError, match="at least one leaf"):
        SumTree(0)


def arrivals(ring, first, steps, lanes):
    empty = np.zeros((steps, lanes), np.int32)
    return Arrivals(ring, first, empty, empty == 0, empty, empty)


def slots_of_two():
    return RowSlots([LaneRing(RowLayout(1, 1), 8, 2), LaneRing(RowLayout(1, 1), 6, 3)])


def test_slots_and_places_are_inverse():
    slots = slots_of_two()
    slots.follow(arrivals(0, 0, 21, 2))
    slots.follow(arrivals(1, 0, 8, 3))
    every = np.arange(slots.size)
    assert slots.size == 8 * 2 + 6 * 3
    places = slots.places(every)
    again, there = slots.slots(places)
    np.testing.assert_array_equal(again, every)
    assert there.all()
    assert set(places.step[places.ring == 0]) == set(range(13, 21))
    assert set(places.step[places.ring == 1]) == set(range(2, 8))
    older = places._replace(step=places.step - np.array([8, 6])[places.ring])
    np.testing.assert_array_equal(slots.slots(older)[0], every)
    assert not slots.slots(older)[1].any()
    assert not slots.slots(places._replace(step=places.step + np.array([8, 6])[places.ring]))[1].any()


def test_slots_of_steps_below_the_span_are_given_back_once():
    slots = slots_of_two()
    slots.follow(arrivals(0, 0, 8, 2))
    assert slots.expire(Stored([(3, 7), (0, 0)], [2, 3])) == [(0, 6)]
    assert slots.expire(Stored([(3, 7), (0, 0)], [2, 3])) == []
    slots.follow(arrivals(0, 8, 5, 2))  # overwrites steps 0 to 4
    assert slots.expire(Stored([(7, 12), (0, 0)], [2, 3])) == [(10, 14)]
    assert not slots.slots(Places(np.array([0]), np.array([6]), np.array([0])))[1].any()
    slots.follow(arrivals(0, 30, 2, 2))  # steps 13 to 29 were never seen
    assert slots.expire(Stored([(31, 32), (0, 0)], [2, 3])) == [(0, 14)]


def test_slots_of_skipped_steps_are_given_back():
    slots = slots_of_two()
    assert slots.follow(arrivals(0, 0, 6, 2)) == []
    assert slots.follow(arrivals(0, 9, 2, 2)) == [(12, 16), (0, 2)]
    assert slots.follow(arrivals(0, 100, 2, 2)) == [(8, 16), (0, 8)]  # the whole ring


def test_what_is_too_new_is_chosen_anew_and_that_has_an_end():
    slots, rng = slots_of_two(), np.random.default_rng(0)
    slots.follow(arrivals(0, 0, 8, 2))

    def choose(number):
        return slots.places(rng.integers(0, 16, number))

    places = slots.choose(Stored([(0, 5), (0, 0)], [2, 3]), 200, choose)
    assert set(places.step.tolist()) == set(range(5))
    with pytest.raises(RuntimeError, match=r"^replay: .* too new"):
        slots.choose(Stored([(0, 0), (0, 0)], [2, 3]), 10, choose)
