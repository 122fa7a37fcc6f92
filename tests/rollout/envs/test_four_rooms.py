"""FourRoomsEnv against exact figures computed from its transition matrices, and those against published dynamics."""

import numpy as np
import pytest

from claw_lightning.rollout.envs import EnvError, EnvSpec, FourRoomsEnv, make_env
from claw_lightning.rollout.envs.four_rooms import (
    CELLS,
    EAST_DOORWAY,
    LOWER_RIGHT,
    MAP,
    NUM_CELLS,
    optimal_steps,
    transition_matrix,
)

UP, DOWN, LEFT, RIGHT = range(4)
SLIP = 1 / 3


def cells_of(obs):
    return obs.argmax(axis=1)


def others(goal):
    return np.delete(np.arange(NUM_CELLS), goal)


def act(env, action):
    return env.step(np.full((env.num_envs, 1), action, np.float32))


def best_actions(matrix, goal):
    return (matrix @ optimal_steps(matrix, goal)).argmin(axis=0)


def walk(env, obs, policy):
    return env.step(policy[cells_of(obs)].astype(np.float32)[:, None])


def placed(cell, action, goal=EAST_DOORWAY):
    """Cell after one step without slips."""
    env = FourRoomsEnv(slip=0.0, goal=goal)
    env.reset()
    env._cell[:] = CELLS.index(cell)
    return CELLS[cells_of(act(env, action).obs)[0]]


def test_geometry():
    assert len(MAP) == 13 and {len(row) for row in MAP} == {13}
    assert NUM_CELLS == len(CELLS) == 104
    assert (EAST_DOORWAY, CELLS[62]) == (62, (7, 9))
    doorways = [(3, 6), (6, 2), (7, 9), (10, 6)]
    assert all(cell in CELLS for cell in doorways)
    # Upper left, upper right, lower left, lower right; four doorways join them.
    rooms = [
        sum(r in rows and c in columns and (r, c) not in doorways for r, c in CELLS)
        for rows, columns in (
            (range(1, 6), range(1, 6)),
            (range(1, 7), range(7, 12)),
            (range(7, 12), range(1, 6)),
            (range(8, 12), range(7, 12)),
        )
    ]
    assert rooms == [25, 30, 25, 20]
    published = [68, 69, 70, 71, 72, 78, 79, 80, 81, 82, 88, 89, 90, 91, 92, 93, 99, 100, 101, 102, 103]
    assert published == LOWER_RIGHT


def test_moves_and_walls():
    assert placed((1, 1), UP) == placed((1, 1), LEFT) == (1, 1)
    assert placed((1, 1), DOWN) == (2, 1)
    assert placed((1, 1), RIGHT) == (1, 2)
    assert placed((6, 9), DOWN) == (7, 9)
    assert placed((7, 9), LEFT, goal=0) == (7, 9)
    assert placed((3, 7), LEFT) == (3, 6)


@pytest.mark.parametrize("dynamics", ["moc", "jeanharb"])
def test_rows_of_the_transition_matrix_are_distributions(dynamics):
    matrix = transition_matrix(dynamics, SLIP)
    assert matrix.shape == (4, NUM_CELLS, NUM_CELLS) and (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=2), 1.0)
    np.testing.assert_array_equal(transition_matrix("moc", 0.0), transition_matrix("jeanharb", 0.0))


@pytest.mark.parametrize(
    "dynamics, slip, mean, worst, lower_right, lowest, highest, random_policy",
    [
        ("moc", SLIP, 12.056, 21.14, 13.817, 12.05, 16.77, 459),
        ("jeanharb", SLIP, 8.392, 14.79, 9.542, 8.37, 11.49, 430),
        ("moc", 0.0, 7.592, 14.0, 8.731, None, None, 502),
        ("moc", 0.45, 15.183, None, None, None, None, 448),
    ],
)
def test_exact_optima(dynamics, slip, mean, worst, lower_right, lowest, highest, random_policy):
    matrix = transition_matrix(dynamics, slip)
    east = optimal_steps(matrix)[others(EAST_DOORWAY)]
    assert round(east.mean(), 3) == mean
    if worst is not None:
        assert round(east.max(), 2) == worst
    if lower_right is not None:
        means = [optimal_steps(matrix, goal)[others(goal)].mean() for goal in LOWER_RIGHT]
        assert round(np.mean(means), 3) == lower_right
        if lowest is not None:
            assert (round(min(means), 2), round(max(means), 2)) == (lowest, highest)
    rest = others(EAST_DOORWAY)
    uniform = matrix.mean(axis=0)[np.ix_(rest, rest)]
    assert round(np.linalg.solve(np.eye(len(rest)) - uniform, np.ones(len(rest))).mean()) == random_policy


def test_what_the_papers_describe_is_not_what_the_figures_are_of():
    """A slip to one of the other three directions, walls included, gives 15.01 steps and not 12.056."""
    straight = transition_matrix("moc", 0.0)
    total = straight.sum(axis=0)
    described = (1 - SLIP) * straight + SLIP * (total - straight) / 3
    assert round(optimal_steps(described)[others(EAST_DOORWAY)].mean(), 2) == 15.01
    replaced = (1 - SLIP) * straight + SLIP * total / 4  # and one of all four: 12.072
    assert round(optimal_steps(replaced)[others(EAST_DOORWAY)].mean(), 3) == 12.072


@pytest.mark.parametrize("dynamics", ["moc", "jeanharb"])
def test_steps_follow_the_transition_matrix(dynamics):
    repeats = 400
    matrix = transition_matrix(dynamics, SLIP)
    env = FourRoomsEnv(num_envs=NUM_CELLS * repeats, dynamics=dynamics, seed=1)
    start = np.repeat(np.arange(NUM_CELLS), repeats)
    for action in range(4):
        env.reset()
        env._cell[:] = start
        arrived = cells_of(act(env, action).obs)
        counts = np.bincount(start * NUM_CELLS + arrived, minlength=NUM_CELLS**2).reshape(NUM_CELLS, NUM_CELLS)
        possible = matrix[action] > 0
        assert not counts[~possible].any()
        error = counts / repeats - matrix[action]
        spread = np.sqrt(matrix[action] * (1 - matrix[action]) / repeats)
        assert (np.abs(error) <= 5 * spread + 1e-12).all()


@pytest.mark.parametrize("dynamics, mean", [("moc", 12.056), ("jeanharb", 8.392), ("none", 7.592)])
def test_the_optimal_policy_needs_as_many_steps_as_computed(dynamics, mean):
    settings = {"slip": 0.0} if dynamics == "none" else {"dynamics": dynamics}
    env = FourRoomsEnv(num_envs=1000, seed=2, **settings)
    policy = best_actions(transition_matrix(env._dynamics, env._slip), env.goal)
    lengths, running, obs = np.zeros(1000), np.ones(1000, bool), env.reset()
    while running.any():
        result = walk(env, obs, policy)
        lengths += running
        running &= ~result.terminated
        obs = result.obs
    assert abs(lengths.mean() - mean) < 4 * lengths.std() / np.sqrt(1000)


def test_starts_are_uniform_without_the_goal():
    env = FourRoomsEnv(num_envs=10_300, goal=7)
    counts = np.bincount(cells_of(env.reset()), minlength=NUM_CELLS)
    assert counts[7] == 0
    assert counts[others(7)].min() > 50 and counts.max() < 150  # 100 +- 5 standard deviations


def test_spec_shapes_dtypes_and_ownership():
    env = FourRoomsEnv(num_envs=3, max_episode_steps=2)
    assert (env.spec.obs_size, env.spec.num_actions, env.spec.action_size) == (104, 4, 1)
    assert (env.spec.autoreset, env.spec.max_episode_steps) == ("next_step", 2)
    assert EnvSpec.from_json(env.spec.to_json()) == env.spec
    results = [env.reset()]
    for _ in range(4):
        result = act(env, RIGHT)
        assert result.final_obs is None and result.has_final_obs is None and result.states is None
        results += [x for x in (*result, result.info["success"]) if isinstance(x, np.ndarray)]
    kept = [array.copy() for array in results]
    for _ in range(4):
        act(env, LEFT)
    env.reset()
    for array, copy in zip(results, kept):
        np.testing.assert_array_equal(array, copy)
        assert array.dtype in (np.float32, np.bool_) and array.shape[0] == 3
    assert (results[0].sum(axis=1) == 1).all()


def test_the_end_at_the_goal_and_the_border_row():
    env = FourRoomsEnv(num_envs=2, slip=0.0)
    env.reset()
    env._cell[:] = [CELLS.index((6, 9)), CELLS.index((1, 1))]
    result = act(env, DOWN)
    assert result.terminated.tolist() == [True, False] and not result.truncated.any() and not result.is_border.any()
    assert result.reward.tolist() == result.info["success"].tolist() == [1, 0]
    assert cells_of(result.obs).tolist() == [EAST_DOORWAY, CELLS.index((2, 1))]  # the true last observation

    result = act(env, DOWN)
    assert result.is_border.tolist() == [True, False]
    assert not (result.terminated.any() or result.truncated.any() or result.reward.any())
    start = cells_of(result.obs)[0]
    assert start != EAST_DOORWAY and cells_of(result.obs)[1] == CELLS.index((3, 1))

    env._cell[0] = CELLS.index((1, 1))
    result = act(env, DOWN)
    assert not result.is_border.any() and cells_of(result.obs)[0] == CELLS.index((2, 1))


def test_double_moves_pass_over_the_goal():
    env = FourRoomsEnv(num_envs=2000, dynamics="jeanharb", seed=5)
    env.reset()
    env._cell[:] = CELLS.index((6, 9))
    result = act(env, DOWN)
    np.testing.assert_array_equal(result.terminated, cells_of(result.obs) == EAST_DOORWAY)
    assert {CELLS[cell] for cell in cells_of(result.obs)} == {(7, 9), (6, 9), (8, 9)}


def test_the_time_limit_truncates_and_counts_from_each_start():
    env = FourRoomsEnv(num_envs=2, slip=0.0, max_episode_steps=3)
    env.reset()
    env._cell[:] = [CELLS.index((1, 1)), CELLS.index((6, 9))]
    actions = np.array([[UP], [DOWN]], np.float32)
    ends = []
    for step in range(6):
        if step == 2:
            env._cell[1] = CELLS.index((1, 1))  # where its second episode starts
        result = env.step(actions if step < 1 else np.zeros_like(actions))
        ends.append((result.terminated.tolist(), result.truncated.tolist(), result.is_border.tolist()))
    no, both = [False, False], [[True, False], [False, True]]
    first, second = both
    assert ends == [
        (second, no, no), (no, no, second), (no, first, no), (no, no, first), (no, second, no), (no, no, second),
    ]  # fmt: skip
    assert result.info["success"].tolist() == [0, 0]


def test_reaching_the_goal_at_the_limit_is_no_truncation():
    env = FourRoomsEnv(slip=0.0, max_episode_steps=1)
    env.reset()
    env._cell[:] = CELLS.index((6, 9))
    result = act(env, DOWN)
    assert result.terminated.all() and not result.truncated.any()


def test_the_goal_moves_once_for_all_lanes():
    env = FourRoomsEnv(num_envs=2, slip=0.0, move_goal_after=2, goals_after=[CELLS.index((1, 3))])
    env.reset()
    north, far = CELLS.index((6, 9)), CELLS.index((1, 1))
    for finished in (1, 2):
        assert (env.goal, env.finished) == (EAST_DOORWAY, finished - 1)
        env._cell[:] = [north, far]
        assert act(env, DOWN).terminated.tolist() == [True, False]
        env._cell[1] = far
        if finished == 1:
            assert act(env, UP).is_border.tolist() == [True, False]
    assert (env.goal, env.finished) == (CELLS.index((1, 3)), 2)
    # Lane 1 is in the middle of its episode, lane 0 at its border; the old goal is a cell like any other.
    assert not act(env, RIGHT).terminated.any()
    env._cell[0] = north
    result = env.step(np.array([[DOWN], [RIGHT]], np.float32))
    assert result.terminated.tolist() == [False, True] and cells_of(result.obs)[0] == EAST_DOORWAY
    for _ in range(4):
        env._cell[:] = CELLS.index((1, 2))
        act(env, RIGHT)
    assert env.finished > 2 and env.goal == CELLS.index((1, 3))


def test_new_goals_come_from_the_list_and_from_the_seed_alone():
    goals = [FourRoomsEnv(seed=seed)._next_goal for seed in range(150)]
    assert set(goals) == set(LOWER_RIGHT)
    assert goals == [FourRoomsEnv(seed=seed, num_envs=5, slip=0.1)._next_goal for seed in range(150)]
    assert {FourRoomsEnv(seed=seed, goal=70, goals_after=[70, 71])._next_goal for seed in range(20)} == {71}


def test_a_reset_with_a_seed_brings_the_first_goal_back():
    env = FourRoomsEnv(num_envs=4, move_goal_after=1, max_episode_steps=1)
    env.reset()
    act(env, UP)
    moved = env.goal
    assert moved in LOWER_RIGHT and env.finished == 4
    env.reset()
    assert (env.goal, env.finished) == (moved, 4)
    env.reset(0)
    assert (env.goal, env.finished) == (EAST_DOORWAY, 0)


def test_seeds():
    def roll(env, seed=None):
        actions = np.random.default_rng(0).integers(0, 4, (60, 3, 1)).astype(np.float32)
        return np.stack([env.reset(seed), *(env.step(action).obs for action in actions)])

    def make(seed):
        return make_env("FourRoomsEnv", {"max_episode_steps": 20, "move_goal_after": 4}, 3, seed)

    env = make(3)
    first = roll(env)
    np.testing.assert_array_equal(first, roll(make(3)))
    assert not np.array_equal(first, roll(env))
    np.testing.assert_array_equal(first, roll(env, seed=3))
    assert not np.array_equal(first, roll(make(4)))


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"task": "FiveRooms"}, ["init_args.task", "FourRooms"]),
        ({"dynamics": "none"}, ["init_args.dynamics", "moc", "jeanharb"]),
        ({"slip": 1.0}, ["init_args.slip", "below 1"]),
        ({"slip": float("nan")}, ["init_args.slip"]),
        ({"slip": "1/3"}, ["init_args.slip", "1/3"]),
        ({"goal": 104}, ["init_args.goal:", "103"]),
        ({"goal": 2.5}, ["init_args.goal:", "whole"]),
        ({"move_goal_after": -1}, ["init_args.move_goal_after", "at least 0"]),
        ({"goals_after": []}, ["init_args.goals_after", "other than the goal"]),
        ({"goals_after": [62]}, ["init_args.goals_after", "62"]),
        ({"goals_after": [3, 200]}, ["init_args.goals_after", "200"]),
        ({"goals_after": 3}, ["init_args.goals_after", "list"]),
        ({"max_episode_steps": 0}, ["init_args.max_episode_steps", "at least 1"]),
        ({"nonsense": 1}, ["init_args", "nonsense"]),
    ],
)
def test_bad_input_is_one_line(kwargs, words):
    with pytest.raises(EnvError) as caught:
        make_env("FourRoomsEnv", kwargs, 2, 0)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_wrong_use():
    with pytest.raises(EnvError, match="envs_per_worker"):
        FourRoomsEnv(num_envs=0)
    env = FourRoomsEnv(num_envs=2)
    with pytest.raises(RuntimeError, match="reset"):
        act(env, UP)
    env.reset()
    with pytest.raises(ValueError, match="shape"):
        env.step(np.zeros((1, 1), np.float32))
    for wrong in (4.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="discrete actions"):
            act(env, wrong)
    act(env, 0.9999)  # rounded


def test_slip_and_goal_change_while_it_runs():
    env = FourRoomsEnv(num_envs=64, slip=0.9, goal=0)
    env.reset()
    env.configure(slip=0.0, goal=103.0)  # a curriculum sends floats
    policy = best_actions(transition_matrix(slip=0.0), 103)
    obs = env._obs()
    expected = optimal_steps(transition_matrix(slip=0.0), 103)[cells_of(obs)]
    arrived = np.zeros(64)
    for step in range(1, int(expected.max()) + 1):
        result = walk(env, obs, policy)
        arrived[(arrived == 0) & result.terminated] = step
        obs = result.obs
    inside = expected > 0  # who stood in the new goal has to end a step there
    assert (arrived[inside] == expected[inside]).all()
    env.reset(5)
    assert env.goal == 103, "it outlasts resets"


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"slip": 1.0}, "FourRooms.slip.*below 1"),
        ({"goal": 2.5}, "FourRooms.goal.*whole"),
        ({"goal": 104}, "FourRooms.goal.*103"),
        ({"dynamics": "moc"}, "'dynamics'"),
        ({"goal": 5}, "move_goal_after"),
    ],
)
def test_a_change_that_is_refused_changes_nothing(settings, words):
    env = FourRoomsEnv(move_goal_after=10)
    with pytest.raises(EnvError, match=words) as caught:
        env.configure(**{"slip": 0.5, **settings})
    assert "\n" not in str(caught.value)
    assert (env._slip, env.goal) == (SLIP, EAST_DOORWAY)


# -- pixels -----------------------------------------------------------------------------------------------------------


def test_the_image_shows_what_the_observation_tells():
    seen, told = (FourRoomsEnv(num_envs=8, seed=3, pixels=pixels, max_episode_steps=20) for pixels in (True, False))
    assert (seen.spec.image_shape, seen.spec.obs_size) == ((3, 13, 13), 0)
    assert (told.spec.image_shape, told.image()) == (None, None)
    obs, nothing, image = told.reset(), seen.reset(), seen.image()
    rng, walls = np.random.default_rng(0), np.array([[sign == "#" for sign in line] for line in MAP])
    for _ in range(60):
        assert nothing.shape == (8, 0) and nothing.dtype == np.float32
        assert image.dtype == np.uint8 and set(np.unique(image)) == {0, 255}
        np.testing.assert_array_equal(image[:, 0] == 255, np.broadcast_to(walls, (8, 13, 13)))
        for channel, cells in ((1, cells_of(obs)), (2, [EAST_DOORWAY] * 8)):
            places = [np.argwhere(each).tolist() for each in image[:, channel]]
            assert places == [[list(CELLS[cell])] for cell in cells]
        action = rng.integers(0, 4, (8, 1)).astype(np.float32)
        a, b = told.step(action), seen.step(action)
        np.testing.assert_array_equal(a.is_border, b.is_border)
        obs, nothing, image = a.obs, b.obs, b.image
        assert a.image is None


def test_the_image_shows_where_the_goal_has_moved():
    env = FourRoomsEnv(num_envs=2, slip=0.0, pixels=True)
    env.reset()
    env.configure(goal=103)
    assert env.step(np.zeros((2, 1), np.float32)).image[0, 2][CELLS[103]] == 255


def test_pixels_are_a_switch():
    with pytest.raises(EnvError, match="init_args.pixels: must be true or false, not 3"):
        FourRoomsEnv(pixels=3)
