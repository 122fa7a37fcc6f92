"""Replay on the learner's device: the same batches as on the host to the bit, and nothing that was overtaken.

The device is the CPU here, with every tensor of the mirrors apart from the rings.
"""

import copy
import json

import numpy as np
import pytest
import torch

from claw_lightning import data as data_room
from claw_lightning.errors import ConfigError
from claw_lightning.replay import Hindsight, Relabeller, ReplayMemory
from claw_lightning.replay import resident as resident_room
from claw_lightning.replay.memory import Draw
from claw_lightning.replay.resident import Mirror, ResidentReplay
from claw_lightning.rollout.goals import goal_reward
from claw_lightning.rollout.ring import BORDER, FIRST, TERMINATED, LaneRing, RowLayout
from tests.builders import collector_of, write_step
from tests.fakes.fake_envs import PicturesEnv
from tests.replay.test_hindsight import EPISODES, Story, spec_of
from tests.replay.test_sampling import SAMPLERS, play
from tests.runs import fit_lockstep, make_data, tensors

CPU = torch.device("cpu")
BOTH = (None, CPU)  # host, device


def assert_equal(batch, other):
    """To the bit, wherever the tensors lie."""
    assert len(batch.tensors()) == len(other.tensors())
    for one, two in zip(batch.tensors(), other.tensors(), strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype
        np.testing.assert_array_equal(*(x.contiguous().view(torch.uint8).numpy() for x in (one, two)))
    assert batch.env_steps == other.env_steps and batch.moments[0] == other.moments[0]
    assert (batch.places is None) == (other.places is None)
    for mine, theirs in zip(batch.places or (), other.places or (), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def counting_ring(num_steps, num_lanes=1, written=0):
    ring = LaneRing(RowLayout(2, 1), num_steps, num_lanes)
    run_on(ring, written)
    return ring


def run_on(ring, steps):
    """Observation [step, lane]."""
    for _ in range(steps):
        write_step(ring, [[ring.head, lane] for lane in range(ring.num_lanes)], [0] * ring.num_lanes)


# -- the same batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rings", [1, 2])
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_the_same_while_the_rings_wrap(name, length, num_rings):
    rings = [LaneRing(RowLayout(3, 1), 40, 3), LaneRing(RowLayout(3, 1), 64, 2)][:num_rings]
    memories = [ReplayMemory(rings, 3, copy.deepcopy(SAMPLERS[name]), num_options=3, device=device) for device in BOTH]
    for heads in ((4, 3), (9, 30), (44, 31), (90, 100), (91, 180)):
        for number, (ring, head) in enumerate(zip(rings, heads, strict=False)):
            play(ring, number, head)
        batches = []
        for memory in memories:
            memory.updates = heads[0] // 4
            batches.append(memory.sample(2, 50, length))
        assert_equal(*batches)
        if batches[0].places is not None:
            for memory, batch in zip(memories, batches, strict=True):
                memory.sampler.update(batch.places, np.linspace(0.0, 9.0, 100).astype(np.float32))


@pytest.mark.parametrize("num_rings", [1, 2])
@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("strategy", ["future", "final", "episode", None])
def test_final_observations_and_goals_are_the_same(strategy, same_step, num_rings):
    stories = [Story([EPISODES * 8, EPISODES[1:] * 8], 40, same_step) for _ in range(num_rings)]
    for flags in (story.flags for story in stories):  # restarts right behind an end, which nobody has seen then
        for row, following in zip(flags, flags[1:], strict=False):
            if row[1] & TERMINATED and following[1] & BORDER:
                following[1] = FIRST
    rings = [story.ring for story in stories]
    reward = goal_reward({"kind": "distance", "threshold": 0.1, "sparse": False})
    memories = []
    for device in BOTH:
        relabeller = None
        if strategy is not None:
            relabeller = Relabeller(Hindsight(strategy, 0.7), spec_of(), reward, rings)
        memories.append(ReplayMemory(rings, 0, relabeller=relabeller, device=device))
    for head in (8, 37, 43, 80, 81, 130):
        for story in stories:
            story.play(head, sick={(t, t % 2) for t in range(5, 130, 11)})
        for length in (1, 3):
            assert_equal(*(memory.sample(2, 60, length) for memory in memories))


def test_rewards_of_long_goals_are_summed_in_the_same_order():
    ring, rng = LaneRing(RowLayout(40, 1), 32, 2), np.random.default_rng(0)
    for _ in range(30):
        write_step(ring, rng.normal(size=(2, 40)), [0, 0])
    spec = spec_of()
    object.__setattr__(spec, "achieved_goal", (2, 19))
    object.__setattr__(spec, "desired_goal", (20, 37))
    reward = lambda achieved, desired: -np.abs(achieved - desired).sum(-1)  # noqa: E731  float32: the order is seen
    memories = [
        ReplayMemory([ring], 0, relabeller=Relabeller(Hindsight(), spec, reward, [ring]), device=d) for d in BOTH
    ]
    for length in (1, 3):
        assert_equal(*(memory.sample(2, 100, length) for memory in memories))


@pytest.mark.parametrize("length", [1, 3])
def test_images_are_the_same(length):
    collector, ring, _ = collector_of(PicturesEnv(num_envs=3, lengths=(1, 3, 4)))
    memories = [ReplayMemory([ring], 0, device=device) for device in BOTH]
    for _ in range(3):
        for _ in range(30):
            collector.step()
        batches = [memory.sample(2, 60, length) for memory in memories]
        assert_equal(*batches)
        assert torch.equal(batches[0].image, batches[1].image)
        assert torch.equal(batches[0].next_image, batches[1].next_image)


def test_restored_experience_and_that_of_the_past_is_mirrored_too():
    rings = [counting_ring(40, 3, 70), counting_ring(16, 1, 0), counting_ring(64, 2, 64)]
    memories = [ReplayMemory(rings[:2], 0, past=rings[2:], device=device) for device in BOTH]
    for _ in range(3):
        assert_equal(*(memory.sample(1, 300) for memory in memories))
        run_on(rings[1], 9)


def test_long_copies_are_staged_piece_by_piece(monkeypatch):
    monkeypatch.setattr(resident_room, "STAGED_BYTES", 100)
    ring = counting_ring(40, 3, 70)
    assert_equal(*(ReplayMemory([ring], 0, device=device).sample(1, 300, 2) for device in BOTH))


def test_only_new_steps_are_copied(monkeypatch):
    ring, copied, upload = counting_ring(40, 3, 10), [], Mirror._upload
    monkeypatch.setattr(Mirror, "_upload", lambda self, rows, to: copied.append(len(rows)) or upload(self, rows, to))
    memory = ReplayMemory([ring], 0, device=CPU)
    for steps in (0, 5, 30, 200, 0):
        run_on(ring, steps)
        memory.sample(2, 10, 2)
    # 30 steps lie at the end of the ring and at its beginning; of 200, those that are left outside the guard band.
    assert copied == [10 * 3, 5 * 3, 25 * 3, 5 * 3, 33 * 3, 5 * 3]


# -- writers meanwhile --------------------------------------------------------------------------------------------


def overtaking(monkeypatch, name, owner, steps):
    """Let writers run on at the first calls of a method, one ring and number of steps for each."""
    method, calls = getattr(owner, name), list(steps)

    def overtaken(*arguments):
        if calls:
            run_on(*calls.pop(0))
        return method(*arguments)

    monkeypatch.setattr(owner, name, overtaken)


def repeated(memory, batch):
    """The recorded draw of a ring again, on the host and on the device."""
    script = Draw.from_json(json.loads(json.dumps(memory.last_draw.to_json())))
    assert script == memory.last_draw
    for device in BOTH:
        ring = counting_ring(16, 1, 16)
        again = ReplayMemory([ring], 0, device=device)
        run_on(ring, script.heads[0] - 16)
        assert_equal(batch, again.sample(1, 500, script=script))
        assert again.last_draw == script
    return script


@pytest.mark.parametrize("steps_ahead", [1, 2, 3, 6])
def test_steps_overtaken_on_their_way_are_never_drawn(monkeypatch, steps_ahead):
    ring = counting_ring(16, 1, 16)  # steps 2 to 14 are readable
    memory = ReplayMemory([ring], 0, device=CPU)
    overtaking(monkeypatch, "_upload", Mirror, [(ring, steps_ahead)])
    batch = memory.sample(1, 500)
    steps = batch.obs[0, :, 0]
    assert set(steps.tolist()) == set(range(2 + steps_ahead, 15))
    assert torch.equal(batch.next_obs[0, :, 0], steps + 1)
    script = repeated(memory, batch)
    assert script.heads == (16,) and script.mirrored == (16 + steps_ahead,)
    # What was lost stays lost, and what has come since is there.
    assert set(memory.sample(1, 500).obs[0, :, 0].tolist()) == set(range(2 + steps_ahead, 15 + steps_ahead))


@pytest.mark.parametrize("steps_ahead", [7, 16, 40])
def test_where_too_much_was_overtaken_all_is_copied_anew(monkeypatch, steps_ahead):
    ring = counting_ring(16, 1, 16)
    memory = ReplayMemory([ring], 0, device=CPU)
    overtaking(monkeypatch, "_upload", Mirror, [(ring, steps_ahead)])
    batch = memory.sample(1, 500)
    assert set(batch.obs[0, :, 0].tolist()) == set(range(2 + steps_ahead, 15 + steps_ahead))
    assert repeated(memory, batch).heads == (16 + steps_ahead,)


@pytest.mark.parametrize("length", [1, 3])
def test_writers_that_run_on_after_the_copy_change_nothing(monkeypatch, length):
    rings = [counting_ring(16, 1, 30), counting_ring(16, 1, 16)]
    expected = ReplayMemory([counting_ring(16, 1, 30), counting_ring(16, 1, 16)], 0).sample(1, 500, length)
    memory = ReplayMemory(rings, 0, device=CPU)
    overtaking(monkeypatch, "copy", memory.resident, [(ring, 100) for ring in rings])
    moments, memory._moments = memory._moments, lambda progress: expected.moments  # those are read on the host
    batch = memory.sample(1, 500, length)
    assert_equal(batch, expected)
    assert len(memory.last_draw.checks) == 1
    memory._moments = moments
    assert memory.sample(1, 500).obs[0, :, 0].min() >= 116 - 14


@pytest.mark.parametrize("same_step", [False, True])
def test_goals_and_final_observations_of_a_mirror_outlive_their_rings(monkeypatch, same_step):
    def played(head=60):
        return Story([[(3, "truncated")] * 200] * 2, 32, same_step).play(head)

    def memory_of(story, device):
        reward = goal_reward({"kind": "distance", "threshold": 0.1, "sparse": False})
        relabeller = Relabeller(Hindsight("future", 1.0), spec_of(), reward, [story.ring])
        return ReplayMemory([story.ring], 0, relabeller=relabeller, device=device)

    story, copy_ = played(), memory_of(played(), None)
    expected = copy_.sample(1, 400, 2)
    memory = memory_of(story, CPU)
    gather = memory.resident.copy
    monkeypatch.setattr(memory.resident, "copy", lambda *arguments: story.play(140) and gather(*arguments))
    memory._moments = lambda progress: expected.moments
    assert_equal(memory.sample(1, 400, 2), expected)


# -- whole runs, and what is refused ------------------------------------------------------------------------------


def test_a_run_on_the_device_is_bit_exact(tmp_path, monkeypatch):
    settings = {"model": {"n_step": 3}, "limit_val_batches": 0}
    _, host, _ = fit_lockstep(tmp_path, 3, **settings)
    monkeypatch.setattr(data_room.ReplayDataModule, "_mirror_device", lambda self, learner: learner)
    _, device, data = fit_lockstep(tmp_path, 3, **settings)
    assert data.memory.resident is not None
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors(host), tensors(device), strict=True))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cpu:0", ""])
def test_devices_that_are_none_are_refused(device):
    with pytest.raises(ConfigError, match="data.replay_device is '.*'; use cpu, cuda or cuda:<number>"):
        make_data(replay_device=device)


def test_a_gpu_that_is_not_there_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="data.replay_device is 'cuda', but torch finds no GPU here") as error:
        make_data(replay_device="cuda").setup("fit")
    assert "\n" not in str(error.value)


def test_rows_lie_where_the_learner_is():
    learner = torch.device("cuda", 1)
    assert make_data()._mirror_device(learner) is None
    for name in ("cuda", "cuda:1"):
        assert make_data(replay_device=name)._mirror_device(learner) == learner
    for name, device in (("cuda:0", learner), ("cuda", CPU)):
        with pytest.raises(ConfigError, match=f"data.replay_device is '{name}', but the learner runs on {device}"):
            make_data(replay_device=name)._mirror_device(device)


def test_a_device_that_is_too_small_is_named_with_the_numbers(monkeypatch):
    ring = LaneRing(RowLayout(1000, 1), 1000, 4)
    data, needed = make_data(capacity=4000), ResidentReplay.bytes_needed([ring])
    mirror = ResidentReplay([ring], CPU).mirrors[0]
    assert needed == 4 * (mirror.rows.numel() + mirror.finals.numel())
    monkeypatch.setattr(data_room, "free_bytes", lambda device: needed)
    with pytest.raises(ConfigError, match=r"data.capacity \(4,000 steps\) needs 15 MiB on .*15 MiB are free") as error:
        data._check_device_memory(CPU, [ring])
    assert "\n" not in str(error.value)
    monkeypatch.setattr(data_room, "free_bytes", lambda device: 2 * needed)
    data._check_device_memory(CPU, [ring])
    data._check_device_memory(None, [ring])


def test_compressed_images_are_refused(monkeypatch):
    data = make_data(replay_device="cuda", image_codec="zlib")
    spec = PicturesEnv(num_envs=1, lengths=(1,)).spec
    with pytest.raises(ConfigError, match="data.replay_device 'cuda' keeps .* data.image_codec 'zlib'") as error:
        data._check_memory(spec)
    assert "\n" not in str(error.value)
