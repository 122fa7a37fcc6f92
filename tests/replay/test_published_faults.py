"""Faults of published code as cases: each would give another target than is expected here.

PQL (github.com/Improbable-AI/pql, 2023-08): (a) time-outs are taken out of `done` before the n-step buffer, so that
sums and next observations cross the reset; (b) gamma^n is used for windows that were cut short; (c) rows at the border
of two episodes are stored like others. FastTD3 (github.com/younggyoseo/FastTD3, 2026-05): windows at the write pointer
are cut at sample time, and what lies behind the pointer must not enter them. stable-baselines3 #934: next observations
taken from the following slot are those of the next episode after a time-out.
"""

import numpy as np
import pytest
import torch

from claw_lightning import returns
from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout.ring import LaneRing, RowLayout
from tests.builders import lane_rows, write_step

GAMMA, N = 0.9, 4


def value(obs):
    """What a state is worth here: told apart by its observation, so that a wrong bootstrap shows."""
    return 100.0 + obs[..., 0]


def filled(episodes, num_steps, same_step=False, steps=None):
    """A ring of one lane; observation t, reward 1 + t; returns it with the flags that were written."""
    rows = lane_rows(episodes, same_step)[:steps]
    ring = LaneRing(RowLayout(1, 1, has_finals=same_step), num_steps, 1)
    for t, (_, flags, final) in enumerate(rows):
        slot = ring.head % num_steps
        write_step(ring, [[t]], [flags], {0: [t + 0.5]} if final is not None else None)
        ring.layout.view(ring.rows, "reward")[slot] = 1 + t
    return ring


def targets(ring, count=3000):
    """{step: target} as a critic would get them, with n = 4."""
    batch = ReplayMemory([ring], 0).sample(1, count, N)
    arrival = value(batch.next_obs[0])
    y = returns.executed_path_return(batch.reward[0], batch.terminated[0], batch.valid[0], arrival, GAMMA)
    return dict(zip(batch.obs[0, :, 0, 0].int().tolist(), y.tolist(), strict=True))


def expected(step, end, terminated, final_obs):
    """Sum of rewards from ``step`` up to ``end`` (inclusive) or n of them, then the value of where that leads."""
    last = min(end, step + N - 1)
    total = sum(GAMMA ** (t - step) * (1 + t) for t in range(step, last + 1))
    if last == end and terminated:
        return total
    return total + GAMMA ** (last - step + 1) * value(np.array([final_obs if last == end else last + 1.0]))


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("end", ["truncated", "terminated"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 9])
def test_windows_end_with_their_episode(length, end, same_step):
    """(a), (b), (c) and sb3#934: whatever the distance to the end, a time limit bootstraps from its own last state."""
    ring = filled([(length, end), (12, "truncated")], 64, same_step)
    found = targets(ring)
    last = length - 1
    final = last + (0.5 if same_step else 1.0)  # next-step autoreset shows it in the border row
    for step in range(length):
        assert found[step] == pytest.approx(expected(step, last, end == "terminated", final), rel=1e-6)
    border = length if not same_step else None
    assert border not in found
    # The faults would have given other numbers.
    if end == "truncated" and length > 1:
        wrong_discount = expected(last, last, False, final) - GAMMA * value(np.array([final]))
        assert found[last] != pytest.approx(wrong_discount + GAMMA**N * value(np.array([final])))


def test_a_worker_that_was_restarted_leaves_a_gap_that_nothing_crosses():
    ring = filled([(6, "cut"), (12, "truncated")], 64)
    found = targets(ring)
    assert 5 not in found  # its next observation died with the worker
    for step in range(5):
        last = min(4, step + N - 1)
        total = sum(GAMMA ** (t - step) * (1 + t) for t in range(step, last + 1))
        end = GAMMA ** (last - step + 1) * value(np.array([last + 1.0]))
        assert found[step] == pytest.approx(total + end, rel=1e-6)


@pytest.mark.parametrize("head", [9, 12, 13, 20, 31])
def test_windows_at_the_write_head_are_cut_with_their_own_discount(head):
    """FastTD3: behind the pointer lie the oldest steps, whose rewards and states would look plausible."""
    ring = filled([(40, "cut")], 12, steps=head)
    ring.slot()[:] = -77.0  # half a step in the writing
    found = targets(ring)
    newest = head - 2  # the newest step with a published successor
    assert set(found) == set(range(max(0, head - 10), newest + 1))
    for step, target in found.items():
        assert target == pytest.approx(expected(step, newest, False, newest + 1.0), rel=1e-6)


def test_the_window_of_a_whole_batch_is_cut_row_by_row():
    """One row near an end must not shorten its neighbours."""
    ring = filled([(3, "truncated"), (12, "truncated")], 64)
    batch = ReplayMemory([ring], 0).sample(1, 2000, N)
    step, steps = batch.obs[0, :, 0, 0], batch.valid[0].sum(1)
    assert torch.equal(steps[step < 3], 3 - step[step < 3].long())
    inside = (step >= 4) & (step <= 11)
    assert (steps[inside] == N).all()
