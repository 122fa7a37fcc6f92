"""Rewards from plain data: by hand, and against what the simulators themselves gave."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvError, EnvPoolEnv, EnvSpec, GymnasiumEnv, VectorEnv
from claw_lightning.rollout.goals import goal_reward, plain_settings, pose_distance
from tests.pythons import python_38

ROOT = Path(__file__).resolve().parents[2]
DISTANCE = {"kind": "distance", "threshold": 0.01, "sparse": True}
POSE = {
    "kind": "pose", "position": True, "rotation": True, "ignore_z": False,
    "position_threshold": 0.01, "rotation_threshold": 0.1, "sparse": True,
}  # fmt: skip
PEN = {**POSE, "ignore_z": True}
ORIGIN = np.zeros(3)


def turn(axis, angle):
    """Quaternion w, x, y, z of a turn about axis 0, 1 or 2."""
    quaternion = np.array([np.cos(angle / 2), 0.0, 0.0, 0.0])
    quaternion[1 + axis] = np.sin(angle / 2)
    return quaternion


def product(*quaternions):
    found = np.array([1.0, 0.0, 0.0, 0.0])
    for other in quaternions:
        w, v, u, s = found[0], found[1:], other[0], other[1:]
        found = np.array([w * u - v @ s, *(w * s + u * v + np.cross(v, s))])
    return found


def euler(x, y, z):
    return product(turn(0, x), turn(1, y), turn(2, z))


def pose(position, quaternion):
    return np.array([*position, *quaternion])


def random_poses(rng, count):
    quaternions = rng.normal(size=(count, 4))
    quaternions /= np.linalg.norm(quaternions, axis=1, keepdims=True)
    return np.concatenate([rng.uniform(-0.02, 0.02, (count, 3)), quaternions], axis=1)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_distance():
    achieved = np.array([[3.0, 4.0], [0.0, 0.01], [0.0, 0.0099], [0.0, 0.0101]])
    dense = goal_reward({**DISTANCE, "sparse": False})(achieved, np.zeros((4, 2)))
    np.testing.assert_array_equal(dense, -np.array([5.0, 0.01, 0.0099, 0.0101], np.float32))
    sparse = goal_reward(DISTANCE)(achieved, np.zeros((4, 2)))
    np.testing.assert_array_equal(sparse, [-1.0, 0.0, 0.0, -1.0])  # the threshold itself is near enough
    assert not np.signbit(sparse[1])
    assert dense.dtype == sparse.dtype == np.float32


@pytest.mark.parametrize("settings", [DISTANCE, {**POSE, "sparse": False}, PEN])
def test_shapes(settings):
    reward = goal_reward(settings)
    goals = random_poses(np.random.default_rng(0), 24).astype(np.float32).reshape(2, 3, 4, 7)
    found = reward(goals, goals[::-1])
    assert (found.shape, found.dtype) == ((2, 3, 4), np.float32)
    np.testing.assert_array_equal(found[1, 2, 3], reward(goals[1, 2, 3], goals[0, 2, 3]))
    np.testing.assert_array_equal(reward(goals, goals[0, 0, 0])[0, 1], reward(goals[0, 1], goals[[0] * 4, 0, 0]))
    assert reward(goals[0, 0, 0], goals[0, 0, 1]).shape == ()
    assert reward(goals[0, 0, :0], goals[0, 0, :0]).shape == (0,)
    for wrong in (goals[..., :6], goals[..., :1], np.float32(0)):
        with pytest.raises(ValueError, match="goals have shape"):
            reward(goals, wrong)


@pytest.mark.parametrize(
    "quaternion, radians",
    [
        (turn(2, 0.0), 0.0),
        (turn(2, np.pi / 2), np.pi / 2),
        (turn(0, -np.pi / 2), np.pi / 2),
        (turn(1, np.pi), np.pi),
        (-turn(2, 0.0), 2 * np.pi),  # the same rotation; the tasks do not take it for one
        (-turn(2, 0.5), 2 * np.pi - 0.5),
    ],
)
@pytest.mark.parametrize("position, rotation", [(True, True), (True, False), (False, True), (False, False)])
def test_dense_pose(quaternion, radians, position, rotation):
    base = product(turn(0, 0.7), turn(2, -1.2))
    achieved, desired = pose([1.3, 0.4, 0.0], product(base, quaternion)), pose([1.0, 0.0, 0.0], base)
    reward = goal_reward({**POSE, "sparse": False, "position": position, "rotation": rotation})(achieved, desired)
    assert reward == pytest.approx(-(10 * 0.5 * position + radians * rotation), abs=1e-6)


@pytest.mark.parametrize(
    "metres, radians, expected",
    [(0.0, 0.0, 0), (0.0099, 0.0999, 0), (0.0101, 0.0999, -1), (0.0099, 0.1001, -1), (0.0101, 0.1001, -1)],
)
def test_sparse_pose(metres, radians, expected):
    achieved, desired = pose([0.0, 0.0, metres], turn(0, radians)), pose(ORIGIN, turn(0, 0.0))
    assert goal_reward(POSE)(achieved, desired) == expected
    assert goal_reward({**POSE, "position": False})(achieved, desired) == (0 if radians < 0.1 else -1)
    assert goal_reward({**POSE, "rotation": False})(achieved, desired) == (0 if metres < 0.01 else -1)


def test_a_turn_about_its_own_axis_does_not_count_for_a_pen():
    reward = goal_reward({**PEN, "sparse": False})
    desired = pose(ORIGIN, euler(0.3, 0.2, 0.1))
    assert reward(pose(ORIGIN, euler(0.3, 0.2, -1.4)), desired) == pytest.approx(0.0, abs=1e-6)
    assert reward(pose(ORIGIN, euler(0.5, 0.2, 3.0)), desired) == pytest.approx(-0.2, abs=1e-6)
    assert reward(pose(ORIGIN, -euler(0.5, 0.2, 3.0)), desired) == pytest.approx(-0.2, abs=1e-6)
    # The other way round the sign does count: what is compared is the desired quaternion as it came.
    assert reward(desired, -desired) == pytest.approx(-2 * np.pi, abs=1e-6)
    # Batches are taken row by row.
    achieved = np.stack([pose(ORIGIN, euler(0.3, 0.2, z)) for z in np.linspace(-3, 3, 7)])
    np.testing.assert_allclose(reward(achieved, np.stack([desired] * 7)), np.zeros(7), atol=1e-6)


def test_float32_poses_lose_no_more_than_their_rounding():
    poses = random_poses(np.random.default_rng(1), 2000).astype(np.float32)
    metres, radians = pose_distance(poses, poses, True, True, False)
    assert metres.max() == 0.0 and radians.max() < 1e-7
    other = random_poses(np.random.default_rng(2), 2000)
    exact, rounded = (pose_distance(poses.astype(kind), other.astype(kind), True, True, False) for kind in (float, "f"))
    np.testing.assert_allclose(rounded, exact, atol=5e-7)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, words",
    [
        (None, ["goal_reward", "mapping"]),
        ({}, ["goal_reward.kind", "distance, pose, function", "None"]),
        ({"kind": ["pose"]}, ["goal_reward.kind"]),
        ({**DISTANCE, "kind": "poes"}, ["goal_reward.kind", "'poes'"]),
        ({"kind": "distance", "sparse": True}, ["goal_reward.threshold", "missing"]),
        ({**DISTANCE, "treshold": 1.0}, ["goal_reward.treshold", "threshold, sparse"]),
        ({**DISTANCE, "threshold": "0.1"}, ["goal_reward.threshold", "number", "'0.1'"]),
        ({**DISTANCE, "threshold": float("nan")}, ["goal_reward.threshold"]),
        ({**DISTANCE, "threshold": True}, ["goal_reward.threshold"]),
        ({**DISTANCE, "sparse": 1}, ["goal_reward.sparse", "true or false"]),
        ({**POSE, "rotation": "xyz"}, ["goal_reward.rotation", "'xyz'"]),
        ({"kind": "function"}, ["goal_reward.path", "missing"]),
        ({"kind": "function", "path": "math.hypot"}, ["goal_reward.path", "package.module:function"]),
        ({"kind": "function", "path": "no.such:reward"}, ["goal_reward.path", "no.such"]),
        ({"kind": "function", "path": "math:no_such"}, ["goal_reward.path", "no_such"]),
        ({"kind": "function", "path": "math:pi"}, ["goal_reward.path", "pi"]),
        (
            {"kind": "function", "path": "operator:add", "arguments": {"indents": 1}},
            ["goal_reward.arguments", "indents"],
        ),
        ({"kind": "function", "path": "operator:add", "arguments": [1]}, ["goal_reward.arguments", "mapping"]),
    ],
)
def test_wrong_settings_are_one_line(settings, words):
    with pytest.raises(EnvError) as caught:
        goal_reward(settings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_settings_become_plain():
    arguments = {
        "scale": np.float32(0.5),
        "sides": (1, np.int64(2)),
        "matrix": np.eye(2),
        "deep": {"on": np.bool_(True)},
    }
    plain = plain_settings({"kind": "function", "path": "a:b", "arguments": arguments})
    assert plain["arguments"] == {"scale": 0.5, "sides": [1, 2], "matrix": [[1, 0], [0, 1]], "deep": {"on": True}}
    assert json.loads(json.dumps(plain)) == plain
    assert plain_settings({**DISTANCE, "sparse": np.bool_(False), "threshold": np.float64(1)}) == {
        "kind": "distance", "threshold": 1.0, "sparse": False,
    }  # fmt: skip


def test_function_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "claw_user_goals.py").write_text(
        "def close(achieved, desired, *, scale=1.0):\n    return -scale * abs(achieved - desired).sum(-1)\n"
        "def whole(achieved, desired):\n    return abs(achieved - desired).sum()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"kind": "function", "path": "claw_user_goals:close"}
    achieved, desired = np.ones((3, 2), np.float32), np.zeros((3, 2), np.float32)
    np.testing.assert_array_equal(goal_reward(settings)(achieved, desired), [-2, -2, -2])
    found = goal_reward({**settings, "arguments": {"scale": 0.5}})(achieved, desired)
    np.testing.assert_array_equal(found, [-1, -1, -1])
    assert found.dtype == np.float32
    with pytest.raises(EnvError, match="vectorised"):
        goal_reward({"kind": "function", "path": "claw_user_goals:whole"})(achieved, desired)


# --- the specification -----------------------------------------------------------------------------------------------

FIELDS = {"task": "Goal", "obs_size": 6, "action_size": 1, "action_low": [-1.0], "action_high": [1.0]}


def test_spec_carries_the_reward_and_where_its_goal_is_read():
    spec = EnvSpec(**FIELDS, goal_reward={**DISTANCE, "threshold": np.float32(0.5)}, goal_in_reward="obs")
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert type(spec.goal_reward["threshold"]) is float
    old = {key: value for key, value in spec.to_json().items() if not key.startswith("goal_")}
    assert (EnvSpec.from_json(old).goal_reward, EnvSpec.from_json(old).goal_in_reward) == (None, "next_obs")


@pytest.mark.parametrize(
    "changes, word",
    [({"goal_in_reward": "state"}, "goal_in_reward"), ({"goal_reward": {"kind": "x"}}, "goal_reward.kind")],
)
def test_wrong_spec(changes, word):
    with pytest.raises(EnvError, match=word):
        EnvSpec(**FIELDS, **changes)


def test_any_adapter_has_the_reward_that_it_describes():
    env = VectorEnv()
    env.spec = EnvSpec(**FIELDS, goal_reward=DISTANCE)
    np.testing.assert_array_equal(env.compute_reward(np.array([[0.0], [1.0]]), np.zeros((2, 1))), [0, -1])
    env.spec = EnvSpec(**FIELDS)
    with pytest.raises(EnvError, match="task Goal has no goal-conditioned reward"):
        env.compute_reward(np.zeros((1, 1)), np.zeros((1, 1)))


# --- the simulators --------------------------------------------------------------------------------------------------


def away_from_thresholds(settings, achieved, desired):
    """Rows that lie at least 1e-6 from each threshold; nearer ones may be rounded to the other side."""
    if settings["kind"] == "distance":
        distances = [(np.linalg.norm(achieved.astype(float) - desired, axis=-1), settings["threshold"])]
    else:
        metres, radians = pose_distance(
            achieved, desired, settings["position"], settings["rotation"], settings["ignore_z"]
        )
        distances = [(metres, settings["position_threshold"]), (radians, settings["rotation_threshold"])]
    return np.all([np.abs(distance - threshold) > 1e-6 for distance, threshold in distances], axis=0)


def compare(env, num_steps):
    """Plays at random and compares each step's reward with the formula's. Returns the rewards [rows]."""
    reward = goal_reward(json.loads(json.dumps(env.spec.goal_reward)))
    rng = np.random.default_rng(0)
    env.reset()
    results = []
    for _ in range(num_steps):
        result = env.step(rng.uniform(-1, 1, (env.num_envs, env.spec.action_size)).astype(np.float32))
        rows = ~result.is_border
        results.append((result.obs[rows], result.reward[rows]))
    obs, given = (np.concatenate(arrays) for arrays in zip(*results))
    achieved, desired = (obs[:, slice(*span)] for span in (env.spec.achieved_goal, env.spec.desired_goal))
    found = reward(achieved, desired)
    np.testing.assert_array_equal(env.compute_reward(achieved, desired), found)
    if env.spec.goal_reward["sparse"]:
        rows = away_from_thresholds(env.spec.goal_reward, achieved, desired)
        assert rows.mean() > 0.9
        np.testing.assert_array_equal(found[rows], given[rows])
    else:
        np.testing.assert_allclose(found, given, atol=1e-4, rtol=0)
    # Goals that are reached, which hardly happens at random: the achieved ones, moved a little.
    near = achieved.copy()
    near[:, :3] += np.float32(1e-3)
    if env.spec.goal_reward["kind"] == "pose" and env.spec.goal_reward["ignore_z"]:
        near[:, 3:] = [on_the_cover_of_a_pen(quaternion) for quaternion in near[:, 3:]]
    worst = reward(achieved, near).min()
    assert worst == 0 if env.spec.goal_reward["sparse"] else worst > -0.0175
    env.close()
    return given


def on_the_cover_of_a_pen(quaternion):
    """The same rotation, with the sign that a pen's Euler angles lead to."""
    other = pose(ORIGIN, quaternion)
    return quaternion if pose_distance(other, other, False, True, True)[1] < 1 else -quaternion


WIDE = {"distance_threshold": 0.05, "rotation_threshold": 2.5}  # at random both sides of the thresholds are seen


@pytest.mark.parametrize(
    "task, changes",
    [
        ("HandReach-v3", {"distance_threshold": 0.07}),
        ("HandReachDense-v3", {}),
        ("FetchPush-v4", {"distance_threshold": 0.15}),
        ("FetchPushDense-v4", {}),
        ("HandManipulateBlockRotateZ-v1", WIDE),
        ("HandManipulateBlockRotateZDense-v1", {}),
        ("HandManipulateBlock-v1", WIDE),
        ("HandManipulateBlockDense-v1", {}),
        ("HandManipulatePen-v1", WIDE),
        ("HandManipulatePenDense-v1", {}),
        ("HandManipulateEgg-v1", WIDE),
        ("HandManipulateEgg_BooleanTouchSensorsDense-v1", {}),
    ],
)
def test_rewards_of_envpool(task, changes):
    pytest.importorskip("envpool")
    env = EnvPoolEnv(task, 4, seed=3, max_episode_steps=20, **changes)
    given = compare(env, 60)
    assert len(given) > 200
    if changes:
        assert set(given) == {-1.0, 0.0}


@pytest.mark.parametrize(
    "task, changes",
    [
        ("HandReach-v3", {}),
        ("FetchPush-v4", {"reward_type": "dense"}),
        ("HandManipulateBlockRotateZ-v1", {}),
        ("HandManipulateBlockRotateZDense-v1", {}),
        ("HandManipulatePenDense-v1", {}),
        ("HandManipulatePenRotate_BooleanTouchSensors-v1", {}),
    ],
)
def test_rewards_of_gymnasium_robotics(task, changes):
    pytest.importorskip("gymnasium_robotics")
    env = GymnasiumEnv(task, 2, seed=3, make_kwargs={"max_episode_steps": 10, **changes})
    own = env._vector.envs[0].unwrapped
    settings, reward = env.spec.goal_reward, goal_reward(env.spec.goal_reward)

    rng = np.random.default_rng(5)
    size = env.spec.desired_goal[1] - env.spec.desired_goal[0]
    if settings["kind"] == "pose":
        # Special rotations among others: half turns, and those whose outer Euler angles cannot be told apart.
        special = [pose(ORIGIN, euler(*(np.pi / 2 * rng.integers(-2, 3, 3)))) for _ in range(50)]
        goals = np.concatenate([random_poses(rng, 150), special])
        achieved, desired = rng.permutation(goals), rng.permutation(goals)
        achieved[:50], desired[50:100] = desired[:50] + 1e-4, achieved[50:100]
        achieved[:50, 3:] /= np.linalg.norm(achieved[:50, 3:], axis=1, keepdims=True)
    else:
        achieved = rng.uniform(-0.1, 0.1, (200, size))
        desired = achieved + rng.uniform(-0.02, 0.02, (200, size)) * rng.uniform(size=(200, 1))
    # One at a time: with ignore_z the task's own function mixes up the rows of a batch.
    expected = np.array([own.compute_reward(a, d, {}) for a, d in zip(achieved, desired)], np.float32)
    assert not settings["sparse"] or set(expected) == {-1.0, 0.0}
    np.testing.assert_allclose(reward(achieved, desired), expected, atol=1e-6)
    compare(env, 25)


# --- where it has to run ---------------------------------------------------------------------------------------------

ALONE = """
import sys
import numpy as np
from claw_lightning.rollout.goals import goal_reward
goals = np.array([[0.0, 0, 0, 1, 0, 0, 0], [0.5, 0, 0, 0, 0, 0, 1]], np.float32)
switches = {"position": True, "rotation": True, "sparse": False}
for ignore_z, expected in ((False, -5 - np.pi), (True, -5)):
    settings = dict(switches, kind="pose", ignore_z=ignore_z, position_threshold=0.1, rotation_threshold=0.1)
    np.testing.assert_allclose(goal_reward(settings)(goals[1:], goals[:1]), [expected], rtol=1e-6)
settings = {"kind": "distance", "threshold": 0.1, "sparse": True}
np.testing.assert_array_equal(goal_reward(settings)(goals, goals[:1]), [0, -1])
heavy = {"envpool", "gymnasium", "gymnasium_robotics", "mujoco", "torch", "lightning"} & set(sys.modules)
sys.exit("loaded %s" % heavy if heavy else 0)
"""


def run_alone(python, folder):
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment.update(PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    run = subprocess.run(
        [python, "-c", ALONE], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr


def test_numpy_is_enough(tmp_path):
    run_alone(sys.executable, tmp_path)


def test_python_38(tmp_path):
    python, reason = python_38()
    if python is None:
        pytest.skip(reason)
    run_alone(python, tmp_path)
