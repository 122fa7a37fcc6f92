"""PlaygroundEnv on a JAX of numpy arrays; that rows are whole is judged in test_conformance.py."""

import os

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvError, PlaygroundEnv, make_env
from claw_lightning.rollout.envs.diagnostic import END, LENGTH, STEP
from claw_lightning.rollout.envs.packages import ASKED_DEVICE
from tests.fakes import fake_simulators as fakes


@pytest.fixture
def install(monkeypatch):
    return lambda **settings: fakes.install_playground(monkeypatch, **settings)


def zeros(env):
    return np.zeros((env.num_envs, env.spec.action_size), np.float32)


def test_spec(install):
    install(limit=6)
    spec = PlaygroundEnv(fakes.TASK, 2).spec
    assert (spec.obs_size, spec.states_size, spec.action_size) == (16, 16, 2)
    assert (spec.max_episode_steps, spec.control_frequency, spec.autoreset) == (6, 20.0, "next_step")
    assert spec.action_low == [-1.0, -1.0] and spec.versions["playground"] == "0.2.0"


@pytest.mark.parametrize(
    "platform, wanted, chosen",
    [("cpu", None, "jax"), ("gpu", None, "warp"), ("gpu", "jax", "jax"), ("gpu", "warp", "warp")],
)  # fmt: skip
def test_the_physics_follows_the_machine(install, platform, wanted, chosen):
    loaded = install(platform=platform)
    env = PlaygroundEnv(fakes.TASK, impl=wanted)
    assert loaded[0]["impl"] == env.spec.versions["impl"] == chosen


@pytest.mark.parametrize("settings, impl", [({}, None), ({}, "jax"), ({"with_impl": False}, None)])
def test_a_gpu_that_was_asked_for_is_not_replaced_by_the_cpu(install, monkeypatch, settings, impl):
    install(platform="cpu", **settings)
    monkeypatch.setenv(ASKED_DEVICE, "cuda:1")
    with pytest.raises(EnvError, match=r"data.worker_device: cuda:1 .*jax\[cuda12\].*data.worker_device: cpu"):
        PlaygroundEnv(fakes.TASK, impl=impl)
    monkeypatch.setenv(ASKED_DEVICE, "cpu")
    PlaygroundEnv(fakes.TASK, impl=impl)


def test_a_task_without_a_choice_of_physics(install):
    loaded = install(with_impl=False)
    PlaygroundEnv(fakes.TASK)
    assert "impl" not in loaded[0]
    with pytest.raises(EnvError, match="impl: .* has no such setting"):
        PlaygroundEnv(fakes.TASK, impl="jax")


def test_jax_does_not_take_the_whole_gpu(install, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    install()
    PlaygroundEnv(fakes.TASK)
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_time_limits_are_counted_here_and_terminations_are_the_tasks(install):
    install(limit=5)
    env = PlaygroundEnv(fakes.TASK, 8, config_overrides={"episode_length": 4})
    assert env.spec.max_episode_steps == 4
    header, cut = env.reset(), 0
    for _ in range(40):
        result = env.step(zeros(env))
        truncated = ~result.is_border & (header[:, STEP] + 1 == 4) & (header[:, END] != 1)
        np.testing.assert_array_equal(result.truncated, truncated)
        assert (header[truncated, LENGTH] == 4).all()
        header, cut = result.obs, cut + int(truncated.sum())
    assert cut > 8


def test_lanes_do_not_depend_on_each_other(install):
    install()
    many, one = PlaygroundEnv(fakes.TASK, 3, seed=5), PlaygroundEnv(fakes.TASK, 1, seed=6)
    np.testing.assert_array_equal(many.reset()[1:2], one.reset())
    for _ in range(15):
        np.testing.assert_array_equal(many.step(zeros(many)).obs[1:2], one.step(zeros(one)).obs)
    assert not np.array_equal(one.reset(), PlaygroundEnv(fakes.TASK, 1, seed=6).reset())  # another episode
    np.testing.assert_array_equal(one.reset(7), PlaygroundEnv(fakes.TASK, 1, seed=7).reset())


def test_buffers_that_lanes_share_are_not_mixed(install):
    """MuJoCo Warp keeps contacts of all lanes in one buffer."""
    install()
    env = PlaygroundEnv(fakes.TASK, 2)
    env.reset()
    chosen = env._chosen(
        np.array([True, False]), {"c": np.zeros(7), "x": np.zeros(2)}, {"c": np.ones(7), "x": np.ones(2)}
    )
    assert chosen["c"].tolist() == [1.0] * 7 and chosen["x"].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    "settings, init_args, words",
    [
        ({}, {"task": "Codet-v0"}, ["data.env.init_args.task", "nearest: Coded-v0"]),
        ({}, {"impl": "mjx"}, ["data.env.init_args.impl", "warp or jax"]),
        ({}, {"impl": "warp"}, ["data.env.init_args.impl", "NVIDIA GPU", "data.worker_device: cuda:0", "EnvPoolEnv"]),
        ({}, {"config_overrides": {"episode_lenght": 3}}, ["config_overrides", "nearest: episode_length"]),
        ({}, {"config_overrides": {"episode_length": "x"}}, ["config_overrides", "rejects", "episode_length"]),
        ({"version": "0.0.4"}, {}, ["0.0.5 or later", "pip install 'playground"]),
        ({}, {"config_overrides": {"action_repeat": 2}}, ["action_repeat: 1"]),
    ],
)
def test_what_cannot_be_used_is_one_line(install, settings, init_args, words):
    install(**settings)
    with pytest.raises(EnvError) as caught:
        make_env("PlaygroundEnv", {"task": fakes.TASK, **init_args}, 2, 0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("absent", ["jax", "mujoco_playground"])
def test_missing_packages_name_the_cure(install, monkeypatch, absent):
    install()
    monkeypatch.setitem(fakes.sys.modules, absent, None)
    with pytest.raises(EnvError, match="PlaygroundEnv needs .*pip install 'playground.*data.worker_python"):
        PlaygroundEnv(fakes.TASK)


def test_images_are_refused(install, monkeypatch):
    install()
    monkeypatch.setattr(
        fakes.CodedTask, "reset", lambda self, key: fakes.SimpleNamespace(obs={"pixels/view_0": np.zeros((8, 8, 3))})
    )
    with pytest.raises(EnvError, match="image of shape .*state"):
        PlaygroundEnv(fakes.TASK)


def test_versions_that_do_not_fit_together_are_one_line(install, monkeypatch):
    """Playground 0.2.0 calls ``clip(a_max=...)``, which later versions of JAX do not have."""
    install()
    env = PlaygroundEnv(fakes.TASK)
    env.reset()

    def step(self, state, action):
        raise TypeError("clip() got an unexpected keyword argument 'a_max'")

    monkeypatch.setattr(fakes.CodedTask, "step", step)
    with pytest.raises(EnvError, match=r"does not run with the versions.*playground 0.2.0.*a_max.*pip install"):
        env.step(zeros(env))


def test_step_before_reset(install):
    install()
    with pytest.raises(RuntimeError, match="reset"):
        PlaygroundEnv(fakes.TASK).step(np.zeros((1, 2), np.float32))
