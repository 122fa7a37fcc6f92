"""MjlabEnv on a stand-in; that rows are whole is judged in test_conformance.py."""

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvError, MjlabEnv, make_env
from tests.fakes import fake_simulators as fakes

CPU = {"task": fakes.TASK, "device": "cpu"}


@pytest.fixture
def install(monkeypatch):
    return lambda **settings: fakes.install_mjlab(monkeypatch, **settings)


def test_spec(install):
    install()
    env = MjlabEnv(num_envs=3, seed=5, **CPU)
    spec = env.spec
    assert (spec.obs_size, spec.states_size, spec.action_size, spec.max_episode_steps) == (16, 16, 2, 7)
    assert (spec.autoreset, spec.control_frequency, spec.goal_in_reward) == ("same_step", 20.0, "next_obs")
    assert (spec.action_low, spec.action_high) == ([-1.0, -1.0], [1.0, 1.0])
    assert spec.versions["mjlab"] == "1.6.0" and "torch" in spec.versions
    assert (env._sim.cfg.scene.num_envs, env._sim.cfg.seed, env._sim.cfg.auto_reset) == (3, 5, False)
    env.close()
    assert env._sim.closed


def test_the_reset_that_told_the_sizes_is_not_wasted(install):
    install()
    env = MjlabEnv(num_envs=2, **CPU)
    env.reset()
    assert env._sim.seeds == [None]
    env.reset()
    env.reset(9)
    assert env._sim.seeds == [None, None, 9]


def test_actions_have_the_bound_that_is_asked_for(install):
    install()
    env = MjlabEnv(num_envs=1, action_bound=2.0, **CPU)
    env.reset()
    obs = env.step(np.array([[0.25, 0.0]], np.float32)).obs
    assert obs[0, 7] == 0.5 and env.spec.action_high == [2.0, 2.0]
    assert env.step(np.array([[-3.0, 0.0]], np.float32)).obs[0, 7] in (-2.0, 0.0)  # clipped, or the episode had ended


def test_a_finite_horizon_ends_by_its_time_limit(install):
    install(finite=True)
    env = MjlabEnv(num_envs=4, **CPU)
    env.reset()
    results = [env.step(np.zeros((4, 2), np.float32)) for _ in range(30)]
    assert not any(result.truncated.any() for result in results) and any(result.terminated.any() for result in results)


@pytest.mark.parametrize("settings", [{"history": 2}, {"with_switch": False}])
def test_where_mjlab_resets_itself(install, settings):
    install(**settings)
    env = MjlabEnv(num_envs=4, **CPU)
    assert getattr(env._sim.cfg, "auto_reset", True) is True
    env.reset()
    results = [env.step(np.zeros((4, 2), np.float32)) for _ in range(30)]
    assert not any(result.has_final_obs.any() for result in results)
    assert any(result.truncated.any() for result in results)


def test_groups_of_several_parts_and_images(install, monkeypatch):
    install()

    def observe(self):
        parts = {"joints": fakes.torch.ones(self.num_envs, 2, 3), "cube": fakes.torch.zeros(self.num_envs, 4)}
        return {"actor": parts}

    monkeypatch.setattr(fakes.MjlabSim, "_observe", observe)
    env = MjlabEnv(num_envs=2, **CPU)
    assert (env.spec.obs_size, env.spec.states_size, env.states()) == (10, 0, None)
    assert env.reset()[0].tolist() == [1.0] * 6 + [0.0] * 4
    monkeypatch.setattr(fakes.MjlabSim, "_observe", lambda self: {"actor": fakes.torch.zeros(2, 8, 8, 3)})
    with pytest.raises(EnvError, match="image of shape"):
        MjlabEnv(num_envs=2, **CPU)
    monkeypatch.setattr(fakes.MjlabSim, "_observe", lambda self: {"camera": fakes.torch.zeros(2, 3)})
    with pytest.raises(EnvError, match="no observation named policy or actor, only camera"):
        MjlabEnv(num_envs=2, **CPU)


@pytest.mark.parametrize(
    "settings, init_args, words",
    [
        ({}, {"task": "Codet-v0"}, ["data.env.init_args.task", "mjlab has no task", "nearest: Coded-v0"]),
        ({}, {"device": "cuda:0"}, ["data.env.init_args.device", "data.worker_device: cuda:0", "device: cpu"]),
        ({}, {"import_module": "no_such_hand"}, ["data.env.init_args.import_module", "no_such_hand"]),
        ({"version": "0.1.0"}, {}, ["mjlab 1.0 or later, not 0.1.0", "pip install 'mjlab"]),
    ],
)
def test_what_cannot_be_used_is_one_line(install, settings, init_args, words, monkeypatch):
    install(**settings)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EnvError) as caught:
        make_env("MjlabEnv", {**CPU, **init_args}, 2, 0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_actions_without_a_vector_are_refused(install, monkeypatch):
    install()
    monkeypatch.setattr(fakes.MjlabSim, "single_action_space", fakes.SimpleNamespace(n=3, shape=()))
    with pytest.raises(EnvError, match="only a vector of numbers"):
        MjlabEnv(**CPU)


def test_missing_package_names_the_cure(monkeypatch):
    monkeypatch.setitem(fakes.sys.modules, "mjlab", None)
    with pytest.raises(EnvError, match="MjlabEnv needs mjlab; pip install 'mjlab.*data.worker_python"):
        MjlabEnv(**CPU)
