"""Images in replay: the right one beside each observation, compressed or not, and never a torn one."""

import time

import numpy as np
import pytest
import torch

from claw_lightning.errors import ConfigError
from claw_lightning.replay import ReplayMemory
from claw_lightning.replay.memory import Draw
from claw_lightning.replay.storage import load_replay, save_replay
from claw_lightning.rollout.images import make_codec
from claw_lightning.rollout.ring import LaneRing, RowLayout
from tests.builders import PATIENCE, collector_of, sample_unless_overtaken, start_writer
from tests.fakes.fake_envs import PicturesEnv
from tests.fakes.writers import FOREVER, IMAGE_SHAPE, image_of, image_ring, write_images

NUM_LANES = 4
CODECS = ["none", "zlib", "lz4"]


def played(codec, num_steps=60, **env):
    """Memory of a few episodes whose images tell lane, episode and step, as the observations do."""
    if codec == "lz4":
        pytest.importorskip("lz4.block")
    env = PicturesEnv(num_envs=3, lengths=(1, 3, 4), **env)
    collector, ring, _ = collector_of(env, codec=codec)
    for _ in range(num_steps):
        collector.step()
    return ReplayMemory([ring], 0)


def numbers(images):
    """[..., 3, 4, 5] of one number per channel -> [..., 3]."""
    images = images.numpy()
    assert images.dtype == np.uint8
    assert (images == images[..., :1, :1]).all()
    return images[..., 0, 0].astype(int)


@pytest.mark.parametrize("codec", CODECS)
def test_images_go_with_observations_and_next_observations(codec):
    batch = played(codec).sample(2, 500)
    assert batch.image.shape == batch.next_image.shape == (2, 500, 3, 4, 5)
    np.testing.assert_array_equal(numbers(batch.image), batch.obs)
    np.testing.assert_array_equal(numbers(batch.next_image), batch.next_obs)
    np.testing.assert_array_equal(numbers(batch.next_image), numbers(batch.image) + [0, 0, 1])


@pytest.mark.parametrize("codec", CODECS)
def test_images_of_segments_are_zero_where_nothing_is_valid(codec):
    batch = played(codec).sample(2, 300, 3)
    valid = batch.valid.numpy()
    assert not valid.all()
    assert batch.image.shape == (2, 300, 3, 3, 4, 5)
    for images, obs in ((batch.image, batch.obs), (batch.next_image, batch.next_obs)):
        np.testing.assert_array_equal(numbers(images)[valid], obs[batch.valid])
        assert (images.numpy()[~valid] == 0).all()


@pytest.mark.parametrize("codec", CODECS)
def test_tasks_of_images_alone(codec):
    batch = played(codec, obs_size=0).sample(2, 300)
    assert batch.obs.shape == batch.next_obs.shape == (2, 300, 0)
    assert batch.moments[1].shape == (0,)
    np.testing.assert_array_equal(numbers(batch.next_image), numbers(batch.image) + [0, 0, 1])


@pytest.mark.parametrize("length", [1, 3])
def test_compressed_or_not_the_batch_is_the_same(length):
    plain, packed = (played(codec, 30).sample(1, 200, length) for codec in ("none", "zlib"))
    assert torch.equal(plain.image, packed.image) and torch.equal(plain.next_image, packed.next_image)
    assert torch.equal(plain.obs, packed.obs) and torch.equal(plain.field("flags"), packed.field("flags"))


def test_several_rings_have_their_own_images():
    rings = []
    for lanes in (1, 3):
        rings.append(image_ring(-1, 32, lanes))
        write_images(rings[-1], 20)
    assert faults(ReplayMemory(rings, 0).sample(1, 200), (1, 3)) == 0


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_moving_takes_images_along(codec):
    batch = played(codec).sample(1, 10)
    moved = batch.to("cpu")
    assert torch.equal(moved.image, batch.image) and torch.equal(moved.next_image, batch.next_image)
    assert batch.to("meta").next_image.device.type == batch.to("meta").image.device.type == "meta"


# -- stored replays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("obs_size", [0, 3])
def test_stored_images_come_back(tmp_path, obs_size):
    memory = played("none", obs_size=obs_size)
    save_replay(memory.rings, tmp_path)
    replay = load_replay(tmp_path)
    ring = LaneRing(replay.layout, 64, 3)
    replay.restore([ring])
    a, b = memory.sample(1, 300), ReplayMemory([ring], 0).sample(1, 300)
    assert torch.equal(a.image, b.image) and torch.equal(a.next_image, b.next_image)
    with pytest.raises(ConfigError, match="images of 3 x 4 x 5.*images of 3 x 4 x 6") as error:
        replay.check_fits(RowLayout(obs_size, 2, image_shape=(3, 4, 6)))
    assert "\n" not in str(error.value)


def test_compressed_images_are_not_stored(tmp_path):
    with pytest.raises(ConfigError, match="data.image_codec none"):
        save_replay(played("zlib").rings, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_images_there_are_none():
    ring = LaneRing(RowLayout(2, 1), 16, 1)
    for _ in range(8):
        ring.publish()
    batch = ReplayMemory([ring], 0).sample(1, 4)
    assert (batch.image, batch.next_image, batch.images, batch.next_images) == (None,) * 4


# -- compressed images that were overwritten ------------------------------------------------------------------------


def faults(batch, steps_apart=(NUM_LANES,)):
    """How many images or next images are not those of the rows' numbers."""
    wrong = 0
    obs = batch.obs if batch.valid is None else batch.obs * batch.valid[..., None]
    for i, number in enumerate(obs.flatten().long().tolist()):
        image, after = batch.image.view(-1, 8, 16)[i].numpy(), batch.next_image.view(-1, 8, 16)[i].numpy()
        if number == 0 and batch.valid is not None and not batch.valid.flatten()[i]:
            wrong += int(image.any() or after.any())
            continue
        follows = any((after == image_of(number + n)).all() for n in steps_apart)
        wrong += int(not ((image == image_of(number)).all() and follows))
    return wrong


def test_rows_whose_images_were_overwritten_are_not_drawn():
    ring = image_ring(-1, 256, NUM_LANES)
    write_images(ring, 1000)
    memory = ReplayMemory([ring], 0)
    oldest, (_, last) = ring.oldest_image(), ring.readable()
    assert ring.readable()[0] < oldest < last
    assert memory.stored == (last - oldest) * NUM_LANES
    batch = memory.sample(1, 5000)
    assert faults(batch) == 0
    steps = batch.obs.flatten().long() // NUM_LANES
    assert set(steps.tolist()) == set(range(oldest, last))
    assert memory.last_draw.images == ((oldest,), (oldest,))


def test_a_task_without_compressed_images_says_nothing_of_them():
    memory = played("none")
    memory.sample(1, 10)
    assert memory.last_draw.images == ()
    old = {name: value for name, value in memory.last_draw.to_json().items() if name != "images"}
    assert Draw.from_json(old) == memory.last_draw  # logs from before there were images


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("length", [1, 3])
def test_no_torn_image_from_a_writer_at_full_speed_and_draws_repeat(length):
    # Long enough for draws to succeed: while each fails the writer runs on, and all its steps are written once more.
    steps = 1024
    ring = image_ring(-1, steps, NUM_LANES)
    memory, kept, overtaken = ReplayMemory([ring], 0), [], 0
    with start_writer("images", ring.block.fd, FOREVER, steps, NUM_LANES) as writer:
        try:
            while len(kept) < 60 or overtaken < 10 or ring.arena_taken <= 3 * ring.arena_size:
                if memory.stored == 0:
                    time.sleep(0.001)
                    continue
                if (batch := sample_unless_overtaken(memory, 1, 64, length)) is None:
                    continue
                assert faults(batch) == 0
                draw = memory.last_draw
                overtaken += draw.images[-1] > draw.images[0]
                kept.append((draw, batch))
        finally:
            writer.kill()
    assert ring.arena_taken > 3 * ring.arena_size
    # The same once more in this process, from what was noted of the writer's progress.
    replica = image_ring(-1, steps, NUM_LANES)
    again = ReplayMemory([replica], 0)
    for draw, batch in kept:
        write_images(replica, draw.heads[0] - replica.head)
        repeated = again.sample(1, 64, length, Draw.from_json(draw.to_json()))
        assert torch.equal(repeated.image, batch.image) and torch.equal(repeated.next_image, batch.next_image)
        assert torch.equal(repeated.rows, batch.rows)


def test_layout_of_the_writer():
    assert image_ring(-1, 64, NUM_LANES).layout.image_shape == IMAGE_SHAPE
    codec = make_codec("zlib", 128)
    lengths = {len(codec.encode(image_of(number))) for number in range(16)}
    assert len(lengths) > 3 and max(lengths) == 128
