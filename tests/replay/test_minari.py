"""Minari data sets become rows as a simulator's worker would have written them."""

import builtins
import importlib
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from claw_lightning.errors import ConfigError
from claw_lightning.replay import ReplayMemory
from claw_lightning.replay.minari import minari_rings
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.ring import BORDER, FIRST, QUARANTINED, SWITCHED, TERMINATED, TRUNCATED, RowLayout

LOW, HIGH = [-2.0, 0.0], [2.0, 1.0]
GOALS = {"observation": 2, "achieved_goal": 1, "desired_goal": 1}


def box(size):
    return Box(-np.inf, np.inf, (size,), np.float64)


def spec_of(**changes):
    values = {"task": "Hand-v0", "obs_size": 3, "action_size": 2, "action_low": LOW, "action_high": HIGH}
    return EnvSpec(**{**values, **changes})


def layout_of(spec, **changes):
    return RowLayout(spec.obs_size, spec.action_size, spec.states_size, **changes)


def episode(number, steps, end, size=3):
    """Observations are [episode, step, 0...], actions lie within their bounds, the reward is the step."""
    obs = np.zeros((steps + 1, size))
    obs[:, 0], obs[:, 1] = number, np.arange(steps + 1)
    action = np.column_stack([np.linspace(-2, 2, steps), np.linspace(0, 1, steps)]).astype(np.float32)
    ends = [np.zeros(steps, bool), np.zeros(steps, bool)]
    if end in ("terminated", "truncated"):
        ends[end == "truncated"][-1] = True
    reward = np.arange(steps, dtype=float)
    return SimpleNamespace(
        id=number, observations=obs, actions=action, rewards=reward, terminations=ends[0], truncations=ends[1]
    )


class StandIn:
    """A data set as far as it is used."""

    def __init__(self, episodes, observation_space=None, action_space=None):
        self.observation_space = observation_space or box(3)
        self.action_space = action_space or Box(np.array(LOW), np.array(HIGH), dtype=np.float64)
        self.spec = SimpleNamespace(dataset_id="hand/test-v0")
        self._episodes = episodes
        self.total_episodes, self.total_steps = len(episodes), sum(len(one.rewards) for one in episodes)

    def iterate_episodes(self):
        return iter(self._episodes)


def episodes_of():
    return [episode(0, 4, "terminated"), episode(1, 1, "truncated"), episode(2, 3, "open")]


def ring_of(dataset, spec=None, **options):
    spec = spec or spec_of()
    [ring] = minari_rings(dataset, spec, layout_of(spec, **options))
    return ring


def field(ring, name):
    return ring.layout.view(ring.rows[: ring.head, 0], name)


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_finals", [False, True])
def test_episodes_become_rows_and_a_border(has_finals):
    ring = ring_of(StandIn(episodes_of()), has_finals=has_finals)
    begin = FIRST | SWITCHED
    assert field(ring, "flags").tolist() == [
        begin, 0, 0, TERMINATED, BORDER,
        begin | TRUNCATED, BORDER,
        begin, 0, TRUNCATED, BORDER,  # it ends without a word, and its last observation is known
    ]  # fmt: skip
    steps = [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]
    assert field(ring, "obs").tolist() == [[e, t, 0] for e, t in zip([0] * 5 + [1] * 2 + [2] * 4, steps)]
    assert field(ring, "reward").tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 1, 2, 0]
    assert field(ring, "option_age").tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 1, 2, 0]
    assert field(ring, "previous_option").tolist() == [-1, 0, 0, 0, 0, -1, 0, -1, 0, 0, 0]
    for name in ("option", "version", "log_prob_action", "log_prob_option"):
        assert not field(ring, name).any()
    if has_finals:
        assert (field(ring, "final_index") == -1).all()
    np.testing.assert_allclose(field(ring, "action")[:4, 0], [-1, -1 / 3, 1 / 3, 1], atol=1e-6)
    np.testing.assert_allclose(field(ring, "action")[:4, 1], [-1, -1 / 3, 1 / 3, 1], atol=1e-6)


@pytest.mark.parametrize("has_finals", [False, True])
def test_every_step_can_be_drawn_with_its_true_successor(has_finals):
    ring = ring_of(StandIn(episodes_of()), has_finals=has_finals)
    batch = ReplayMemory([ring], 0).sample(1, 500)
    drawn = {tuple(obs[:2].tolist()) for obs in batch.obs[0]}
    assert drawn == {(e, t) for e, length in enumerate((4, 1, 3)) for t in range(length)}
    assert (batch.next_obs[0, :, 1] == batch.obs[0, :, 1] + 1).all()
    assert (batch.next_obs[0, :, 0] == batch.obs[0, :, 0]).all()


def test_parts_of_a_dictionary_lie_as_the_adapter_puts_them():
    parts = {name: np.zeros((3, size)) for name, size in GOALS.items()}
    parts["observation"][:] = [1, 2]
    parts["achieved_goal"][:], parts["desired_goal"][:] = 3, 4
    parts["privileged_state"] = np.full((3, 2), 5.0)
    one = episode(0, 2, "terminated")
    one.observations = parts
    space = Dict({name: box(size) for name, size in {**GOALS, "privileged_state": 2}.items()})
    spec = spec_of(obs_size=4, states_size=2, achieved_goal=(2, 3), desired_goal=(3, 4))
    ring = ring_of(StandIn([one], space), spec)
    assert field(ring, "obs").tolist() == [[1, 2, 3, 4]] * 3
    assert field(ring, "states").tolist() == [[5, 5]] * 3
    ring = ring_of(StandIn([one], space), spec_of(obs_size=4))  # a task that does not look at them
    assert ring.layout.states_size == 0


def test_discrete_actions_are_numbers_from_zero():
    one = episode(0, 3, "terminated")
    one.actions = np.array([5, 7, 6])
    spec = spec_of(action_size=1, action_low=[0.0], action_high=[2.0], num_actions=3)
    ring = ring_of(StandIn([one], action_space=Discrete(3, start=5)), spec)
    assert field(ring, "action")[:, 0].tolist() == [0, 2, 1, 0]
    one.actions = np.array([5, 8, 6])
    refused(r"an action is not in \[0, 3\)", StandIn([one], action_space=Discrete(3, start=5)), spec)


def test_actions_beyond_the_bounds_are_clipped_and_counted(caplog):
    one = episode(0, 4, "terminated")
    one.actions[1], one.actions[2] = [2.5, 0.5], [2.000001, 0.5]
    with caplog.at_level(logging.WARNING):
        ring = ring_of(StandIn([one]))
    assert field(ring, "action")[1:3].tolist() == [[1, 0], [1, 0]]
    assert "data set hand/test-v0: 1 of 4 actions lie outside the task's bounds" in caplog.text


def test_what_is_not_finite_is_quarantined(caplog):
    first, second, third = episode(0, 5, "terminated"), episode(1, 3, "truncated"), episode(2, 2, "terminated")
    first.observations[2, 0], first.rewards[4] = np.nan, 1e300
    second.actions[1, 0] = np.inf
    second.observations[3, 2] = np.inf
    with caplog.at_level(logging.WARNING):
        ring = ring_of(StandIn([first, second, third]))
    sick = np.flatnonzero(field(ring, "flags") & QUARANTINED)
    assert sick.tolist() == [2, 4, 7, 9]
    assert "4 rows hold numbers that are not finite" in caplog.text
    batch = ReplayMemory([ring], 0).sample(1, 500)
    drawn = {tuple(obs[:2].tolist()) for obs in batch.obs[0]}
    assert drawn == {(0, 0), (2, 0), (2, 1)}
    assert np.isfinite(batch.rows.numpy()[..., : ring.layout.fields["log_prob_option"][1]]).all()
    assert np.isfinite(batch.next_obs.numpy()).all()


def test_a_joint_that_cannot_move():
    spec = spec_of(action_low=[-2.0, 1.0], action_high=[2.0, 1.0])
    assert not field(ring_of(StandIn(episodes_of()), spec), "action")[:, 1].any()


def test_no_more_rows_than_asked_for():
    [ring] = minari_rings(StandIn(episodes_of()), spec_of(), layout_of(spec_of()), max_rows=9)
    assert ring.head == 7
    refused("its first episode is longer than the 4 rows", StandIn(episodes_of()), max_rows=4)
    refused("has no episodes; take", StandIn([]))


# -- what is refused -----------------------------------------------------------------------------------------------


def refused(match, dataset, spec=None, **options):
    spec = spec or spec_of()
    with pytest.raises(ConfigError, match=match) as caught:
        minari_rings(dataset, spec, layout_of(spec), **options)
    assert "\n" not in str(caught.value)


def test_data_sets_of_other_sizes():
    dataset = StandIn(episodes_of())
    name = "data set hand/test-v0 has "
    refused(name + "3 observations, task Hand-v0 has 5", dataset, spec_of(obs_size=5))
    refused(name + "2 actions, task Hand-v0 has 1", dataset, spec_of(action_size=1, action_low=[0], action_high=[1]))
    discrete = spec_of(action_size=1, action_low=[0], action_high=[2], num_actions=3)
    refused(name + "4 discrete actions, task Hand-v0 has 3", StandIn([], action_space=Discrete(4)), discrete)
    refused(name + "0 privileged states, task Hand-v0 has 2", dataset, spec_of(states_size=2))
    refused(name + "its achieved_goal nowhere, task Hand-v0 in 1:2", dataset, spec_of(achieved_goal=(1, 2)))
    space = Dict({name: box(size) for name, size in GOALS.items()})
    spec = spec_of(obs_size=4, achieved_goal=(2, 3), desired_goal=(1, 2))
    refused(name + "its desired_goal in 3:4, task Hand-v0 in 1:2", StandIn([], space), spec)
    images = StandIn([], Box(0, 255, (8, 8, 3), np.uint8))
    refused("hand/test-v0 cannot be learned from: observation of .* not a vector", images)


def test_data_sets_that_contradict_themselves():
    one = episode(3, 4, "terminated")
    one.observations = one.observations[:-1]
    refused("episode 3 of 4 steps does not hold 5 observations and 4 actions", StandIn([one]))
    dataset = StandIn(episodes_of())
    dataset.total_steps = 4
    refused("has more steps than its metadata says", dataset)


def test_without_minari(monkeypatch):
    def missing(name, *args):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    refused(r"data set D4RL/x-v0: Minari is not installed; pip install 'claw-lightning\[minari\]'", "D4RL/x-v0")


# -- Minari itself -------------------------------------------------------------------------------------------------


@pytest.fixture
def minari(tmp_path, monkeypatch):
    """Minari with a folder of data sets of its own."""
    module = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return module


def created(minari, episodes, observation_space, action_space, name="hand/test-v0"):
    """Data set in the local folder, written by Minari."""
    from minari.data_collector import EpisodeBuffer

    buffers = [
        EpisodeBuffer(
            id=one.id,
            observations=one.observations,
            actions=one.actions,
            rewards=list(one.rewards),
            terminations=list(one.terminations),
            truncations=list(one.truncations),
            infos={},
        )
        for one in episodes
    ]
    return minari.create_dataset_from_buffers(
        name, buffers, observation_space=observation_space, action_space=action_space, algorithm_name="none",
        author="nobody", author_email="nobody@example.com", code_permalink="none", description="a test",
        data_format="hdf5",
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", ["id", "path", "data", "object"])
def test_a_real_data_set(minari, tmp_path, by):
    action_space = Box(np.array(LOW), np.array(HIGH), dtype=np.float64)
    dataset = created(minari, episodes_of(), box(3), action_space)
    folder = tmp_path / "datasets" / "hand" / "test-v0"
    source = {"id": "hand/test-v0", "path": folder, "data": str(folder / "data"), "object": dataset}[by]
    [ring], [expected] = (
        minari_rings(one, spec_of(), layout_of(spec_of())) for one in (source, StandIn(episodes_of()))
    )
    assert ring.head == expected.head == 11
    assert ring.rows[:11].tobytes() == expected.rows[:11].tobytes()


@pytest.mark.filterwarnings("ignore")
def test_a_real_data_set_of_a_dictionary(minari):
    one = episode(0, 2, "truncated")
    one.observations = {name: np.full((3, size), number) for number, (name, size) in enumerate(GOALS.items())}
    space = Dict({name: Box(-9, 9, (size,), np.float64) for name, size in GOALS.items()})
    created(minari, [one], space, Box(np.array(LOW), np.array(HIGH), dtype=np.float64))
    ring = ring_of("hand/test-v0", spec_of(obs_size=4, achieved_goal=(2, 3), desired_goal=(3, 4)))
    assert field(ring, "obs").tolist() == [[0, 0, 1, 2]] * 3


@pytest.mark.filterwarnings("ignore")
def test_real_data_sets_that_are_not_there_or_broken(minari, tmp_path):
    refused("hand/none-v0 is not on this machine; minari download hand/none-v0", "hand/none-v0")
    refused("not an id is not on this machine", "not an id")
    created(minari, episodes_of(), box(3), Box(np.array(LOW), np.array(HIGH), dtype=np.float64))
    data = tmp_path / "datasets" / "hand" / "test-v0" / "data"
    (data / "main_data.hdf5").write_bytes(b"half a file")
    refused("cannot be read", "hand/test-v0")
    (data / "metadata.json").write_text("{")
    refused("cannot be opened", "hand/test-v0")


@pytest.mark.filterwarnings("ignore")
def test_the_library_of_its_file_format_is_missing(minari, monkeypatch):
    created(minari, episodes_of(), box(3), Box(np.array(LOW), np.array(HIGH), dtype=np.float64))
    real = builtins.__import__

    def without(name, *args, **options):
        if name == "h5py":
            raise ImportError("h5py is not installed")
        return real(name, *args, **options)

    monkeypatch.delitem(importlib.sys.modules, "minari.dataset._storages.hdf5_storage")
    monkeypatch.setattr(builtins, "__import__", without)
    refused(r"h5py is not installed.*; pip install 'claw-lightning\[minari\]'", "hand/test-v0")
