"""Each family of tasks that the product names, built and stepped: sizes, goals, states and success are recognised."""

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvPoolEnv, GymnasiumEnv

#: Task: observations (goals included), actions, states, size of the goal (0: none), whether it tells success.
HAND, ADROIT, MYO = (20, 0, 7, True), (0, 0, True), (39, 0, 0, True)
ENVPOOL = {
    "HandReach-v3": (93, 20, 0, 15, True),
    **{f"HandManipulate{name}-v1": (75, *HAND) for name in ("Block", "BlockRotateXYZ", "EggFull", "PenRotate")},
    "HandManipulateBlock_BooleanTouchSensors-v1": (167, *HAND),
    "HandManipulateEgg_ContinuousTouchSensors-v1": (167, *HAND),
    "AdroitHandPen-v1": (45, 24, *ADROIT),
    "AdroitHandDoor-v1": (39, 28, *ADROIT),
    "AdroitHandHammer-v1": (46, 26, *ADROIT),
    "AdroitHandRelocate-v1": (39, 30, *ADROIT),
    "AdroitHandPenSparse-v1": (45, 24, *ADROIT),
    "LeapCubeReorient-v1": (57, 16, 128, 0, True),
    "LeapCubeRotateZAxis-v1": (32, 16, 105, 0, True),
    "AeroCubeRotateZAxis-v1": (14, 7, 81, 0, True),
    "myoHandPoseFixed-v0": (108, *MYO),
    "myoHandReachRandom-v0": (115, *MYO),
    "myoHandPenTwirlFixed-v0": (83, *MYO),
    "myoHandReorient8-v0": (200, *MYO),
    "myoChallengeBaodingP1-v1": (86, *MYO),
    "FetchReach-v4": (16, 4, 0, 3, True),
    "FetchPush-v4": (31, 4, 0, 3, True),
    "FetchSlide-v4": (31, 4, 0, 3, True),
    "FetchPickAndPlace-v4": (31, 4, 0, 3, True),
    "PointMaze_UMaze-v3": (8, 2, 0, 2, True),
    "PointMaze_Large-v3": (8, 2, 0, 2, True),
}
GYMNASIUM = {
    "HandReachDense-v3": (93, 20, 0, 15, True),
    "HandManipulatePenRotate-v1": (75, *HAND),
    "AdroitHandDoor-v1": (39, 28, *ADROIT),
    "FetchPush-v4": (31, 4, 0, 3, True),
    "PointMaze_UMaze-v3": (8, 2, 0, 2, True),
    "AntMaze_UMaze-v5": (109, 8, 0, 2, True),
}


def check(env, expected):
    spec, (obs_size, action_size, states_size, goal_size, tells_success) = env.spec, expected
    assert (spec.obs_size, spec.action_size, spec.states_size) == (obs_size, action_size, states_size)
    assert spec.num_actions == 0 and spec.max_episode_steps > 0
    obs = env.reset()
    assert obs.shape == (2, obs_size) and np.isfinite(obs).all()
    if goal_size:
        # The layout that goals in hindsight rely on: observation, achieved goal, desired goal.
        split = obs_size - goal_size
        assert (spec.achieved_goal, spec.desired_goal) == ((split - goal_size, split), (split, obs_size))
    else:
        assert spec.achieved_goal is None and spec.desired_goal is None
    rng = np.random.default_rng(0)
    for _ in range(3):
        result = env.step(rng.uniform(-1, 1, (2, action_size)).astype(np.float32))
        assert np.isfinite(result.obs).all() and np.isfinite(result.reward).all() and not result.is_border.any()
        assert ("success" in result.info) == tells_success
        assert result.states is None if not states_size else result.states.shape == (2, states_size)
    if spec.goal_reward is not None:
        goals = (result.obs[:, slice(*spec.achieved_goal)], result.obs[:, slice(*spec.desired_goal)])
        np.testing.assert_allclose(env.compute_reward(*goals), result.reward, atol=1e-4)
    env.close()


@pytest.mark.parametrize("task", ENVPOOL)
def test_envpool(task):
    pytest.importorskip("envpool")
    check(EnvPoolEnv(task, 2), ENVPOOL[task])


@pytest.mark.parametrize("task", GYMNASIUM)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_gymnasium_robotics(task):
    pytest.importorskip("gymnasium_robotics")
    check(GymnasiumEnv(task, 2), GYMNASIUM[task])


def test_goals_of_fetch_and_the_shadow_hand_have_a_reward_that_hindsight_can_compute():
    for task in ("HandReach-v3", "HandManipulateEggFull-v1", "FetchSlide-v4"):
        env = EnvPoolEnv(task, 1)
        assert env.spec.goal_reward is not None
        env.close()
