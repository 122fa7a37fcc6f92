"""Privileged states in batches: each with the observation of its own lane, episode and step, in every sampler.

The states of a CodedEnv are the first numbers of its observations with the other sign, so that any mistake shows.
"""

import copy

import numpy as np
import pytest
import torch

from claw_lightning.replay import Hindsight, Relabeller, ReplayMemory
from claw_lightning.replay.storage import load_replay, save_replay
from claw_lightning.rollout.envs.base import ContractError, EnvError, EnvSpec
from claw_lightning.rollout.envs.diagnostic import CodedEnv, check_rows
from claw_lightning.rollout.normalizer import batch_moments
from claw_lightning.rollout.ring import HAS_FINAL, LaneRing, RowLayout
from tests.builders import collector_of
from tests.replay.test_resident import assert_equal
from tests.replay.test_sampling import SAMPLERS

S = 14
MODES = ("next_step", "same_step")
CPU = torch.device("cpu")


def collected(mode="next_step", steps=80, seed=5, num_steps=64):
    env = CodedEnv(num_envs=4, seed=seed, max_length=6, autoreset=mode, states_size=S)
    collector, ring, _ = collector_of(env, num_steps, policy={"num_options": 3})
    for _ in range(steps):
        collector.step()
    return ring


def memory_of(rings, sampler="uniform", **options):
    return ReplayMemory(rings, 0, copy.deepcopy(SAMPLERS[sampler]), num_options=3, with_states=True, **options)


def arrays(batch):
    found = (batch.obs, batch.next_obs, batch.reward, batch.terminated, batch.truncated, batch.action)
    return [array.numpy() for array in found] + [None if batch.valid is None else batch.valid.numpy()]


def assert_states_fit(batch):
    valid = torch.ones_like(batch.terminated) if batch.valid is None else batch.valid
    assert batch.states.shape == batch.next_states.shape == (*batch.reward.shape, S)
    assert torch.equal(batch.states[valid], -batch.obs[valid][:, :S])
    assert torch.equal(batch.next_states[valid], -batch.next_obs[valid][:, :S])


@pytest.mark.parametrize("device", [None, CPU])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_states_are_those_of_the_observation_in_every_sampler(sampler, length, mode, device):
    batch = memory_of([collected(mode), collected(mode, seed=9)], sampler, device=device).sample(2, 500, length)
    assert_states_fit(batch)
    counts = check_rows(*arrays(batch))
    ends = batch.truncated if batch.valid is None else batch.truncated[batch.valid]
    assert ends.any()  # whose next states are the last ones of their episode
    assert not any(counts[name] for name in ("torn", "cross_episode", "wrong_step", "wrong_end"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 4])
def test_without_states_batches_are_what_they_were(mode, length):
    rings = [collected(mode)]
    with_states = memory_of(rings).sample(2, 200, length)
    plain = ReplayMemory(rings, 0, num_options=3).sample(2, 200, length)
    assert plain.states is None and plain.next_states is None and plain.moments[1].shape == (16,)
    assert torch.equal(plain.obs, with_states.obs) and torch.equal(plain.next_obs, with_states.next_obs)
    np.testing.assert_array_equal(plain.obs_moments[1], with_states.obs_moments[1])


def test_moments_are_those_of_observations_and_states():
    ring = collected(steps=40)
    batch = memory_of([LaneRing(ring.layout, 64, 4)], past=[ring]).sample(1, 10)  # so that all of it is new
    rows = ring.rows[:40].reshape(-1, ring.layout.words)
    for moments, name in ((batch.obs_moments, "obs"), (batch.states_moments, "states")):
        expected = batch_moments(ring.layout.view(rows, name))
        assert moments[0] == expected[0] == 160
        np.testing.assert_allclose(moments[1], expected[1])
        np.testing.assert_allclose(moments[2], expected[2])


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shown", [None, (0, 2)])
def test_states_of_relabelled_samples(shown, mode, length):
    """The new goal stands in the states too where the task says that they show it; all else of them stays."""
    spec = EnvSpec("coded", 16, 2, [-1.0] * 2, [1.0] * 2, states_size=S, achieved_goal=(10, 12), desired_goal=(12, 14),
                   autoreset=mode, desired_goal_in_states=shown)  # fmt: skip

    def reward(achieved, desired):
        return np.zeros(achieved.shape[:-1], np.float32)

    ring, batches = collected(mode), []
    for device in (None, CPU):
        relabeller = Relabeller(Hindsight("future", 1.0), spec, reward, [ring])
        batches.append(memory_of([ring], relabeller=relabeller, device=device).sample(2, 400, length))
    assert_equal(*batches)
    batch = batches[0]
    fine = torch.ones_like(batch.terminated) if batch.valid is None else batch.valid
    for obs, states in ((batch.obs, batch.states), (batch.next_obs, batch.next_states)):
        obs, states = obs[fine], states[fine]
        assert torch.equal(states[:, 2:12], -obs[:, 2:12])
        untouched, has_goal = ((states[:, :2] == x).all(1) for x in (-obs[:, :2], obs[:, 12:14]))
        assert (untouched | has_goal).all()  # goals whose side table was overwritten are not taken
        assert not has_goal.any() if shown is None else has_goal.float().mean() > 0.5


def test_a_goal_in_the_states_must_lie_there():
    for shown, goal in (((12, 15), (0, 3)), ((0, 2), (0, 3)), ((0, 2), None)):
        with pytest.raises(EnvError, match="desired_goal_in_states") as error:
            EnvSpec("x", 16, 2, [], [], states_size=S, desired_goal=goal, desired_goal_in_states=shown)
        assert "\n" not in str(error.value)
    spec = EnvSpec("x", 16, 2, [], [], states_size=S, desired_goal=(0, 3), desired_goal_in_states=[4, 7])
    assert EnvSpec.from_json(spec.to_json()) == spec and spec.desired_goal_in_states == (4, 7)


@pytest.mark.parametrize("wrong", [None, np.zeros((4, S + 1), np.float32)])
def test_final_observations_without_their_states_break_the_contract(wrong):
    class Forgetful(CodedEnv):
        def step(self, action):
            return super().step(action)._replace(final_states=wrong)

    env = Forgetful(num_envs=4, max_length=2, autoreset="same_step", states_size=S)
    collector, _, _ = collector_of(env)

    def play():
        for _ in range(5):
            collector.step()

    with pytest.raises(ContractError, match="returned final_states .*expected"):
        play()


def test_final_states_that_are_not_finite_are_quarantined():
    class Sick(CodedEnv):
        def step(self, action):
            result = super().step(action)
            result.final_states[0, 3] = np.nan
            return result

    env = Sick(num_envs=4, max_length=3, autoreset="same_step", states_size=S)
    collector, ring, _ = collector_of(env)
    for _ in range(30):
        collector.step()
    batch = memory_of([ring]).sample(1, 1000)
    assert collector.control.quarantined > 0 and batch.next_states.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lanes", [4, 2])  # the same rings, and others
def test_a_stored_replay_has_its_states_again(tmp_path, mode, lanes):
    ring = collected(mode)
    save_replay([ring], tmp_path)
    stored = load_replay(tmp_path)
    other = LaneRing(ring.layout, 64 if lanes == 4 else 130, lanes)
    (stored.restore if lanes == 4 else stored.deal)([other])
    batch = memory_of([other]).sample(1, 1000)
    assert_states_fit(batch)
    if mode == "same_step":
        assert (batch.field("flags") & HAS_FINAL).any()
    assert_states_fit(memory_of([LaneRing(ring.layout, 64, 4)], past=stored.open_rings()).sample(1, 500))


def test_a_final_observation_is_as_wide_as_what_critics_see():
    assert RowLayout(5, 2, 3, True).final_size == 8 and RowLayout(5, 2).final_size == 5
