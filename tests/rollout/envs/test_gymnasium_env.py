"""GymnasiumEnv on a task whose observation tells lane, episode and step, and on real ones."""

import subprocess
import sys

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvError, EnvSpec, GymnasiumEnv, make_env

gym = pytest.importorskip("gymnasium")

TIME_LIMIT = 5
END_OF_LANE_0 = 3
SEED = 100  # the counting task takes its lane from the seed


class Counting(gym.Env):
    """Observes [lane, episode, step]; lane 0 terminates at its third step and says is_success only there."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    dt = 0.1

    def __init__(self, action_space=None, observation_space=None):
        self.action_space = action_space or gym.spaces.Box(
            np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64
        )
        if observation_space is not None:
            self.observation_space = observation_space
        self.lane, self.episode, self.count = 0, -1, 0
        self.last_action = None

    def _obs(self):
        return np.array([self.lane, self.episode, self.count], dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.lane, self.episode = seed - SEED, -1
        self.episode += 1
        self.count = 0
        return self._obs(), {"is_success": True}  # of the reset: must never be counted

    def step(self, action):
        self.last_action = action
        self.count += 1
        terminated = self.lane == 0 and self.count == END_OF_LANE_0
        return self._obs(), float(self.count), terminated, False, {"is_success": True} if terminated else {}


class OneHot(Counting):
    observation_space = gym.spaces.Discrete(4, start=2)

    def _obs(self):
        return 2 + self.count % 4


class Goal(Counting):
    observation_space = gym.spaces.Dict(
        {
            name: gym.spaces.Box(-9, 9, (size,))
            for name, size in (
                ("achieved_goal", 2),
                ("desired_goal", 2),
                ("extra", 1),
                ("observation", 3),
                ("privileged_state", 5),
            )
        }
    )

    def _obs(self):
        sizes = {name: space.shape for name, space in self.observation_space.items()}
        values = {"observation": 1, "achieved_goal": 2, "desired_goal": 3, "extra": 4, "privileged_state": 5}
        return {name: np.full(sizes[name], value, np.float32) for name, value in values.items()}

    def compute_reward(self, achieved_goal, desired_goal, info):
        return -np.linalg.norm(achieved_goal - desired_goal, axis=-1)


for _class in (Counting, OneHot, Goal):
    gym.register("Claw%s-v0" % _class.__name__, _class, max_episode_steps=TIME_LIMIT)


def zeros(env):
    return np.zeros((env.num_envs, env.spec.action_size), np.float32)


def test_borders_ends_and_true_final_observations():
    env = GymnasiumEnv("ClawCounting-v0", num_envs=2, seed=SEED)
    np.testing.assert_array_equal(env.reset(), [[0, 0, 0], [1, 0, 0]])
    steps = [env.step(zeros(env)) for _ in range(13)]

    # Lane 0: three steps, then the reset step, again and again. Lane 1: five, then the reset step.
    for lane, length in ((0, END_OF_LANE_0), (1, TIME_LIMIT)):
        for index, result in enumerate(steps):
            episode, step = divmod(index + 1, length + 1)
            ended = step == length
            np.testing.assert_array_equal(result.obs[lane], [lane, episode, step])
            assert result.is_border[lane] == (step == 0)
            assert result.terminated[lane] == (ended and lane == 0)
            assert result.truncated[lane] == (ended and lane == 1)
            assert result.reward[lane] == step
    assert all(result.final_obs is None and result.has_final_obs is None for result in steps)


class Camera(Counting):
    """An image whose channels tell lane, episode and step, in the axes that are asked for, alone or beside numbers."""

    def __init__(self, axes="hwc", beside=()):
        super().__init__()
        self.axes = axes
        shape = {"hwc": (4, 5, 3), "chw": (3, 4, 5), "hw": (4, 5)}[axes]
        space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.beside = list(beside)
        numbers = {name: gym.spaces.Box(-9, 9, (2,)) for name in self.beside}
        self.observation_space = gym.spaces.Dict({"camera": space, **numbers}) if self.beside else space

    def _obs(self):
        image = np.zeros((4, 5, 3), np.uint8) + super()._obs().astype(np.uint8)
        image[0, 0] = 255  # marks the upper left corner
        image = {"hwc": image, "chw": image.transpose(2, 0, 1), "hw": image[:, :, 2]}[self.axes]
        return {"camera": image, **{n: np.full(2, 7, np.float32) for n in self.beside}} if self.beside else image


gym.register("ClawCamera-v0", Camera, max_episode_steps=TIME_LIMIT)


@pytest.mark.parametrize("beside", [(), ("position",)])
@pytest.mark.parametrize("axes", ["hwc", "chw", "hw"])
def test_one_image_becomes_the_image(axes, beside):
    env = GymnasiumEnv("ClawCamera-v0", 2, SEED, make_kwargs={"axes": axes, "beside": beside})
    channels = 1 if axes == "hw" else 3
    assert (env.spec.image_shape, env.spec.obs_size) == ((channels, 4, 5), 2 * len(beside))
    assert env.image() is None
    obs, images = env.reset(), []
    assert obs.shape == (2, 2 * len(beside)) and obs.dtype == np.float32
    images = [env.image()]
    for _ in range(TIME_LIMIT + 2):
        result = env.step(zeros(env))
        images.append(result.image)
        assert (result.obs == 7).all() and result.obs.shape == obs.shape
    for t, image in enumerate(images):
        assert image.shape == (2, channels, 4, 5) and image.dtype == np.uint8 and image.flags.c_contiguous
        assert (image[:, :, 0, 0] == 255).all()
        for lane, length in ((0, END_OF_LANE_0), (1, TIME_LIMIT)):
            expected = [lane, *divmod(t, length + 1)][-channels:]
            np.testing.assert_array_equal(image[lane, :, 1, 2], expected)


def test_a_second_image_is_refused():
    spaces = {name: gym.spaces.Box(0, 255, (4, 5, 3), np.uint8) for name in ("left", "right")}
    with pytest.raises(EnvError, match="observation part 'right'.*not a vector"):
        GymnasiumEnv("ClawCounting-v0", make_kwargs={"observation_space": gym.spaces.Dict(spaces)})


def test_success_of_the_lane_and_step_that_gave_it():
    env = GymnasiumEnv("ClawCounting-v0", num_envs=2, seed=SEED)
    env.reset()
    steps = [env.step(zeros(env)) for _ in range(8)]
    success = [result.info["success"].tolist() for result in steps[2:]]
    assert success == [[1, 0], [0, 0], [0, 0], [0, 0], [1, 0], [0, 0]]
    assert steps[2].info["success"].dtype == np.float32


def test_dtypes_shapes_and_ownership():
    env = GymnasiumEnv("ClawCounting-v0", num_envs=2, seed=SEED)
    first = env.reset()
    results = [first] + [x for _ in range(4) for x in env.step(zeros(env)) if isinstance(x, np.ndarray)]
    kept = [array.copy() for array in results]
    for _ in range(4):
        env.step(zeros(env))
    env.reset()
    for array, copy in zip(results, kept):
        np.testing.assert_array_equal(array, copy)
        assert array.dtype in (np.float32, np.bool_)
        assert array.shape[0] == 2


def test_actions_are_scaled_and_clipped():
    env = GymnasiumEnv("ClawCounting-v0", num_envs=2, seed=SEED)
    env.reset()
    env.step(np.array([[-1, -1], [0.5, 7.0]], np.float32))
    inner = [lane.unwrapped for lane in env._vector.envs]
    np.testing.assert_allclose(inner[0].last_action, [-2, 0])
    np.testing.assert_allclose(inner[1].last_action, [1, 10])
    assert (env.spec.action_low, env.spec.action_high) == ([-2, 0], [2, 10])
    with pytest.raises(ValueError, match="shape"):
        env.step(np.zeros((2, 1), np.float32))


def test_discrete_actions_keep_their_start():
    space = gym.spaces.Discrete(3, start=5)
    env = GymnasiumEnv("ClawCounting-v0", 2, SEED, make_kwargs={"action_space": space})
    env.reset()
    env.step(np.array([[0.0], [2.0]], np.float32))
    assert [lane.unwrapped.last_action for lane in env._vector.envs] == [5, 7]
    assert (env.spec.num_actions, env.spec.action_size) == (3, 1)
    for wrong in (3.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="discrete actions"):
            env.step(np.full((2, 1), wrong, np.float32))


def test_discrete_observation_is_one_hot():
    env = GymnasiumEnv("ClawOneHot-v0", 1, SEED)
    np.testing.assert_array_equal(env.reset(), [[1, 0, 0, 0]])
    np.testing.assert_array_equal(env.step(zeros(env)).obs, [[0, 1, 0, 0]])


def test_goal_observation_order_states_and_reward():
    env = GymnasiumEnv("ClawGoal-v0", 2, SEED)
    obs = env.reset()
    np.testing.assert_array_equal(obs, [[1, 1, 1, 2, 2, 3, 3, 4]] * 2)
    assert (env.spec.achieved_goal, env.spec.desired_goal) == ((3, 5), (5, 7))
    np.testing.assert_array_equal(env.states(), np.full((2, 5), 5))
    np.testing.assert_array_equal(env.step(zeros(env)).states, np.full((2, 5), 5))
    reward = env.compute_reward(np.zeros((3, 2), np.float32), np.array([[3, 4], [0, 0], [0, 1]], np.float32))
    np.testing.assert_allclose(reward, [-5, 0, -1])
    assert reward.dtype == np.float32
    assert EnvSpec.from_json(env.spec.to_json()) == env.spec


def test_reward_that_is_not_vectorised_is_refused():
    env = GymnasiumEnv("ClawGoal-v0", 1, SEED)
    env._vector.envs[0].unwrapped.compute_reward = lambda achieved, desired, info: 0.0
    with pytest.raises(EnvError, match="vectorised"):
        env.compute_reward(np.zeros((3, 2)), np.zeros((3, 2)))
    with pytest.raises(EnvError, match="no goal-conditioned reward"):
        GymnasiumEnv("ClawCounting-v0", 1, SEED).compute_reward(np.zeros((3, 2)), np.zeros((3, 2)))


def test_seeds():
    def roll(env, seed=None):
        arrays = [env.reset(seed)]
        arrays += [env.step(np.full((2, 1), 0.1, np.float32)).obs for _ in range(12)]
        return np.stack(arrays)

    def make(seed):
        return make_env("GymnasiumEnv", {"task": "Pendulum-v1", "make_kwargs": {"max_episode_steps": 5}}, 2, seed)

    env = make(3)
    first = roll(env)
    np.testing.assert_array_equal(first, roll(make(3)))
    np.testing.assert_array_equal(first, roll(env, seed=3))
    np.testing.assert_array_equal(first[:6, 1], roll(make(4))[:6, 0])  # lane i has seed + i
    assert not np.array_equal(first, roll(env))
    assert env.spec.max_episode_steps == 5
    assert env.spec.control_frequency == pytest.approx(20.0)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"task": "Pendulum-v7"}, ["init_args.task", "Pendulum-v1"]),
        ({"task": "Pendulmu-v1"}, ["init_args.task", "Pendulum-v1"]),
        ({"task": "no_such_module:Foo-v0"}, ["init_args.task", "no_such_module"]),
        ({"task": "Pendulum-v1", "import_module": "no.such"}, ["init_args.import_module", "no.such"]),
        ({"task": "Pendulum-v1", "make_kwargs": {"foo": 1}}, ["init_args.make_kwargs", "foo"]),
        ({"task": "Pendulum-v1", "nonsense": 1}, ["init_args", "nonsense"]),
        ({"task": "Blackjack-v1"}, ["Tuple", "FlattenObservation"]),
    ],
)
def test_bad_input_is_one_line(kwargs, words):
    with pytest.raises(EnvError) as caught:
        make_env("GymnasiumEnv", kwargs, 2, 0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "name, space, word",
    [
        ("observation_space", gym.spaces.Box(0, 1, (8, 8, 3), np.float32), "float32"),
        ("observation_space", gym.spaces.Text(5), "Text"),
        ("observation_space", gym.spaces.Dict(a=gym.spaces.MultiBinary(3)), "'a'"),
        ("action_space", gym.spaces.Box(-np.inf, np.inf, (2,)), "finite bounds"),
        ("action_space", gym.spaces.MultiDiscrete([2, 3]), "MultiDiscrete"),
    ],
)
def test_spaces_that_cannot_be_learnt(name, space, word):
    with pytest.raises(EnvError, match=word):
        GymnasiumEnv("ClawCounting-v0", 1, 0, make_kwargs={name: space})


def test_import_module_and_module_id(tmp_path, monkeypatch):
    source = "import gymnasium as gym\ngym.register('%s', 'gymnasium.envs.classic_control:PendulumEnv')\n"
    (tmp_path / "claw_user_a.py").write_text(source % "ClawUserA-v0")
    (tmp_path / "claw_user_b.py").write_text(source % "ClawUserB-v0")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert GymnasiumEnv("ClawUserA-v0", 1, 0, import_module="claw_user_a").reset().shape == (1, 3)
    assert GymnasiumEnv("claw_user_b:ClawUserB-v0", 1, 0).reset().shape == (1, 3)


def test_missing_packages_name_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium_robotics", None)
    with pytest.raises(EnvError, match="pip install gymnasium-robotics"):
        GymnasiumEnv("HandReach-v99", 1, 0)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(EnvError, match="pip install 'gymnasium>=1.0'"):
        GymnasiumEnv("Pendulum-v1", 1, 0)


def test_hand_of_gymnasium_robotics(monkeypatch):
    pytest.importorskip("gymnasium_robotics")
    mujoco = pytest.importorskip("mujoco")
    env = GymnasiumEnv("HandReachDense-v3", 1, 0)
    obs = env.reset()
    assert obs.shape == (1, 93)
    assert (env.spec.achieved_goal, env.spec.desired_goal) == ((63, 78), (78, 93))
    assert env.spec.control_frequency == pytest.approx(25.0)
    result = env.step(zeros(env))
    assert result.info["success"].shape == (1,)
    np.testing.assert_allclose(env.compute_reward(result.obs[:, 63:78], result.obs[:, 78:93]), result.reward, atol=1e-6)

    # The failure of mujoco >= 3.12, put on: the assertion alone would not say which package to change.
    def fail(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(type(env._vector.envs[0].unwrapped), "reset", fail)
    monkeypatch.setattr(mujoco, "__version__", "3.11.0")
    with pytest.raises(AssertionError):
        env.reset()
    monkeypatch.setattr(mujoco, "__version__", "4.0.0")
    with pytest.raises(EnvError, match="mujoco 4.0.0.*mujoco>=3.5,<3.12"):
        env.reset()


def test_goal_rewards_of_gymnasium_robotics_are_described():
    pytest.importorskip("gymnasium_robotics")
    env = GymnasiumEnv("FetchReach-v4", 1, 0)
    assert env.spec.goal_reward == {"kind": "distance", "threshold": 0.05, "sparse": True}
    env.configure(distance_threshold=0.02)
    assert env.spec.goal_reward["threshold"] == 0.02
    env = GymnasiumEnv("HandManipulatePen-v1", 1, 0, make_kwargs={"reward_type": "dense"})
    assert env.spec.goal_reward == {
        "kind": "pose", "position": True, "rotation": True, "ignore_z": True,
        "position_threshold": 0.05, "rotation_threshold": 0.1, "sparse": False,
    }  # fmt: skip
    for task in ("PointMaze_UMaze-v3", "AdroitHandPen-v1"):
        assert GymnasiumEnv(task, 1, 0).spec.goal_reward is None


@pytest.mark.parametrize("name", ["compute_reward", "_goal_distance", "_is_success"])
def test_a_reward_of_ones_own_is_not_taken_for_that_of_gymnasium_robotics(name):
    pytest.importorskip("gymnasium_robotics")
    from gymnasium_robotics.envs.shadow_dexterous_hand.manipulate_block import MujocoHandBlockEnv

    def own(self, achieved, desired, info=None):
        return np.linalg.norm(achieved - desired, axis=-1)

    task = type("Own", (MujocoHandBlockEnv,), {name: own})
    gym.register("ClawOwn-v0", task, max_episode_steps=TIME_LIMIT)
    try:
        env = GymnasiumEnv("ClawOwn-v0", 1, 0, make_kwargs={"target_position": "random", "target_rotation": "xyz"})
    finally:
        del gym.registry["ClawOwn-v0"]
    assert env.spec.goal_reward is None
    goals = np.zeros((2, 7))
    if name == "compute_reward":
        np.testing.assert_array_equal(env.compute_reward(goals, goals + [3, 4, 0, 0, 0, 0, 0]), [5, 5])


def test_importing_the_package_imports_no_simulator():
    code = "import sys, claw_lightning.rollout.envs; assert not {'envpool', 'gymnasium', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Tunable(Counting):
    friction, level, mode, damped, masses = 0.5, 2, "soft", False, np.ones(3)
    weight = property(lambda self: 9.81)

    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, self.friction * self.level, terminated, truncated, info


gym.register("ClawTunable-v0", entry_point=Tunable, max_episode_steps=TIME_LIMIT)


def test_attributes_of_the_running_tasks_change():
    env = GymnasiumEnv("ClawTunable-v0", num_envs=2, seed=SEED)
    env.reset()
    assert (env.step(zeros(env)).reward == 1.0).all()
    env.configure(friction=3, level=4.0, mode="hard", damped=True)
    assert (env.step(zeros(env)).reward == 12.0).all()
    env.reset(SEED)
    assert (env.step(zeros(env)).reward == 12.0).all()
    tasks = [one.unwrapped for one in env._vector.envs]
    assert [(t.mode, t.damped, type(t.level)) for t in tasks] == [("hard", True, int)] * 2
    assert (Tunable.friction, Tunable.level) == (0.5, 2)
    env.close()


@pytest.mark.parametrize(
    "name, value",
    [("gravity", 1.0), ("_level", 1), ("mode", 1), ("level", "1"), ("damped", 1), ("masses", 1.0), ("step", 1.0),
     ("weight", 1.0), ("action_space", 1)],
)  # fmt: skip
def test_attributes_that_cannot_change_are_named(name, value):
    env = GymnasiumEnv("ClawTunable-v0", num_envs=2, seed=SEED)
    with pytest.raises(EnvError, match="attribute '%s' of task ClawTunable-v0" % name) as caught:
        env.configure(friction=3.0, **{name: value})
    assert "\n" not in str(caught.value)
    assert all(one.unwrapped.friction == 0.5 for one in env._vector.envs)
    env.close()


# -- restarts in the step that ends an episode ------------------------------------------------------------------------


def test_restarts_in_the_same_step_keep_the_final_observation_and_its_success():
    env = GymnasiumEnv("ClawCounting-v0", num_envs=2, seed=SEED, autoreset="same_step")
    assert env.spec.autoreset == "same_step"
    env.reset()
    results = [env.step(zeros(env)) for _ in range(11)]
    for lane, length in ((0, END_OF_LANE_0), (1, TIME_LIMIT)):
        for index, result in enumerate(results):
            episode, step = divmod(index + 1, length)
            np.testing.assert_array_equal(result.obs[lane], [lane, episode, step])
            assert result.has_final_obs[lane] == (step == 0) and not result.is_border[lane]
            if step == 0:
                np.testing.assert_array_equal(result.final_obs[lane], [lane, episode - 1, length])
            if "success" in result.info:
                assert result.info["success"][lane] == (step == 0 and lane == 0)


def test_restarts_that_cannot_be_had_are_one_line(monkeypatch):
    with pytest.raises(EnvError, match="autoreset: next_step or same_step, not 'disabled'"):
        GymnasiumEnv("ClawCounting-v0", autoreset="disabled")
    with pytest.raises(EnvError, match="images with same-step autoreset are not supported"):
        GymnasiumEnv("ClawCamera-v0", autoreset="same_step")
    monkeypatch.delattr(gym.vector, "AutoresetMode")
    with pytest.raises(EnvError, match="same_step' needs Gymnasium 1.1"):
        GymnasiumEnv("ClawCounting-v0", autoreset="same_step")
