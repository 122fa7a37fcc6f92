"""IsaacLabEnv on a stand-in; that rows are whole is judged in test_conformance.py."""

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvError, IsaacLabEnv, make_env
from claw_lightning.rollout.envs.base import ContractError
from tests.fakes import fake_simulators as fakes

CPU = {"task": fakes.ISAAC_TASK, "device": "cpu"}


@pytest.fixture
def install(monkeypatch):
    return lambda **settings: fakes.install_isaaclab(monkeypatch, **settings)


def zeros(env):
    return np.zeros((env.num_envs, env.spec.action_size), np.float32)


def test_spec(install):
    started = install()
    env = IsaacLabEnv(num_envs=3, seed=5, launcher={"enable_cameras": False}, **CPU)
    spec = env.spec
    assert (spec.obs_size, spec.states_size, spec.action_size, spec.max_episode_steps) == (16, 16, 2, 7)
    assert (spec.autoreset, spec.goal_in_reward, spec.versions["isaaclab"]) == ("same_step", "obs", "3.0.0")
    assert started == [{"headless": True, "device": "cpu", "enable_cameras": False}]
    assert (env._sim.cfg.seed, env._sim.cfg.compute_final_obs) == (5, True)


@pytest.mark.parametrize("version, finals", [("2.3.2.post1", False), ("3.0.0", True)])
def test_the_version_decides_about_final_observations(install, version, finals):
    install(version=version)
    env = IsaacLabEnv(num_envs=4, **CPU)
    env.reset()
    results = [env.step(zeros(env)) for _ in range(30)]
    assert hasattr(env._sim.cfg, "compute_final_obs") == finals
    assert any(result.has_final_obs.any() for result in results) == finals
    for result in results:
        assert (result.has_final_obs == ((result.terminated | result.truncated) & finals)).all()


@pytest.mark.parametrize("version, with_app, starts", [("2.3.2", True, 1), ("3.0.0", True, 1), ("3.0.0", False, 0)])
def test_the_application_is_started_where_there_is_one(install, version, with_app, starts):
    started = install(version=version, with_app=with_app)
    IsaacLabEnv(**CPU)
    assert len(started) == starts


def test_a_finite_horizon_ends_by_its_time_limit(install):
    install(finite=True)
    env = IsaacLabEnv(num_envs=4, **CPU)
    env.reset()
    assert not any(env.step(zeros(env)).truncated.any() for _ in range(30))


def test_final_observations_of_another_kind_are_refused(install):
    install()
    env = IsaacLabEnv(num_envs=4, **CPU)
    env.reset()
    env._sim.extras = type("Extras", (dict,), {"get": lambda self, key: np.zeros(4)})()
    with pytest.raises(ContractError, match="final_obs as ndarray"):
        [env.step(zeros(env)) for _ in range(10)]


@pytest.mark.parametrize(
    "init_args, words",
    [
        ({"task": "Isaac-Codet-Direct-v0"}, ["data.env.init_args.task", "Isaac Lab has no task", fakes.ISAAC_TASK]),
        ({"device": "cuda:0"}, ["data.env.init_args.device", "NVIDIA GPU", "data.worker_device: cuda:0"]),
        ({"import_module": "no_such_hand"}, ["data.env.init_args.import_module", "no_such_hand"]),
    ],
)
def test_what_cannot_be_used_is_one_line(install, init_args, words, monkeypatch):
    install()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EnvError) as caught:
        make_env("IsaacLabEnv", {**CPU, **init_args}, 2, 0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("absent", ["isaaclab", "isaaclab.app", "isaaclab_tasks"])
def test_missing_packages_name_the_cure(install, monkeypatch, absent):
    install()
    monkeypatch.setitem(fakes.sys.modules, absent, None)
    with pytest.raises(EnvError, match=r"IsaacLabEnv needs Isaac Lab .*install Isaac Lab 2.3.*data.worker_python"):
        IsaacLabEnv(**CPU)
