"""Every adapter on a simulator whose numbers say lane, episode and step: what the replay gives out is whole.

Where a simulator is not installed, or has no numbers of its own choice, a stand-in takes its place
(``tests/fakes/fake_simulators.py``). To add an adapter, add a line to ``CASES``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest

from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout.envs import make_env
from claw_lightning.rollout.envs.base import NEXT_STEP, SAME_STEP, EnvSpec, StepResult
from claw_lightning.rollout.envs.diagnostic import (
    ACTION,
    BY_TERMINATION,
    END,
    EPISODE,
    LANE,
    LENGTH,
    STEP,
    _decode,
    check_rows,
)
from tests.builders import collector_of
from tests.fakes import fake_simulators as fakes
from tests.rollout.envs.isaac import stand_in

FAULTS = ("torn", "cross_episode", "wrong_step", "wrong_reward", "wrong_action", "wrong_end")
LANES = 4


class Case(NamedTuple):
    """One adapter in one mode.

    Attributes:
        adapter, init_args: as in a configuration.
        install: puts the stand-in in place, given monkeypatch.
        within: the same for one that needs more than monkeypatch to be gone afterwards.
        autoreset: what its spec says.
        finals: whether true final observations are to be had.
        border_is_applied: whether the action of a border row already acts in the new episode (Isaac Gym), whose first
            observation is then never seen.
        seed: for simulators that take lanes from it.
        marks_lanes: whether lanes are told apart by the word of the lane (else by that of the seed).
    """

    adapter: str
    init_args: Any
    install: Callable[[Any], Any] = lambda monkeypatch: None
    within: Callable[[Any], AbstractContextManager[Any]] = lambda monkeypatch: nullcontext()
    autoreset: str = NEXT_STEP
    finals: bool = True
    border_is_applied: bool = False
    seed: int = 3
    marks_lanes: bool = True


def gymnasium_case(mode, task=fakes.TASK):
    args = {"task": task, "autoreset": mode}
    return Case("GymnasiumEnv", args, lambda _: fakes.register_gymnasium(), autoreset=mode, seed=fakes.GYM_SEED)


def mjlab_case(finals, **settings):
    args = {"task": fakes.TASK, "device": "cpu"}
    return Case("MjlabEnv", args, lambda m: fakes.install_mjlab(m, **settings), autoreset=SAME_STEP, finals=finals)


def isaaclab_case(version):
    args = {"task": fakes.ISAAC_TASK, "device": "cpu"}
    finals = version >= "3"
    return Case("IsaacLabEnv", args, lambda m: fakes.install_isaaclab(m, version), autoreset=SAME_STEP, finals=finals)


CODED = {"min_length": 2, "max_length": 7, "mark_process": False}
CASES = {
    "diagnostic next step": Case("CodedEnv", CODED),
    "diagnostic same step": Case("CodedEnv", dict(CODED, autoreset=SAME_STEP), autoreset=SAME_STEP),
    "faulty around diagnostic": Case("FaultyEnv", {"adapter": "CodedEnv", "adapter_args": CODED}),
    "EnvPool": Case("EnvPoolEnv", {"task": fakes.TASK}, fakes.install_envpool),
    "Gymnasium next step": gymnasium_case("next_step"),
    "Gymnasium same step": gymnasium_case("same_step"),
    "Gymnasium same step with states": gymnasium_case("same_step", fakes.STATES_TASK),
    "Playground": Case("PlaygroundEnv", {"task": fakes.TASK}, fakes.install_playground, marks_lanes=False),
    "mjlab reset by hand": mjlab_case(True),
    "mjlab without the switch": mjlab_case(False, with_switch=False),
    "mjlab with histories": mjlab_case(False, history=3),
    "Isaac Gym": Case("IsaacGymEnv", {"task": "Coded", "reward_scale": 1.0}, within=stand_in, border_is_applied=True),
    "Isaac Lab 2.3": isaaclab_case("2.3.2"),
    "Isaac Lab 3.0": isaaclab_case("3.0.0"),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "_"))
def case(request):
    return CASES[request.param]


@pytest.fixture
def env(case, monkeypatch):
    case.install(monkeypatch)
    with case.within(monkeypatch):
        env = make_env(case.adapter, case.init_args, LANES, case.seed)
        yield env
        env.close()


def copied(result):
    """A step of its own; what HostSide hands out is written again two steps later."""
    return StepResult(*[part.copy() if isinstance(part, np.ndarray) else part for part in result])


def roll(env, num_steps=80):
    """First observation, actions [T, N, A] and results of T steps."""
    actions = np.random.default_rng(0).uniform(-1, 1, (num_steps, env.num_envs, env.spec.action_size))
    actions = actions.astype(np.float32)
    return env.reset().copy(), actions, [copied(env.step(action.copy())) for action in actions]


def header(obs):
    """Words of observations [N, O], which must be whole."""
    words, torn = _decode(obs)
    assert not torn.any()
    return words


def test_spec(case, env):
    spec = env.spec
    assert spec.autoreset == case.autoreset and spec.action_size == fakes.ACTION_SIZE
    assert EnvSpec.from_json(spec.to_json()) == spec
    assert (env.states() is None) == (spec.states_size == 0) or spec.states_size  # before the first reset


def arrays_of(env, result):
    """All arrays of a step, each with the shape and dtype that it must have."""
    lanes, obs, states = (LANES,), (LANES, env.spec.obs_size), (LANES, env.spec.states_size)
    found = [(result.obs, obs, np.float32), (result.reward, lanes, np.float32)]
    found += [(getattr(result, name), lanes, np.bool_) for name in ("terminated", "truncated", "is_border")]
    found += [(value, lanes, np.float32) for value in result.info.values()]
    if result.has_final_obs is not None:
        found.append((result.has_final_obs, lanes, np.bool_))
    if result.final_obs is not None:
        found.append((result.final_obs, obs, np.float32))
    if env.spec.states_size:
        found.append((result.states, states, np.float32))
        if result.final_obs is not None:
            found.append((result.final_states, states, np.float32))
    return found


def test_shapes_dtypes_and_ownership(env):
    """Arrays stay what they were; those that were tensors for as long as a row is made of them, until the next step."""
    first = env.reset()
    kept = [[(first, first.copy())]]
    for _ in range(24):
        result = env.step(np.full((LANES, env.spec.action_size), 0.5, np.float32))
        for array, shape, dtype in arrays_of(env, result):
            assert array.shape == shape and array.dtype == dtype and array.flags.writeable
        kept = (kept[-1:] if env.device is not None else kept) + [
            [(array, array.copy()) for array, _, _ in arrays_of(env, result)]
        ]
        for array, copy in [pair for step in kept for pair in step]:
            np.testing.assert_array_equal(array, copy)


def test_every_step_says_where_it_belongs(case, env):
    """Flags, borders, final observations, actions and states of each step, against what its words say."""
    first, actions, results = roll(env)
    now, over, ends = header(first), np.zeros(LANES, bool), 0
    assert (now[:, STEP] == case.border_is_applied).all()
    for action, result in zip(actions, results):
        after = header(result.obs)
        assert (result.is_border == (over & (case.autoreset == NEXT_STEP))).all()
        live = ~result.is_border
        ended = result.terminated | result.truncated
        assert not (result.terminated & result.truncated).any() and not (ended & ~live).any()
        last = live & (now[:, STEP] + 1 == now[:, LENGTH])
        assert (ended == last).all()
        assert (result.terminated == (last & (now[:, END] == BY_TERMINATION))).all()
        # Observation behind the step: the same episode goes on, or a new one has begun.
        begun = result.is_border if case.autoreset == NEXT_STEP else ended
        assert (after[:, EPISODE] == now[:, EPISODE] + begun).all()
        applied = begun & case.border_is_applied
        assert (after[begun, STEP] == applied[begun]).all() and (after[~begun, STEP] == now[~begun, STEP] + 1).all()
        led = np.where(begun & ~applied, 0.0, action[:, 0])
        np.testing.assert_array_equal(result.obs[:, ACTION], led)
        if case.autoreset == SAME_STEP:
            assert (result.has_final_obs == (ended & case.finals)).all()
            if result.has_final_obs.any():
                final = result.final_obs[result.has_final_obs]
                assert (header(final)[:, STEP] == now[ended, LENGTH]).all()
                assert (header(final)[:, EPISODE] == now[ended, EPISODE]).all()
                np.testing.assert_array_equal(final[:, ACTION], action[ended, 0])
                if env.spec.states_size:
                    np.testing.assert_array_equal(result.final_states[result.has_final_obs], -final)
        else:
            assert result.final_obs is None and result.has_final_obs is None and result.final_states is None
            assert (after[ended, STEP] == after[ended, LENGTH]).all()
        if env.spec.states_size:
            np.testing.assert_array_equal(result.states, -result.obs)
        lanes = after[:, LANE] if case.marks_lanes else after[:, 1] - case.seed
        np.testing.assert_array_equal(lanes, np.arange(LANES))
        now, over, ends = after, ended, ends + int(ended.sum())
    assert ends > 20


@pytest.mark.parametrize("length", [1, 3])
def test_what_the_replay_gives_out_is_whole(case, env, length):
    """Through collector, ring and memory; the ring is shorter than the run, so that rows are overwritten too."""
    collector, ring, episodes = collector_of(env)
    for _ in range(120):
        collector.step()
    batch = ReplayMemory([ring], 0).sample(1, 2000, length)
    arrays = [batch.obs, batch.next_obs, batch.reward, batch.terminated, batch.truncated, batch.action, batch.valid]
    arrays = [None if array is None else array.numpy() for array in arrays]
    counts = check_rows(*arrays)
    assert counts["rows"] >= 2000 and {name: counts[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    terminated, truncated = arrays[3], arrays[4]
    valid = np.ones(terminated.shape, bool) if arrays[-1] is None else arrays[-1]
    assert terminated[valid].any()
    # Without its last observation a time limit has nothing to bootstrap from: no such row is drawn. A termination is.
    assert truncated[valid].any() == case.finals
    assert (counts["without_final"] > 0) == (not case.finals)
    assert episodes and collector.control.quarantined == 0


def test_a_reset_in_mid_episode_opens_new_ones(case, env):
    first, _, results = roll(env, 5)
    again = header(env.reset())
    before = header(results[-1].obs)
    assert (again[:, STEP] == case.border_is_applied).all() and (again[:, EPISODE] > before[:, EPISODE]).all()
    result = env.step(np.zeros((LANES, env.spec.action_size), np.float32))
    assert not result.is_border.any()
    begun = (result.terminated | result.truncated) & (case.autoreset == SAME_STEP)
    np.testing.assert_array_equal(header(result.obs)[:, STEP], again[:, STEP] + 1 - begun)


def test_success_is_never_of_another_episode(case, env):
    """Stand-ins say success at a termination; that of Isaac Lab at every step that ends nothing."""
    _, _, results = roll(env)
    for result in results:
        success = result.info.get("success")
        if success is None:
            continue
        expected = ~(result.terminated | result.truncated) if case.adapter == "IsaacLabEnv" else result.terminated
        np.testing.assert_array_equal(success, expected.astype(np.float32))
