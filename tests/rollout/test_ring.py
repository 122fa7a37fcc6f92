"""LaneRing: layout, publication, what readers may trust, which rows may be learned from."""

import os
import time

import numpy as np
import pytest

from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout.ring import (
    BORDER,
    FIRST,
    HAS_FINAL,
    INTEGER_FIELDS,
    QUARANTINED,
    SWITCHED,
    TERMINATED,
    TRUNCATED,
    LaneRing,
    RowLayout,
    usable,
)
from tests.builders import PATIENCE, collector_of, lane_rows, ring_of_lanes, start_writer, write_step
from tests.fakes.fake_envs import CountingEnv
from tests.fakes.writers import FOREVER

NUM_STEPS, NUM_LANES = 8, 3
VECTORS = {"obs": 5, "states": 2, "action": 4}


def make_ring(num_steps=NUM_STEPS, num_lanes=NUM_LANES, **layout):
    return LaneRing(RowLayout(1, 1, **layout), num_steps, num_lanes)


@pytest.mark.parametrize("states, finals", [(0, False), (2, False), (0, True), (2, True)])
def test_fields_lie_side_by_side_without_gaps(states, finals):
    layout = RowLayout(5, 4, states, finals)
    spans = list(layout.fields.values())
    assert spans[0][0] == 0 and spans[-1][1] == layout.words
    assert all(before[1] == after[0] for before, after in zip(spans, spans[1:]))
    assert layout.words == 5 + states + 4 + 3 + 5 + finals
    assert layout.row_bytes == 4 * layout.words
    assert ("states" in layout.fields, "final_index" in layout.fields) == (states > 0, finals)
    assert list(layout.fields)[0] == "obs"  # final observations and successors rely on it


def test_every_field_keeps_its_four_bytes():
    layout = RowLayout(5, 4, 2, True)
    rows, rng = np.zeros((6, layout.words), np.float32), np.random.default_rng(0)
    written = {}
    for name in layout.fields:
        shape = (6, VECTORS[name]) if name in VECTORS else (6,)
        if name in INTEGER_FIELDS:  # all bit patterns, also those that are NaN as a float
            written[name] = rng.integers(-(2**31), 2**31, shape).astype(np.int32)
            written[name][:2] = [-1, 0x7FC00001]
        else:
            written[name] = rng.standard_normal(shape).astype(np.float32)
        layout.view(rows, name)[...] = written[name]
    copied = rows[::2].copy()
    for name, values in written.items():
        np.testing.assert_array_equal(layout.view(rows, name), values)
        np.testing.assert_array_equal(layout.view(copied, name), values[::2])


def test_another_mapping_of_the_block_sees_the_same():
    ring = LaneRing(RowLayout(2, 1, 1, True), NUM_STEPS, NUM_LANES)
    other = LaneRing(RowLayout(2, 1, 1, True), NUM_STEPS, NUM_LANES, os.dup(ring.block.fd))
    ring.slot()[:] = 3.0
    index = ring.write_finals(np.full((2, 3), 4.0, np.float32))
    ring.publish()
    assert (other.head, other.finals_written) == (1, 2)
    assert (other.rows[0] == 3.0).all() and (other.finals[index] == 4.0).all()
    assert index.dtype == np.int32
    assert os.fstat(ring.block.fd).st_size == LaneRing.bytes_needed(ring.layout, NUM_STEPS, NUM_LANES)
    other.block.close()
    other.block.close()  # idempotent


def test_a_ring_without_room_for_its_guard_is_refused():
    with pytest.raises(ValueError, match="too short"):
        make_ring(num_steps=4)
    assert make_ring(num_steps=5).readable() == (0, 0)


def test_readable_and_intact_at_every_head():
    ring = make_ring()
    for head in range(4 * NUM_STEPS):
        assert ring.head == head
        first, last = ring.readable()
        # A readable step has a published successor and is `guard` steps away from being overwritten.
        expected = [t for t in range(head) if t + 1 <= head - 1 and t - ring.guard >= head - NUM_STEPS]
        assert list(range(first, last)) == expected
        # Slots that hold what they held: the one being written belongs to step head - T.
        steps = np.arange(max(0, head - 2 * NUM_STEPS), head)
        np.testing.assert_array_equal(ring.intact(steps), steps > head - NUM_STEPS)
        ring.slot()[:] = head
        assert ring.head == head  # not visible before it is published
        ring.publish()
        assert (ring.rows[head % NUM_STEPS] == head).all()


def test_a_step_read_long_ago_is_not_trusted():
    ring = make_ring()
    for _ in range(NUM_STEPS):
        ring.publish()
    steps = np.arange(*ring.readable())
    assert ring.intact(steps).all()
    for _ in range(NUM_STEPS):
        ring.publish()
    assert not ring.intact(steps).any()


@pytest.mark.parametrize("head", [0, 3, NUM_STEPS, NUM_STEPS + 3])
def test_a_writer_that_dies_within_a_step(head):
    ring = make_ring(has_finals=True)
    for t in range(head):
        write_step(ring, [[t]] * NUM_LANES, [0] * NUM_LANES)
    before = ring.readable()
    ring.slot()[0] = -9.0  # half a step, one final observation, then the process is gone
    ring.write_finals(np.full((1, 1), -9.0, np.float32))
    assert ring.head == head and ring.readable() == before

    successor = LaneRing(ring.layout, NUM_STEPS, NUM_LANES, os.dup(ring.block.fd))
    write_step(successor, [[head]] * NUM_LANES, [FIRST] * NUM_LANES)
    assert ring.head == head + 1
    np.testing.assert_array_equal(ring.layout.view(ring.rows[head % NUM_STEPS], "obs"), [[head]] * NUM_LANES)


@pytest.mark.parametrize(
    "flags, next_flags, expected",
    [
        (0, 0, True),
        (FIRST | SWITCHED, SWITCHED, True),
        (BORDER, FIRST, False),
        (BORDER, 0, False),
        (QUARANTINED, 0, False),
        (QUARANTINED | TERMINATED, FIRST, False),
        (0, FIRST, False),  # worker restart
        (TRUNCATED, FIRST, False),  # final observation lost
        (TRUNCATED, BORDER, True),  # next-step autoreset: the border row holds it
        (TERMINATED, BORDER, True),
        (TERMINATED, FIRST, True),  # nothing is bootstrapped
        (TRUNCATED | HAS_FINAL, FIRST, True),
        (TERMINATED | HAS_FINAL, FIRST, True),
        (TRUNCATED | HAS_FINAL, FIRST | QUARANTINED, True),  # its next observation lies in the side table
        (0, QUARANTINED, False),
        (TRUNCATED, BORDER | QUARANTINED, False),
        (TERMINATED, BORDER | QUARANTINED, False),  # its next observation may be NaN, which no weight of zero removes
    ],
)
def test_usable(flags, next_flags, expected):
    assert usable(np.array([[flags]], np.int32), np.array([[next_flags]], np.int32)).tolist() == [[expected]]


def test_final_observations_that_were_overwritten_are_not_drawn():
    same_step = [(1, "truncated")] * 40
    ring = ring_of_lanes([lane_rows(same_step, same_step=True)], same_step=True)
    assert ring.num_finals == 10  # of 40 rows, each with its own entry
    batch = ReplayMemory([ring], 0).sample(1, 500)
    assert set(batch.obs[0, :, 0].tolist()) == set(range(31, 39))  # 39 has no successor yet, 30 shares 40's entry
    np.testing.assert_array_equal(batch.next_obs[0, :, 0], batch.obs[0, :, 0])
    assert (batch.next_obs[0, :, 1] == 1).all()


@pytest.mark.timeout(PATIENCE)
def test_no_torn_row_from_a_writer_at_full_speed():
    num_steps, num_lanes, obs_size = 16, 8, 64
    layout = RowLayout(obs_size, 1)
    ring = LaneRing(layout, num_steps, num_lanes)
    rng, trusted, overtaken, torn = np.random.default_rng(0), 0, 0, 0
    with start_writer("ring", ring.block.fd, FOREVER, obs_size, num_steps, num_lanes) as writer:
        try:
            while torn == 0 and (trusted < 1_000_000 or overtaken < 1000):
                first, last = ring.readable()
                if last <= first:
                    time.sleep(0.001)
                    continue
                steps, lanes = rng.integers(first, last, 400), rng.integers(0, num_lanes, 400)
                rows = ring.rows[steps % num_steps, lanes].view(np.int32)
                successors = ring.rows[(steps + 1) % num_steps, lanes].view(np.int32)
                fine = ring.intact(steps)
                trusted += int(fine.sum())
                overtaken += int((~fine).sum())
                expected = (steps * num_lanes + lanes)[:, None]
                torn += int(((rows != expected).any(1) | (successors != expected + num_lanes).any(1))[fine].sum())
        finally:
            writer.kill()
    assert torn == 0


@pytest.mark.parametrize("same_step", [False, True])
def test_the_collector_publishes_a_step_only_when_it_is_whole(same_step):
    autoreset = "same_step" if same_step else "next_step"
    collector, ring, _ = collector_of(CountingEnv(num_envs=NUM_LANES, autoreset=autoreset), num_steps=NUM_STEPS)
    publish, published = ring.publish, []

    def remember():
        published.append((ring.slot().view(np.int32).copy(), ring.finals.copy(), ring.finals_written))
        publish()
        ring.slot().view(np.int32)[:] = -77  # no word of it may be left as it was

    ring.publish = remember
    for step in range(3 * NUM_STEPS):
        collector.step()
        rows, finals, written = published[step]
        np.testing.assert_array_equal(rows, ring.rows[step % NUM_STEPS].view(np.int32))
        assert not (rows == -77).any()
        np.testing.assert_array_equal(finals, ring.finals)
        assert written == ring.finals_written and ring.head == step + 1
