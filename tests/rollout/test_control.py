"""Control block: every word reaches the other side and none disturbs another."""

import os

import pytest

from claw_lightning.rollout import control as phases
from claw_lightning.rollout.control import PHASES, TIMERS, Control


def test_a_new_block_is_zero():
    control = Control()
    assert (control.phase, control.version, control.steps_allowed, control.quarantined) == (0, 0, 0, 0)
    assert control.stop is False
    assert control.timers.tolist() == [0.0] * len(TIMERS)


def test_words_cross_and_do_not_overlap():
    learner = Control()
    worker = Control(os.dup(learner.block.fd))
    worker.beat(phases.EVALUATE)
    worker.version = 2**40
    worker.add_quarantined(3)
    worker.add_quarantined(4)
    worker.timers += [1.0, 2.0, 3.0, 4.0, 5.0]
    learner.steps_allowed = 2**33
    learner.stop = True
    for side in (learner, worker):
        assert side.phase == phases.EVALUATE
        assert (side.version, side.quarantined, side.steps_allowed, side.stop) == (2**40, 7, 2**33, True)
        assert side.timers.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    learner.stop = False
    assert worker.stop is False and worker.steps_allowed == 2**33


def test_silence_is_the_time_since_the_last_beat(monkeypatch):
    control, now = Control(), [5_000_000_000]
    monkeypatch.setattr(phases.time, "monotonic_ns", lambda: now[0])
    control.beat(phases.STEP)
    assert control.silence == 0.0
    now[0] += 2_500_000_000
    assert control.silence == pytest.approx(2.5)
    control.beat(phases.WAIT)
    assert (control.silence, control.phase) == (0.0, phases.WAIT)


def test_every_phase_has_a_name():
    numbers = [phases.START, phases.RESET, phases.STEP, phases.PULL, phases.WAIT, phases.EVALUATE]
    assert numbers == list(range(len(PHASES)))
    assert [PHASES[number] for number in numbers] == ["start", "reset", "step", "pull", "wait", "evaluate"]
