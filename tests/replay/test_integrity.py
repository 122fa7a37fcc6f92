"""Integrity: whatever writers do, a batch holds whole rows of one episode, and a draw can be repeated to the bit.

Writers run at full speed or are killed within steps, on rings so short that the sampler is overtaken all the time.
"""

import json
import time

import numpy as np
import pytest
import torch

from claw_lightning.replay import ReplayMemory
from claw_lightning.replay.memory import Draw
from claw_lightning.rollout.ring import HAS_FINAL, TERMINATED
from tests.builders import PATIENCE, sample_unless_overtaken, start_writer, without_successors
from tests.fakes.writers import FOREVER, OBS_SIZE, episode_ring, episode_rows, last_position, write_episodes

NUM_LANES = 8


def faults(batch, same_step):
    """How many valid rows of a batch are not whole, follow no row of their episode or have a wrong successor."""
    layout = batch.layout
    length = 1 if batch.valid is None else batch.rows.shape[2]
    rows = batch.rows.reshape(-1, length, layout.words).numpy()
    next_obs = batch.next_obs.reshape(-1, length, OBS_SIZE).numpy()
    valid = np.ones(rows.shape[:2], bool) if batch.valid is None else batch.valid.reshape(-1, length).numpy()
    torn = int(length > 1 and (without_successors(batch)[~valid] != 0).any())
    # Each row tells of itself, in one word each, what all its words should be.
    kept, after = rows[valid], next_obs[valid]
    step, lane = np.divmod(kept[:, 0].astype(np.int64), NUM_LANES)
    life, position = np.divmod(kept[:, 1].astype(np.int64), 16)
    expected = episode_rows(layout, NUM_LANES, step, lane, life, position).view(np.int32)
    got = kept.copy().view(np.int32)
    if same_step:
        start, _ = layout.fields["final_index"]
        expected[:, start] = got[:, start]
    wrong = (expected != got).any(1)
    # Within an episode one step on, at its end the true last observation.
    next_rows = np.tile([NUM_LANES, 1], OBS_SIZE // 2).astype(np.float32) + kept[:, :OBS_SIZE]
    ends = position == last_position(lane)
    if same_step:
        next_rows[ends] = -kept[ends, :OBS_SIZE]
    wrong_next = (next_rows != after).any(1)
    # A terminated row needs no successor: the writer may have died right after it. Whole it is all the same.
    free = (layout.view(kept, "flags") & TERMINATED) != 0 if not same_step else np.zeros(len(kept), bool)
    whole = (after == np.tile(after[:, :2], OBS_SIZE // 2)).all(1) & (after[:, 0] == next_rows[:, 0])
    torn += int((wrong | np.where(free, ~whole, wrong_next)).sum())
    # Rows of a segment follow each other in one episode.
    both = valid[:, 1:]
    moved = rows[:, 1:, :OBS_SIZE] - rows[:, :-1, :OBS_SIZE]
    return torn + int((moved != np.tile([NUM_LANES, 1], OBS_SIZE // 2)).any(2)[both].sum())


def uneven(moments):
    """Whether moments hold a torn row: all even components are one number, and so are all odd ones."""
    _, mean, squares = moments
    return any((x.reshape(-1, 2) != x[:2]).any() for x in (mean, squares))


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("length, same_step", [(1, False), (1, True), (3, False), (3, True)])
def test_whole_rows_from_a_writer_at_full_speed(length, same_step):
    ring = episode_ring(-1, 200, NUM_LANES, same_step)
    memory, rows, counted, overtaken = ReplayMemory([ring], 0), 0, 0.0, 0
    with start_writer("episodes", ring.block.fd, FOREVER, 200, NUM_LANES, int(same_step)) as writer:
        try:
            while rows < 100_000 * length or overtaken < 10:
                if memory.stored == 0:
                    time.sleep(0.001)
                    continue
                if (batch := sample_unless_overtaken(memory, 1, 1024, length)) is None:
                    continue
                assert faults(batch, same_step) == 0
                assert not uneven(batch.moments)
                rows += 1024 * length
                counted += batch.moments[0]
                overtaken += len(memory.last_draw.checks) > 1 and memory.last_draw.checks[0] > memory.last_draw.heads
                assert counted <= batch.env_steps
        finally:
            writer.kill()


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("same_step", [False, True])
def test_whole_rows_from_writers_that_are_killed_within_steps(same_step):
    ring = episode_ring(-1, 32, NUM_LANES, same_step)
    memory, head, lives = ReplayMemory([ring], 0), 0, set()
    writer = start_writer("dying_episodes", ring.block.fd, 60, 32, NUM_LANES, int(same_step))
    with writer:
        ended = False
        while not ended:
            ended = writer.poll() is not None
            assert ring.head >= head
            head = ring.head
            if memory.stored < 8 * NUM_LANES:
                time.sleep(0.001)
                continue
            for length in (1, 3):
                if (batch := sample_unless_overtaken(memory, 1, 256, length)) is None:
                    continue
                assert faults(batch, same_step) == 0
                assert not uneven(batch.moments)
                lives |= set(batch.field("previous_option").flatten().tolist())
    assert writer.returncode == 0  # some left half a step
    assert len(lives) > 1


def same(a, b):
    """Whether two batches are equal to the bit."""
    pairs = [(a.rows, b.rows), (a.next_obs, b.next_obs)] + ([] if a.valid is None else [(a.valid, b.valid)])
    equal = all(torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs)
    moments = all(np.array_equal(x, y) for x, y in zip(a.moments, b.moments))
    return equal and moments and a.env_steps == b.env_steps


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("length, same_step", [(1, False), (3, True)])
def test_a_draw_is_repeated_to_the_bit(length, same_step):
    rings = [episode_ring(-1, num_steps, NUM_LANES, same_step) for num_steps in (160, 240)]
    memory, taken, redrawn, shortened = ReplayMemory(rings, 5), [], 0, 0
    writers = [start_writer("episodes", r.block.fd, FOREVER, r.num_steps, NUM_LANES, int(same_step)) for r in rings]
    try:
        while len(taken) < 20 or redrawn < 3 or shortened < 3:
            if memory.stored < 100:
                time.sleep(0.001)
                continue
            if (batch := sample_unless_overtaken(memory, 2, 200, length)) is None:
                continue
            draw = memory.last_draw
            # Only what the checks of the writers' progress have changed is worth a proof.
            redrawn += len(draw.checks) > 1 and max(np.subtract(draw.checks[0], draw.heads)) > 2
            shortened += max(np.subtract(draw.moments, draw.heads)) > 2
            taken.append((batch, json.loads(json.dumps(draw.to_json()))))
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    copies = [episode_ring(-1, ring.num_steps, NUM_LANES, same_step) for ring in rings]
    replica = ReplayMemory(copies, 5)
    for batch, values in taken:
        draw = Draw.from_json(values)
        for ring, head in zip(copies, draw.heads):
            write_episodes(ring, head - ring.head, begin=0)
        assert same(batch, replica.sample(2, 200, length, script=draw))
        assert replica.last_draw == draw


def test_a_script_of_other_rings_is_refused():
    ring = episode_ring(-1, 16, NUM_LANES, False)
    write_episodes(ring, 12)
    memory = ReplayMemory([ring], 0)
    memory.sample(1, 10)
    draw = memory.last_draw
    assert Draw.from_json(draw.to_json()) == draw
    assert draw.heads == (12,) and set(draw.checks) == {(12,)} and draw.moments == (12,)
    write_episodes(ring, 1, begin=0)
    with pytest.raises(ValueError, match=r"rings at steps \(12,\), these are at \(13,\)"):
        memory.sample(1, 10, script=draw)
    with pytest.raises(ValueError, match="another draw"):
        memory.sample(1, 10, script=draw._replace(heads=(13,), checks=()))


class Overtaken(np.ndarray):
    """Side table whose writer runs ahead as soon as entries have been copied."""

    run_ahead = None

    def __getitem__(self, key):
        copied = np.asarray(self)[key]
        if Overtaken.run_ahead is not None:
            run_ahead, Overtaken.run_ahead = Overtaken.run_ahead, None
            run_ahead()
        return copied


def test_final_observations_overtaken_after_their_copy_are_not_trusted():
    ring = episode_ring(-1, 32, NUM_LANES, True)
    write_episodes(ring, 32)
    memory, table = ReplayMemory([ring], 0), ring.finals
    ring.finals = table.view(Overtaken)

    def run_ahead():  # the table alone, so that the rows themselves stay intact
        for _ in range(ring.num_finals):
            ring.write_finals(table[[ring.finals_written % ring.num_finals]])

    Overtaken.run_ahead = run_ahead
    batch = memory.sample(1, 400)
    assert Overtaken.run_ahead is None
    # All final observations were lost: none may be left, even though what was copied happens to be right.
    assert faults(batch, True) == 0
    assert not ((batch.field("flags") & HAS_FINAL) != 0).any()
    copy = episode_ring(-1, 32, NUM_LANES, True)
    write_episodes(copy, 32)
    assert same(batch, ReplayMemory([copy], 0).sample(1, 400, script=memory.last_draw))
