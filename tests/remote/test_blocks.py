"""Blocks: a ring's steps arrive in another one as they were, whatever they point at."""

import numpy as np
import pytest

from claw_lightning.remote.blocks import (
    LEAST_STEPS,
    MOST_STEPS,
    Progress,
    append_block,
    cut_block,
    host_layout,
    host_steps,
    unsent_limit,
)
from claw_lightning.rollout.envs.diagnostic import CodedEnv
from claw_lightning.rollout.envs.four_rooms import FourRoomsEnv
from claw_lightning.rollout.ring import HAS_FINAL, LaneRing, RowLayout
from tests.builders import collector_of, write_step


def pour(source, target, sent, most_bytes=1 << 30):
    """Send all that is new; returns the blocks."""
    blocks = []
    while sent.head < source.head:
        blocks.append(cut_block(source, sent, most_bytes))
        append_block(target, blocks[-1])
    return blocks


@pytest.mark.parametrize("autoreset", ["next_step", "same_step"])
def test_rows_and_final_observations_are_the_same_around_the_ends_of_both_rings(autoreset):
    env = CodedEnv(num_envs=3, seed=5, autoreset=autoreset, max_length=4, states_size=2, mark_process=False)
    collector, source, _ = collector_of(env, num_steps=LEAST_STEPS)
    target, sent = LaneRing(source.layout, 200, 3), Progress()
    expected, finals = [], {}
    view, rng = source.layout.view, np.random.default_rng(0)
    while source.head < 300:
        for _ in range(rng.integers(1, unsent_limit(source))):
            collector.step()
            rows = source.rows[(source.head - 1) % LEAST_STEPS].copy()
            expected.append(rows)
            if source.layout.has_finals:
                for place in view(rows, "final_index")[(view(rows, "flags") & HAS_FINAL) != 0]:
                    finals[int(place)] = source.finals[place % source.num_finals].copy()
        pour(source, target, sent, most_bytes=4 * 3 * source.layout.row_bytes)
        assert target.head == source.head and target.finals_written == source.finals_written
        for step in range(max(0, target.head - 200), target.head):
            assert target.rows[step % 200].tobytes() == expected[step].tobytes()
    for place in range(target.finals_written - target.num_finals, target.finals_written):
        if place in finals:
            assert target.finals[place % target.num_finals].tobytes() == finals[place].tobytes()
    assert bool(finals) == (autoreset == "same_step")


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_images_arrive_compressed_or_not(codec):
    env = FourRoomsEnv(num_envs=2, seed=1, pixels=True)
    collector, source, _ = collector_of(env, num_steps=LEAST_STEPS, codec=codec, policy={"actor": "categorical"})
    layout = RowLayout(**source.layout.settings())
    target, sent, images = LaneRing(layout, 40, 2), Progress(), []
    for step in range(100):
        collector.step()
        images.append(pixels(source, step))
        if step % 7 == 0 or step == 99:
            pour(source, target, sent)
    assert codec == "none" or target.oldest_image() <= 80
    for step in range(80, 100):
        np.testing.assert_array_equal(pixels(target, step), images[step])


def pixels(ring, step):
    """Images [N, bytes] of a step."""
    rows, view = ring.rows[step % ring.num_steps], ring.layout.view
    if not ring.layout.has_arena:
        return view(rows, "image").copy()
    places = view(rows, "image_place")
    offsets = np.array(places[:, :2], order="C").view(np.int64)[:, 0]
    return np.stack([ring.decode_image(ring.read_image(int(o), int(n))) for o, n in zip(offsets, places[:, 2])])


def test_a_ring_goes_on_where_the_learners_has_come_to():
    source, target = (
        LaneRing(RowLayout(1, 1, has_finals=True), 64, 1),
        LaneRing(RowLayout(1, 1, has_finals=True), 16, 1),
    )
    target.begin_at(1000, 70)
    source.begin_at(1000, 70)
    write_step(source, [[1.0]], [0], {0: [4.0]})
    pour(source, target, Progress(1000, 70))
    assert (target.head, target.finals_written) == (1001, 71)
    assert target.finals[70 % target.num_finals, 0] == 4.0
    assert target.layout.view(target.rows[1000 % 16], "final_index")[0] == 70


def test_what_does_not_follow_is_refused():
    source, target = LaneRing(RowLayout(1, 1), 64, 2), LaneRing(RowLayout(1, 1), 16, 2)
    write_step(source, [[1.0], [2.0]], [0, 0])
    block = cut_block(source, Progress(), 1)
    append_block(target, block)
    with pytest.raises(ValueError, match="does not follow step 1"):
        append_block(target, block)
    with pytest.raises(ValueError, match="rows"):
        append_block(LaneRing(RowLayout(1, 1), 16, 3), block)


def test_the_ring_on_a_node_is_bounded_in_steps_and_bytes():
    assert host_steps(RowLayout(1, 1), 1) == MOST_STEPS
    assert host_steps(RowLayout(211, 20), 4096) == LEAST_STEPS
    middle = host_steps(RowLayout(211, 20), 16)
    assert LEAST_STEPS < middle < MOST_STEPS
    images = RowLayout(1, 1, image_shape=(3, 64, 64), image_codec="zlib", image_bytes=1)
    assert host_layout(images).image_bytes == 3 * 64 * 64 and host_layout(images).row_bytes == images.row_bytes
