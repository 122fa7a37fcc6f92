"""ReplayMemory with samplers other than the uniform one: what it hands out, in which order, and again from a record."""

import copy
import json

import numpy as np
import pytest
import torch

from claw_lightning.replay import ReplayMemory
from claw_lightning.replay.memory import Draw
from claw_lightning.replay.samplers import ByOption, Fresh, Mixture, OptionSegments, Prioritized, Recent, Uniform
from claw_lightning.rollout.ring import BORDER, FIRST, QUARANTINED, SWITCHED, TRUNCATED, LaneRing, RowLayout
from tests.builders import write_step

SAMPLERS = {
    "uniform": Uniform(),
    "prioritized": Prioritized(),
    "by option": ByOption(correct=True),
    "recent": Recent(half_life=60.0),
    "fresh": Fresh(scale=5.0),
    "segments": OptionSegments(),
    "mixture": Mixture([Uniform(), Prioritized(), Recent()], [1.0, 2.0, 1.0]),
}
EPISODE = [FIRST | SWITCHED, 0, 0, SWITCHED, 0, SWITCHED | QUARANTINED, 0, 0, SWITCHED, 0, TRUNCATED, BORDER]


def ring_of(num_steps, num_lanes, number):
    return LaneRing(RowLayout(3, 1), num_steps, num_lanes), number


def play(ring, number, last):
    """Observation [step, lane, ring]; lanes are out of step, options and versions change with the steps."""
    view = ring.layout.view
    while ring.head < last:
        t, lanes = ring.head, np.arange(ring.num_lanes)
        rows = ring.slot()
        write_flags = [EPISODE[(t + 5 * lane) % len(EPISODE)] for lane in lanes]
        obs = np.column_stack([np.full(len(lanes), t), lanes, np.full(len(lanes), number)])
        write_step(ring, obs, write_flags)
        view(rows, "option")[:] = (t // 3 + lanes) % 3
        view(rows, "version")[:] = t // 4


def memory_of(name, heads=(70, 45), seed=0):
    rings = [ring_of(40, 3, 0), ring_of(64, 2, 1)]
    for (ring, number), head in zip(rings, heads, strict=True):
        play(ring, number, head)
    return ReplayMemory([ring for ring, _ in rings], seed, copy.deepcopy(SAMPLERS[name]), num_options=3)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_places_and_weights_are_those_of_the_rows(name, length):
    memory = memory_of(name)
    memory.sampler.wants_errors = True  # so that places are told
    batch = memory.sample(3, 500, length)
    first = batch.obs if length == 1 else batch.obs[:, :, 0]
    places = batch.places
    for column, values in enumerate((places.step, places.lane, places.ring)):
        np.testing.assert_array_equal(first[..., column].flatten(), values)
    if batch.weights is not None:
        assert batch.weights.shape == (3, 500) and batch.weights.dtype == torch.float32
        np.testing.assert_array_equal(batch.weights.flatten(), places.weight)
    flags = batch.field("flags") if length == 1 else batch.field("flags")[:, :, 0]
    assert not (flags & (BORDER | QUARANTINED)).any()
    # Every update sees all rings and, of a mixture, all sources.
    kinds = places.ring if places.source is None else places.ring + 2 * places.source
    counts = [np.bincount(part, minlength=kinds.max() + 1) for part in kinds.reshape(3, 500)]
    assert np.std(counts, axis=0).max() < 60 and np.min(counts) > 0


def test_segments_of_options_end_with_them():
    memory = memory_of("segments")
    batch = memory.sample(1, 2000, 8)
    valid, switched, obs = batch.valid[0], batch.switched[0], batch.obs[0, :, 0].int()
    assert switched[:, 0].all() and not (switched & valid)[:, 1:].any()
    heads = torch.tensor([ring.head for ring in memory.rings])[obs[:, 2]]
    inside = obs[:, 0] < heads - 4
    position = (obs[:, 0] + 5 * obs[:, 1]) % len(EPISODE)
    assert position.unique().tolist() == [0, 3, 8]
    # The second option's last row has a quarantined successor.
    assert (valid.sum(1) == torch.where(position == 3, 1, 3))[inside].all()


@pytest.mark.parametrize("name", SAMPLERS)
def test_recorded_draws_are_repeated_to_the_bit(name):
    memory, replica = memory_of(name, (4, 3), 5), memory_of(name, (4, 3), 5)
    for heads in ((4, 3), (9, 30), (44, 31), (90, 100), (91, 180)):
        for ring, number, head in zip(memory.rings, (0, 1), heads, strict=True):
            play(ring, number, head)
        memory.updates = heads[0] // 4
        batch = memory.sample(2, 50, 3)
        script = Draw.from_json(json.loads(json.dumps(memory.last_draw.to_json())))
        assert script == memory.last_draw
        for ring, number, head in zip(replica.rings, (0, 1), script.heads, strict=True):
            play(ring, number, head)
        replica.updates = memory.updates
        again = replica.sample(2, 50, 3, script)
        assert torch.equal(batch.rows.view(torch.int32), again.rows.view(torch.int32))
        assert (batch.weights is None) == (again.weights is None)
        if batch.weights is not None:
            assert torch.equal(batch.weights, again.weights)
        if batch.places is not None:
            errors = np.linspace(0.0, 9.0, 100).astype(np.float32)
            memory.sampler.update(batch.places, errors)
            replica.sampler.update(again.places, errors)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_writer_that_passes_everything_that_was_followed(monkeypatch, name):
    """Between the choice and the copy it goes round; the call begins anew and takes note anew."""
    memory, rounds = memory_of(name), []
    copy_places = memory._copy_places

    def overtaken(*args):
        if not rounds:
            for ring, number in zip(memory.rings, (0, 1), strict=True):
                play(ring, number, ring.head + 2 * ring.num_steps)
        rounds.append(args)
        return copy_places(*args)

    monkeypatch.setattr(memory, "_copy_places", overtaken)
    batch = memory.sample(1, 300, 2)
    for number, ring in enumerate(memory.rings):
        steps = batch.obs[0, :, 0, 0][batch.obs[0, :, 0, 2] == number]
        assert len(steps) and steps.min() > ring.head - ring.num_steps
    draw = memory.last_draw
    assert len(draw.followed) == 2


def test_experience_of_the_past_is_drawn_and_not_counted():
    (new, _), (old, _) = ring_of(40, 3, 0), ring_of(64, 2, 1)
    play(new, 0, 30)
    play(old, 1, 64)
    memory = ReplayMemory([new], 0, past=[old])
    batch = memory.sample(1, 4000)
    assert memory.inserted == batch.env_steps == 90
    assert set(batch.obs[0, :, 2].tolist()) == {0.0, 1.0}
    assert batch.moments[0] > 90  # the past's observations are new to the normaliser
    known = ReplayMemory([new], 0, past=[old], counted=True)
    assert known.sample(1, 10).moments[0] == 0
