"""Collector on a task whose observations tell lane, episode and step: what is written, counted and evaluated."""

import numpy as np
import pytest
import torch

from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.collector import Episode, EpisodeTracker, evaluate
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.envs.base import ContractError
from claw_lightning.rollout.ring import (
    BORDER,
    FIRST,
    HAS_FINAL,
    QUARANTINED,
    SWITCHED,
    TERMINATED,
    TRUNCATED,
)
from tests.builders import collector_of, policy_settings
from tests.fakes.fake_envs import CountingEnv, PicturesEnv, WrongOutput

MODES = ("next_step", "same_step")
OPTIONS = {"policy": {"num_options": 3}, "max_option_duration": 2}


def collect(env, num_steps, **agent):
    """Collector, published rows' fields by name [T, N, ...] and finished episodes after some vector steps."""
    collector, ring, episodes = collector_of(env, **agent)
    for _ in range(num_steps):
        collector.step()
    assert ring.head == num_steps
    fields = {name: ring.layout.view(ring.rows[:num_steps], name) for name in ring.layout.fields}
    return collector, fields, episodes


def expected_flags(step, length, end, is_border):
    if is_border:
        return BORDER
    return (step == 0) * FIRST | (step == length - 1) * end


@pytest.mark.parametrize("mode", MODES)
def test_observations_rewards_and_flags(mode):
    env = CountingEnv(2, lengths=(3, 5), autoreset=mode)
    collector, rows, _ = collect(env, 30)
    mask = FIRST | TERMINATED | TRUNCATED | BORDER
    for lane, length, end in ((0, 3, TERMINATED), (1, 5, TRUNCATED)):
        period = length + (mode == "next_step")
        for t in range(30):
            episode, step = divmod(t, period)
            is_border = step == length
            np.testing.assert_array_equal(rows["obs"][t, lane], [lane, episode, step])
            assert rows["reward"][t, lane] == (0 if is_border else step + 1)
            assert rows["flags"][t, lane] & mask == expected_flags(step, length, end, is_border)
            np.testing.assert_array_equal(rows["action"][t], env.actions[t])
    assert not (rows["flags"] & QUARANTINED).any() and collector.control.quarantined == 0


def test_true_final_observations_go_to_the_side_table():
    collector, rows, _ = collect(CountingEnv(2, lengths=(3, 5), autoreset="same_step"), 15)
    ended = (rows["flags"] & (TERMINATED | TRUNCATED)) != 0
    np.testing.assert_array_equal((rows["flags"] & HAS_FINAL) != 0, ended)
    assert (rows["final_index"][~ended] == -1).all()
    finals = collector.ring.finals[rows["final_index"][ended]]
    np.testing.assert_array_equal(finals, rows["obs"][ended] + [0, 0, 1])
    assert collector.ring.finals_written == ended.sum() == 5 + 3


@pytest.mark.parametrize("mode", MODES)
def test_what_the_memory_draws_follows_within_the_episode(mode):
    env = CountingEnv(3, lengths=(1, 3, 4), ends=("terminated", "truncated"), autoreset=mode)
    collector, _, _ = collect(env, 60)
    batch = ReplayMemory([collector.ring], 0).sample(1, 2000)
    np.testing.assert_array_equal(batch.next_obs.numpy(), batch.obs.numpy() + [0, 0, 1])


@pytest.mark.parametrize("mode", MODES)
def test_options_previous_options_and_ages(mode):
    _, rows, _ = collect(CountingEnv(2, lengths=(3, 5), autoreset=mode), 40, **OPTIONS)
    first, switched = (rows["flags"] & FIRST) != 0, (rows["flags"] & SWITCHED) != 0
    option, previous, age = rows["option"], rows["previous_option"], rows["option_age"]
    np.testing.assert_array_equal(previous == -1, first)
    inside = ~first[1:]
    np.testing.assert_array_equal(previous[1:][inside], option[:-1][inside])
    np.testing.assert_array_equal(age == 0, switched)
    assert switched[first].all()
    kept = ~switched[1:]
    np.testing.assert_array_equal(age[1:][kept], age[:-1][kept] + 1)
    np.testing.assert_array_equal(option[1:][kept], option[:-1][kept])
    assert age.max() == 1  # the cap


def test_a_reset_opens_episodes_without_a_border():
    collector, ring, _ = collector_of(CountingEnv(2, lengths=(9, 9)))
    for _ in range(2):
        collector.step()
    collector.reset()  # what a restarted worker begins with
    collector.step()
    flags = ring.layout.view(ring.rows[:3], "flags")
    np.testing.assert_array_equal((flags & FIRST) != 0, [[True] * 2, [False] * 2, [True] * 2])
    assert collector.env.seeds == [7, 7]


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_is_not_finite_is_quarantined(mode):
    env = CountingEnv(2, lengths=(9, 9), autoreset=mode, nan_reward=(3,))
    collector, rows, _ = collect(env, 8)
    sick = np.zeros((8, 2), bool)
    sick[2, 0] = True
    np.testing.assert_array_equal((rows["flags"] & QUARANTINED) != 0, sick)
    assert collector.control.quarantined == 1


@pytest.mark.parametrize("mode", MODES)
def test_an_observation_that_is_not_finite_is_quarantined_and_never_drawn(mode):
    env = CountingEnv(2, lengths=(9, 9), autoreset=mode, nan_obs=(3,))
    collector, rows, _ = collect(env, 8)
    sick = np.zeros((8, 2), bool)
    sick[3, 0] = True  # it is the one acted on at the next step
    np.testing.assert_array_equal((rows["flags"] & QUARANTINED) != 0, sick)
    assert np.isfinite(rows["action"]).all()
    batch = ReplayMemory([collector.ring], 0).sample(1, 500)
    assert np.isfinite(batch.obs.numpy()).all() and np.isfinite(batch.next_obs.numpy()).all()


def test_a_final_observation_that_is_not_finite_is_never_drawn():
    env = CountingEnv(1, lengths=(3,), autoreset="same_step", nan_obs=(3,))
    collector, _, _ = collect(env, 12)
    assert np.isfinite(ReplayMemory([collector.ring], 0).sample(1, 200).next_obs.numpy()).all()


@pytest.mark.parametrize("wrong, words", [("shape", "observation.*2, 2"), ("dtype", "float64"), ("reward", "reward")])
def test_wrong_output_of_a_simulator_is_an_error_and_not_published(wrong, words):
    collector, ring, _ = collector_of(WrongOutput(wrong, num_envs=2))
    with pytest.raises(ContractError, match=words):
        collector.step()
    assert ring.head == 0


@pytest.mark.parametrize(
    "wrong, words",
    [("shape", r"image of shape \(2, 3, 3, 5\).*\(2, 3, 4, 5\) uint8"), ("dtype", "image.*float32.*uint8"),
     ("absent", "image as NoneType")],
)  # fmt: skip
def test_wrong_images_are_an_error_and_not_published(wrong, words):
    collector, ring, _ = collector_of(PicturesEnv(wrong=wrong, num_envs=2))
    with pytest.raises(ContractError, match=words):
        collector.step()
    assert ring.head == 0


def test_a_reset_without_its_image_is_an_error():
    env = PicturesEnv(num_envs=2)
    env.image = lambda: None
    with pytest.raises(ContractError, match="image as NoneType"):
        collector_of(env)[0].step()


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_the_agent_acts_on_the_image_that_is_stored(codec):
    env = PicturesEnv(num_envs=2, lengths=(3, 5))
    collector, ring, _ = collector_of(env, codec=codec)
    act, seen = collector.agent.act, []

    def watched(obs, first, image):
        seen.append((obs.copy(), image.copy()))
        env_image = image.copy()
        decision = act(obs, first, image)
        np.testing.assert_array_equal(image, env_image)
        return decision

    collector.agent.act = watched
    for _ in range(20):
        collector.step()
    for t, (obs, image) in enumerate(seen):
        np.testing.assert_array_equal(ring.layout.view(ring.rows[t], "obs"), obs)
        np.testing.assert_array_equal(image, np.broadcast_to(obs[:, :, None, None], image.shape).astype(np.uint8))


def test_a_simulator_may_write_over_its_images():
    env = PicturesEnv(num_envs=2, lengths=(3, 5))
    buffer, image = np.zeros((2, 3, 4, 5), np.uint8), env.image

    def reused():
        buffer[:] = image()
        return buffer

    env.image = reused
    for codec in ("none", "zlib"):
        collector, ring, _ = collector_of(env, codec=codec)
        collector.step()
        kept = collector._image.copy()
        buffer[:] = 99
        np.testing.assert_array_equal(collector._image, kept)


@pytest.mark.parametrize("mode", MODES)
def test_finished_episodes(mode):
    _, _, episodes = collect(CountingEnv(2, lengths=(3, 5), autoreset=mode), 24)
    assert set(episodes) == {Episode(6.0, 3, 1.0), Episode(15.0, 5, 0.0)}
    count = {"next_step": (6, 4), "same_step": (8, 4)}[mode]
    assert tuple(sum(e.length == length for e in episodes) for length in (3, 5)) == count


def test_tracker_without_success_and_with_borders():
    tracker = EpisodeTracker(2)
    no, yes = np.zeros(2, bool), np.ones(2, bool)
    reward = np.array([1.0, 10.0], np.float32)
    assert tracker.update(reward, no, no, None) == []
    assert tracker.update(reward, no, yes, None) == []  # border steps do not count
    (lane, episode), = tracker.update(reward, np.array([False, True]), no, None)  # fmt: skip
    assert (lane, episode.ret, episode.length) == (1, 20.0, 2) and np.isnan(episode.success)
    assert tracker.lengths.tolist() == [2, 0]


def test_new_parameters_are_adopted_and_their_version_written():
    collector, ring, _ = collector_of(CountingEnv(2))
    collector.pull_every = 3
    values, versions = collector.agent.policy.flatten(), []
    for t in range(7):
        collector.puller.mailbox.publish(values, 10 + t)
        collector.step()
        versions.append(ring.layout.view(ring.rows[t], "version").tolist())
    assert versions == [[10] * 2] * 3 + [[13] * 2] * 3 + [[16] * 2]
    assert collector.control.version == 16
    assert collector.control.phase == phases.STEP
    assert (collector.control.timers[:4] > 0).all() and collector.control.timers[4] == 0


def test_equal_seeds_collect_equal_rows():
    rows = []
    for _ in range(2):
        torch.manual_seed(0)
        rows.append(collect(CountingEnv(2), 20, **OPTIONS)[0].ring.rows[:20].view(np.int32))
    np.testing.assert_array_equal(*rows)


# -- evaluation ---------------------------------------------------------------------------------------------------


def evaluated(env, episodes, control=None, **policy):
    torch.manual_seed(0)
    agent = OptionAgent(policy_settings(**policy), env.num_envs, 0, evaluate=True)
    return evaluate(env, agent, episodes, 11, control or Control())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("episodes", [1, 2, 3, 8])
def test_every_lane_gives_its_share_of_episodes(mode, episodes):
    env = CountingEnv(2, lengths=(3, 5), autoreset=mode)
    result = evaluated(env, episodes, num_options=2)
    # Short episodes end first, but lane 1 still plays its half.
    short, long = (episodes + 1) // 2, episodes // 2
    assert sorted(result["length"]) == [3.0] * short + [5.0] * long
    assert sorted(result["return"]) == [6.0] * short + [15.0] * long
    assert sorted(result["success"]) == [0.0] * long + [1.0] * short
    assert sum(result["option"]) == pytest.approx(1.0) and len(result["option"]) == 2
    assert env.seeds == [11]


def test_evaluation_from_images():
    env = PicturesEnv(num_envs=2, lengths=(3, 5), obs_size=0)
    result = evaluated(env, 4, num_options=2, obs_size=0, image_shape=(3, 4, 5))
    assert sorted(result["length"]) == [3.0, 3.0, 5.0, 5.0]


def test_evaluation_repeats_exactly():
    assert evaluated(CountingEnv(2), 5, num_options=3) == evaluated(CountingEnv(2), 5, num_options=3)


def test_evaluation_of_a_task_without_success():
    env = CountingEnv(1)
    step = env.step
    env.step = lambda action: step(action)._replace(info={})
    assert evaluated(env, 2)["success"] == []


def test_evaluation_ends_when_asked_to_stop():
    control = Control()
    control.stop = True
    result = evaluated(CountingEnv(1, lengths=(10**9,)), 3, control)
    assert result["return"] == [] and control.phase == phases.EVALUATE
