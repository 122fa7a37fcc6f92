"""EnvPoolEnv on the real simulators."""

import subprocess
import sys

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvError, EnvPoolEnv, EnvSpec, envpool_env, make_env
from tests.runs import ROOT

envpool = pytest.importorskip("envpool")

HAND = "HandReachDense-v3"
LEAP = "LeapCubeReorient-v1"


def actions(env, seed, num_steps):
    """[steps, N, A] float32, uniform in [-1, 1]."""
    size = (num_steps, env.num_envs, env.spec.action_size)
    return np.random.default_rng(seed).uniform(-1, 1, size).astype(np.float32)


def roll(env, num_steps, seed=0):
    """First observation and the results of ``num_steps`` steps."""
    return env.reset(), [env.step(action) for action in actions(env, seed, num_steps)]


@pytest.mark.parametrize("task", [HAND, "Pendulum-v1", "HalfCheetah-v5", "AdroitHandPen-v1", LEAP])
def test_time_limit_then_border(task):
    env = EnvPoolEnv(task, num_envs=2, seed=1, max_episode_steps=4)
    first, results = roll(env, 10)
    assert first.shape == (2, env.spec.obs_size)
    assert env.spec.max_episode_steps == 4
    for index, result in enumerate(results):
        step = (index + 1) % 5  # four steps and the reset step
        assert (result.is_border == (step == 0)).all()
        assert (result.truncated == (step == 4)).all()
        assert not result.terminated.any()
        assert (result.reward[result.is_border] == 0).all()
        assert result.final_obs is None and result.has_final_obs is None
        assert result.obs.dtype == result.reward.dtype == np.float32
        assert result.is_border.dtype == result.terminated.dtype == result.truncated.dtype == bool
    env.close()


def test_termination_then_border():
    env = EnvPoolEnv("CartPole-v1", num_envs=3, seed=0)
    env.reset()
    ended = np.zeros(3, dtype=bool)
    num_ends = 0
    for _ in range(40):
        result = env.step(np.ones((3, 1), np.float32))
        np.testing.assert_array_equal(result.is_border, ended)
        assert not result.truncated.any()
        fallen = np.abs(result.obs[:, 2]) > 0.2095
        np.testing.assert_array_equal(result.terminated, fallen)  # the final observation is the fallen pole
        assert (np.abs(result.obs[result.is_border]) <= 0.05).all()
        ended = result.terminated
        num_ends += int(ended.sum())
    assert num_ends > 3
    assert (env.spec.num_actions, env.spec.action_size) == (2, 1)


def test_the_observation_returned_with_the_end_is_the_last_of_the_episode():
    short, long = (EnvPoolEnv(HAND, 2, 5, max_episode_steps=steps) for steps in (3, 50))
    _, of_short = roll(short, 4)
    _, of_long = roll(long, 4)
    for index in range(3):
        np.testing.assert_array_equal(of_short[index].obs, of_long[index].obs)
    assert of_short[2].truncated.all() and not of_long[2].truncated.any()
    assert not np.array_equal(of_short[3].obs, of_long[3].obs)


def test_end_of_a_task_at_its_time_limit_is_termination():
    env = EnvPoolEnv(LEAP, 2, seed=3)
    _, results = roll(env, 400)
    index = next(i for i, result in enumerate(results) if result.terminated.any())
    lane = int(np.flatnonzero(results[index].terminated)[0])
    _, results = roll(EnvPoolEnv(LEAP, 2, seed=3, max_episode_steps=index + 1), index + 1)
    assert results[-1].terminated[lane]
    assert not results[-1].terminated[1 - lane] and results[-1].truncated[1 - lane]


def test_reset_in_mid_episode_leaves_no_border():
    env = EnvPoolEnv("Pendulum-v1", 2, 0, max_episode_steps=3)
    _, results = roll(env, 3)
    assert results[-1].truncated.all()
    _, results = roll(env, 4)
    assert [bool(result.is_border.any()) for result in results] == [False, False, False, True]


def test_arrays_belong_to_the_caller():
    env = EnvPoolEnv(LEAP, 2, 0, max_episode_steps=5)
    first, results = roll(env, 3)
    arrays = [first, env.states()]
    for result in results:
        arrays += [x for x in result if isinstance(x, np.ndarray)] + list(result.info.values())
    kept = [array.copy() for array in arrays]
    for array in arrays:
        assert array.flags.writeable
    roll(env, 7)
    for array, copy in zip(arrays, kept):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("task", [HAND, "Pendulum-v1", LEAP])
def test_seeds(task):
    def record(env, seed=None):
        first = env.reset(seed)
        # All lanes act alike, whatever their number.
        shared = np.random.default_rng(0).uniform(-1, 1, (8, 1, env.spec.action_size)).astype(np.float32)
        steps = np.repeat(shared, env.num_envs, axis=1)
        return np.stack([first] + [env.step(action).obs for action in steps])

    def make(num_envs, seed, num_threads=1):
        return EnvPoolEnv(task, num_envs, seed, num_threads=num_threads, max_episode_steps=5)

    env = make(2, 7)
    first = record(env)
    np.testing.assert_array_equal(first, record(make(2, 7, num_threads=2)))
    np.testing.assert_array_equal(first, record(env, seed=7))
    np.testing.assert_array_equal(first[:, 1:], record(make(1, 8)))  # lane i has seed + i
    assert not np.array_equal(first, record(make(2, 9)))
    assert not np.array_equal(first[6], first[0])  # the next episode is another
    make(1, 2**31 + 7), make(1, -1)  # any integer will do


def test_goal_observation_order_and_reward():
    env = EnvPoolEnv(HAND, 2, 3, max_episode_steps=4)
    raw, _ = envpool.make_gymnasium(HAND, num_envs=2, seed=3, num_threads=1).reset()
    obs, results = roll(env, 6)
    expected = np.concatenate([raw["observation"], raw["achieved_goal"], raw["desired_goal"]], axis=1)
    np.testing.assert_array_equal(obs, expected.astype(np.float32))
    assert (env.spec.achieved_goal, env.spec.desired_goal) == ((63, 78), (78, 93))
    assert (env.spec.obs_size, env.spec.action_size, env.spec.control_frequency) == (93, 20, 25.0)
    for result in results:
        reward = env.compute_reward(result.obs[:, 63:78], result.obs[:, 78:93])
        assert reward.dtype == np.float32
        rows = ~result.is_border
        np.testing.assert_allclose(reward[rows], result.reward[rows], atol=1e-6)


@pytest.mark.parametrize("task, threshold", [("HandReach-v3", 0.01), ("FetchReach-v4", 0.05)])
def test_sparse_reward_threshold(task, threshold):
    env = EnvPoolEnv(task, 1, 0)
    size = env.spec.desired_goal[1] - env.spec.desired_goal[0]
    achieved = np.zeros((2, size), np.float32)
    achieved[:, 0] = threshold * np.array([0.99, 1.01])
    np.testing.assert_array_equal(env.compute_reward(achieved, np.zeros_like(achieved)), [0, -1])


@pytest.mark.parametrize("threshold, success", [(0.01, 0.0), (10.0, 1.0)])
def test_success_never_at_a_border(threshold, success):
    env = EnvPoolEnv("HandReach-v3", 2, 0, max_episode_steps=3, distance_threshold=threshold)
    _, results = roll(env, 4)
    for result in results:
        assert result.info["success"].dtype == np.float32
        np.testing.assert_array_equal(result.info["success"], np.where(result.is_border, 0.0, success))


def test_goal_rewards_are_described():
    env = EnvPoolEnv("FetchReachDense-v4", 1, 0, distance_threshold=0.03)
    assert env.spec.goal_reward == {"kind": "distance", "threshold": 0.03, "sparse": False}
    assert EnvPoolEnv(HAND, 1, 0).spec.goal_reward == {"kind": "distance", "threshold": 0.01, "sparse": False}
    env = EnvPoolEnv("HandManipulatePenRotate_ContinuousTouchSensors-v1", 1, 0, rotation_threshold=0.2)
    assert env.spec.goal_reward == {
        "kind": "pose", "position": False, "rotation": True, "ignore_z": True,
        "position_threshold": 0.05, "rotation_threshold": 0.2, "sparse": True,
    }  # fmt: skip
    assert env.spec.goal_in_reward == "next_obs"


def test_reward_of_poses():
    env = EnvPoolEnv("HandManipulateBlock-v1", 1, 0)
    assert env.spec.desired_goal == (68, 75)
    desired = np.array([[0, 0, 0, 1, 0, 0, 0]] * 3, np.float32)
    achieved = desired + np.array([[0.009, 0, 0, 0, 0, 0, 0.045], [0.011, 0, 0, 0, 0, 0, 0], [0] * 6 + [0.055]])
    np.testing.assert_array_equal(env.compute_reward(achieved, desired), [0, -1, -1])


def test_other_tasks_have_no_reward_function():
    for task in ("PointMaze_UMaze-v3", "AdroitHandPen-v1"):
        env = EnvPoolEnv(task, 1, 0)
        assert env.spec.goal_reward is None
        with pytest.raises(EnvError, match="no goal-conditioned reward"):
            env.compute_reward(np.zeros((1, 2)), np.zeros((1, 2)))


def test_privileged_states():
    env = EnvPoolEnv(LEAP, 2, 0)
    obs = env.reset()
    states = env.states()
    assert (obs.shape, states.shape, states.dtype) == ((2, 57), (2, 128), np.float32)
    result = env.step(np.zeros((2, 16), np.float32))
    assert result.states.shape == (2, env.spec.states_size) == (2, 128)
    assert not np.array_equal(result.states, states)
    assert env.spec.control_frequency == pytest.approx(20.0)
    assert EnvPoolEnv(HAND, 1, 0).states() is None


def test_actions_are_scaled_to_the_bounds():
    env = EnvPoolEnv("Pendulum-v1", 1, 0)
    raw = envpool.make_gymnasium("Pendulum-v1", num_envs=1, seed=0, num_threads=1)
    env.reset(), raw.reset()
    for ours, theirs in ((1.0, 2.0), (-0.5, -1.0), (3.0, 2.0)):
        expected = raw.step(np.full((1, 1), theirs, np.float32))[0]
        np.testing.assert_array_equal(env.step(np.full((1, 1), ours, np.float32)).obs, expected)
    assert (env.spec.action_low, env.spec.action_high) == ([-2.0], [2.0])


def test_spec_survives_a_pipe():
    spec = EnvPoolEnv(HAND, 1, 0).spec
    assert EnvSpec.from_json(spec.to_json()) == spec
    assert spec.versions == {"envpool": envpool.__version__}


@pytest.mark.parametrize(
    "init_args, words",
    [
        ({"task": "LeapCubeReorient"}, ["data.env.init_args.task", LEAP]),
        ({"task": "Pong-v5"}, ["data.env.init_args.task", "not a vector"]),
        ({"task": HAND, "max_epsiode_steps": 5}, ["data.env.init_args", "max_epsiode_steps"]),
        ({"task": HAND, "max_episode_steps": "five"}, ["data.env.init_args", HAND]),
        ({"task": HAND, "num_threads": 0}, ["num_threads"]),
        ({"task": HAND, "batch_size": 1}, ["batch_size"]),
    ],
)
def test_bad_input_is_one_line(init_args, words):
    with pytest.raises(EnvError) as caught:
        make_env("EnvPoolEnv", init_args, 2, 0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_unknown_task_names_three_others():
    with pytest.raises(EnvError) as caught:
        EnvPoolEnv("HandReachDens-v3", 1, 0)
    named = str(caught.value).split("nearest: ")[1].split(", ")
    assert len(named) == 3 and HAND in named
    assert set(named) <= set(envpool.list_all_envs())


def test_step_before_reset_does_not_hang():
    with pytest.raises(RuntimeError, match="reset"):
        EnvPoolEnv("Pendulum-v1", 1, 0).step(np.zeros((1, 1), np.float32))


def test_missing_package_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(EnvError, match="pip install envpool"):
        EnvPoolEnv("Pendulum-v1", 1, 0)


def test_images_of_the_simulation_itself_change_nothing():
    # In a process of its own: OpenGL has to be there before EnvPool is imported.
    code = """
import numpy as np
from claw_lightning.rollout.envs.base import EnvError, make_env
drawn, plain = (make_env("EnvPoolEnv", {"task": "HandReachDense-v3"}, 1, 0, rendering) for rendering in (True, False))
assert plain.render(0) is None
drawn.reset(3), plain.reset(3)
for _ in range(3):
    try:
        image = drawn.render(0)
    except EnvError as error:
        assert "EGL" in str(error)
        print("no driver")
        break
    assert image.shape == (480, 480, 3) and image.dtype == np.uint8 and image.std() > 5
    action = np.ones((1, 20), np.float32)
    assert (drawn.step(action).obs == plain.step(action).obs).all()
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_where_opengl_came_too_late_images_are_refused_in_one_line(monkeypatch):
    env = EnvPoolEnv("Pendulum-v1", render_mode="rgb_array")
    monkeypatch.setattr(envpool_env, "_opengl_is_loaded", False)
    with pytest.raises(EnvError, match="cannot be drawn here.*EGL"):
        env.render(0)
    env.close()
