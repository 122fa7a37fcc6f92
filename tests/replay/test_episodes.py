"""EpisodeIndex against walking from row to row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_lightning.replay.episodes import EpisodeIndex
from claw_lightning.replay.samplers import Arrivals
from claw_lightning.rollout.ring import (
    BORDER,
    FIRST,
    HAS_FINAL,
    QUARANTINED,
    TERMINATED,
    TRUNCATED,
    LaneRing,
    RowLayout,
    usable,
)


def arrivals_of(flags, first, last, ring=0):
    """Rows [first, last) of flags [T, N], of which row ``last`` is the successor."""
    part, after = flags[first:last], flags[first + 1 : last + 1]
    zeros = np.zeros_like(part)
    return Arrivals(ring, first, part, usable(part, after), zeros, zeros)


def index_of(num_steps, num_lanes, rings=1):
    return EpisodeIndex([LaneRing(RowLayout(1, 1), num_steps, num_lanes) for _ in range(rings)])


def walked(flags, step, lane, known):
    """(begin, end) of a row's episode by walking; None if it belongs to none."""
    column = flags[:, lane]
    if column[step] & BORDER:
        return None
    begin = step
    while begin > 0 and not column[begin] & FIRST:
        if column[begin - 1] & (BORDER | TERMINATED | TRUNCATED):
            break
        begin -= 1
    end = step
    while True:
        if column[end] & (TERMINATED | TRUNCATED):
            return begin, end if usable(column[end], column[end + 1]) else end - 1
        if end + 1 >= known:
            return begin, end
        if column[end + 1] & (FIRST | BORDER):
            return begin, end - 1  # its true next observation is not known
        end += 1


ROWS = (0, 0, 0, 0, FIRST, BORDER, QUARANTINED, TERMINATED, TRUNCATED, FIRST | TERMINATED, TRUNCATED | HAS_FINAL)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(6, 40))
def test_any_history_in_any_pieces(data, num_lanes, num_steps):
    lanes = [data.draw(st.lists(st.sampled_from(ROWS), min_size=40, max_size=40)) for _ in range(num_lanes)]
    flags = np.array(lanes, np.int32).T
    index, known = index_of(num_steps, num_lanes), 0
    while known < 39:
        last = min(39, known + data.draw(st.integers(1, num_steps - 4)))
        index.follow(arrivals_of(flags, known, last))
        known = last
        steps = np.repeat(np.arange(max(0, known - num_steps + 2), known), num_lanes)
        columns = np.tile(np.arange(num_lanes), len(steps) // num_lanes)
        begin, end, is_known = index.spans(0, steps, columns)
        for i, (step, lane) in enumerate(zip(steps, columns, strict=True)):
            expected = walked(flags, step, lane, known)
            inside = expected is not None and expected[1] >= step
            assert is_known[i] == inside, (step, lane)
            if inside:
                assert (begin[i], end[i]) == expected, (step, lane)


def test_what_was_lost_in_between_opens_a_new_count():
    flags = np.zeros((30, 1), np.int32)
    flags[0] = FIRST
    index = index_of(16, 1)
    index.follow(arrivals_of(flags, 0, 5))
    index.follow(arrivals_of(flags, 12, 20))  # 5 to 11 were overwritten unseen
    begin, end, known = index.spans(0, np.array([13, 19, 20]), np.zeros(3, int))
    assert begin[:2].tolist() == [12, 12] and end[:2].tolist() == [19, 19] and known.tolist() == [True, True, False]


def test_an_episode_longer_than_the_ring():
    flags = np.zeros((60, 1), np.int32)
    flags[0], flags[50] = FIRST, TRUNCATED
    index = index_of(16, 1)
    for first in range(0, 55, 5):
        index.follow(arrivals_of(flags, first, first + 5))
    begin, end, known = index.spans(0, np.array([45, 50]), np.zeros(2, int))
    assert begin.tolist() == [0, 0] and end.tolist() == [50, 50] and known.all()


@pytest.mark.parametrize("ring", [0, 1])
def test_rings_do_not_know_of_each_other(ring):
    flags = np.zeros((10, 1), np.int32)
    index = index_of(16, 1, rings=2)
    index.follow(arrivals_of(flags, 0, 5, ring))
    assert index.spans(ring, np.array([2]), np.array([0]))[2].all()
    assert not index.spans(1 - ring, np.array([2]), np.array([0]))[2].any()
