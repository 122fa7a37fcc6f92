"""Images in rings: pixels within the rows, or compressed in an arena that a reader never gets a torn image out of."""

import os
import sys

import numpy as np
import pytest

from claw_lightning.rollout.envs.base import EnvError
from claw_lightning.rollout.images import make_codec
from claw_lightning.rollout.ring import INTEGER_FIELDS, LaneRing, RowLayout, image_offsets

SHAPE, SIZE, LANES, STEPS = (3, 5, 5), 75, 2, 16
CODECS = ["none", "zlib", "lz4"]


def layout_of(codec="none", **changes):
    if codec == "lz4":
        pytest.importorskip("lz4.block")
    return RowLayout(**{"obs_size": 2, "action_size": 1, "image_shape": SHAPE, "image_codec": codec, **changes})


def pictures(step, noisy=True):
    """Images [LANES, 3, 5, 5] that tell step and lane; those of odd steps cannot be compressed."""
    images = np.full((LANES, *SHAPE), step % 256, np.uint8)
    images[:, 1] = np.arange(LANES)[:, None, None]
    if noisy and step % 2:
        images = np.random.default_rng(step).integers(0, 256, images.shape, dtype=np.uint8)
    return images


def write(ring, images):
    ring.write_images(images)
    ring.publish()


def stored(ring, step):
    """Images of a step as a reader gets them."""
    rows, view = ring.rows[step % ring.num_steps], ring.layout.view
    if not ring.layout.has_arena:
        return view(rows, "image").reshape(LANES, *SHAPE)
    place = view(rows, "image_place")
    blobs = [ring.read_image(*where) for where in zip(image_offsets(place).tolist(), place[:, 2].tolist())]
    return np.stack([ring.decode_image(blob) for blob in blobs]).reshape(LANES, *SHAPE)


# -- codecs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zlib", "lz4"])
@pytest.mark.parametrize("kind", ["plain", "noise"])
def test_what_is_decoded_is_what_was_encoded(name, kind):
    if name == "lz4":
        pytest.importorskip("lz4.block")
    codec, shape = make_codec(name, 3 * 32 * 32), (3, 32, 32)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    image = noise if kind == "noise" else np.full(shape, 7, np.uint8)
    packed = codec.encode(image)
    assert len(packed) == codec.size if kind == "noise" else len(packed) < codec.size // 10
    np.testing.assert_array_equal(codec.decode(packed).reshape(shape), image)
    # Also of images that do not lie in one piece.
    np.testing.assert_array_equal(codec.decode(codec.encode(image[:, ::-1])).reshape(shape), image[:, ::-1])


def test_a_missing_package_is_told_with_its_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(EnvError, match=r"data\.image_codec: lz4 .*pip install lz4") as error:
        make_codec("lz4", 75)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="none, zlib, lz4"):
        make_codec("png", 75)


# -- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_floats_come_first_then_the_image_then_all_integers(codec):
    layout = layout_of(codec, states_size=3, has_finals=True)
    name = "image" if codec == "none" else "image_place"
    start, stop = layout.fields[name]
    assert start == layout.fields["log_prob_option"][1] and stop == layout.fields["flags"][0]
    assert stop - start == (19 if codec == "none" else 3)
    assert [n for n in layout.fields if layout.fields[n][0] >= stop] == list(INTEGER_FIELDS)
    assert RowLayout(**layout.settings()).settings() == layout.settings()


def test_rows_without_images_are_what_they_were():
    layout = RowLayout(5, 4, 2, True)
    assert (layout.image_size, layout.image_bytes, layout.has_arena) == (0, 0, False)
    assert layout.step_bytes == layout.row_bytes
    assert set(layout.settings()) == {"obs_size", "action_size", "states_size", "has_finals"}
    assert RowLayout(2, 1, image_codec="zlib").fields == RowLayout(2, 1).fields


def test_pixels_are_a_view_and_touch_nothing_else():
    layout = layout_of()
    rows = np.zeros((4, layout.words), np.float32)
    layout.view(rows, "image")[:] = 255
    assert layout.view(rows, "image").shape == (4, SIZE)
    others = [name for name in layout.fields if name != "image"]
    assert all((layout.view(rows, name) == 0).all() for name in others)


def test_observations_of_no_numbers():
    layout = layout_of(obs_size=0)
    rows = np.zeros((3, 4, layout.words), np.float32)
    assert layout.view(rows, "obs").shape == (3, 4, 0)
    layout.view(rows, "obs")[:] = np.zeros((3, 4, 0), np.float32)
    assert "obs" not in layout.fields and layout.fields["action"] == (0, 1)


def test_budget_of_an_image():
    assert layout_of("zlib").image_bytes == SIZE // 4
    assert layout_of("zlib", image_bytes=40).image_bytes == 40
    assert layout_of("none", image_bytes=40).image_bytes == 0
    layout = layout_of("zlib", image_bytes=40)
    assert layout.step_bytes == layout.row_bytes + 40
    needed = LaneRing.bytes_needed(layout, 100, LANES)
    assert needed == 4096 + 100 * LANES * layout.step_bytes
    # Whatever the budget, a few steps of images that cannot be compressed fit in.
    tiny = layout_of("zlib", image_bytes=1)
    assert LaneRing(tiny, STEPS, LANES).arena_size == 5 * LANES * SIZE


# -- rings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_images_come_back_also_where_the_arena_wraps(codec):
    ring = LaneRing(layout_of(codec, image_bytes=60), STEPS, LANES)
    for step in range(5 * STEPS):
        write(ring, pictures(step))
        oldest = ring.oldest_image() if ring.layout.has_arena else ring.readable()[0]
        for t in range(max(oldest, ring.readable()[0]), ring.head):
            np.testing.assert_array_equal(stored(ring, t), pictures(t))
    if ring.layout.has_arena:
        assert ring.arena_taken > 3 * ring.arena_size


def test_the_oldest_image_is_known_exactly():
    ring = LaneRing(layout_of("zlib", image_bytes=20), STEPS, LANES)  # holds less than the rows
    starts = []
    for step in range(4 * STEPS):
        starts.append(ring.arena_taken)
        write(ring, pictures(step))
        first = ring.readable()[0]
        expected = [t for t in range(first, ring.head) if starts[t] >= ring.arena_taken - ring.arena_size]
        assert ring.oldest_image() == expected[0]
        assert ring.head - expected[0] >= min(ring.head, 5)
    assert expected[0] > first


def test_images_that_were_begun_count_as_overwritten():
    ring = LaneRing(layout_of("zlib", image_bytes=1), STEPS, LANES)
    for step in range(2 * STEPS):
        write(ring, pictures(step))
    before = ring.oldest_image()
    for _ in range(4):  # of a step that is never published
        ring.write_images(pictures(1))
    assert ring.oldest_image() > before
    # The successor goes on behind what was taken: its images are whole.
    successor = LaneRing(ring.layout, STEPS, LANES, os.dup(ring.block.fd))
    write(successor, pictures(3))
    np.testing.assert_array_equal(stored(ring, 2 * STEPS), pictures(3))


def test_a_place_that_means_nothing_is_read_without_harm():
    ring = LaneRing(layout_of("zlib"), STEPS, LANES)
    for offset, length in ((2**62, 10**9), (-5, -1), (ring.arena_size - 1, SIZE)):
        assert len(ring.read_image(offset, length)) <= SIZE


def test_offsets_use_both_words():
    place = np.array([[-1, 0, 7], [0, 1, 7], [5, 2, 7]], np.int32)
    np.testing.assert_array_equal(image_offsets(place), [2**32 - 1, 2**32, 2**33 + 5])


def test_offsets_above_four_gigabytes_are_written_and_found():
    ring = LaneRing(layout_of("zlib"), STEPS, LANES)
    ring._header[2] = start = 2**33 + 12345
    write(ring, pictures(0))
    np.testing.assert_array_equal(stored(ring, 0), pictures(0))
    assert image_offsets(ring.layout.view(ring.rows[0], "image_place"))[0] == start
