"""Asymmetric critics: they see a task's privileged states, policies and workers do not."""

import json
import math
from dataclasses import replace
from typing import ClassVar

import gymnasium
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from callbacks import RunCheckpoint
from claw_lightning.data import EnvConfig
from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from claw_lightning.hooks import UpdateCallback
from claw_lightning.minibatch import Minibatch
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.normalizer import batch_moments
from claw_lightning.rollout.ring import FIRST, RowLayout
from claw_lightning.settings import Distillation, PolicyGradient
from tests import rank_runs
from tests.rank_runs import run_ranks
from tests.runs import QUIET, FakeData, fit_fake, fit_lockstep, make_data, make_module, tensors

OBS, STATES, ACTIONS = 3, 5, 2
SPEC = EnvSpec("fake", OBS, ACTIONS, [-1.0] * ACTIONS, [1.0] * ACTIONS, states_size=STATES)
DISCRETE = EnvSpec("fake", OBS, 1, [0.0], [3.0], states_size=STATES, num_actions=4)
STOCHASTIC = {"actor": "gaussian", "exploration": Exploration(kind="none")}


class HiddenGoal(gymnasium.Env):
    """One step; the reward depends on a goal that states alone show. Blind, the best action is its mean, 0.4."""

    spaces = {"observation": Box(-1.0, 1.0, (1,), np.float32), "privileged_state": Box(-1.0, 1.0, (1,), np.float32)}
    observation_space = gymnasium.spaces.Dict(spaces)
    action_space = Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._goal = self.np_random.uniform(-0.2, 1.0, 1).astype(np.float32)
        return self._seen(), {}

    def _seen(self):
        return {"observation": np.zeros(1, np.float32), "privileged_state": self._goal}

    def step(self, action):
        return self._seen(), -float((action[0] - self._goal[0]) ** 2), True, False, {}


if "ClawHiddenGoal-v0" not in gymnasium.registry:
    gymnasium.register("ClawHiddenGoal-v0", entry_point=HiddenGoal)


def states_batch(updates=2, size=8, length=1, spec=SPEC, seed=0, wide=True, num_options=4):
    """Random batch of a task with states; ``wide``: as critics that see them want it."""
    rng = np.random.default_rng(seed)
    layout = RowLayout(spec.obs_size, spec.action_size, spec.states_size)
    shape = (updates, size) if length == 1 else (updates, size, length)
    rows = np.zeros((*shape, layout.words), np.float32)
    for name, scale in (("obs", 1.0), ("states", 9.0), ("reward", 1.0)):
        layout.view(rows, name)[:] = scale * rng.normal(size=layout.view(rows, name).shape)
    action = layout.view(rows, "action")
    action[:] = rng.integers(0, 4, action.shape) if spec.num_actions else rng.uniform(-1, 1, action.shape)
    layout.view(rows, "option")[:] = rng.integers(0, num_options, shape)
    layout.view(rows, "flags")[:, 0] = FIRST
    following = torch.from_numpy(rng.normal(size=(*shape, layout.final_size)).astype(np.float32))
    seen = layout.final_size if wide else layout.obs_size
    moments = batch_moments(rows[..., :seen].reshape(-1, seen))
    valid = None if length == 1 else torch.ones(shape, dtype=torch.bool)
    return ReplayBatch(torch.from_numpy(rows), following[..., :OBS], layout, moments, 100, valid,
                       next_states=following[..., OBS:] if wide else None)  # fmt: skip


def fit(module, batch, spec=SPEC):
    data = FakeData([batch])
    data.spec = spec
    return fit_fake(module, [], data=data)[0]


def built(spec=SPEC, **settings):
    module = make_module(**settings)
    module.build(spec)
    return module


# -- which networks see what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted, spec, sees", [
    ("auto", SPEC, True), ("states", SPEC, True), ("obs", SPEC, False),
    ("auto", EnvSpec("fake", OBS, ACTIONS, [-1.0] * ACTIONS, [1.0] * ACTIONS), False),
    ("obs", EnvSpec("fake", OBS, ACTIONS, [-1.0] * ACTIONS, [1.0] * ACTIONS), False),
])  # fmt: skip
def test_critics_take_states_where_there_are_some(wanted, spec, sees):
    module = built(spec, critic_input=wanted)
    assert module.sees_states == sees
    assert module.critic.obs_layer.weight.shape[1] == OBS + STATES * sees
    assert module.policy.input_size == OBS and module.state_value[0].in_features == OBS
    assert any("states" in name for name, _ in tensors(module)) == sees


def test_states_of_a_task_without_any_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="model.critic_input is states, but task fake has none") as error:
        built(EnvSpec("fake", OBS, ACTIONS, [-1.0] * ACTIONS, [1.0] * ACTIONS), critic_input="states")
    assert "\n" not in str(error.value)


KINDS = {
    "td3": {},
    "one option": {"num_options": 1},
    "all options": {"all_options": 0.5},
    "sampled": {"all_options": 0.5, "arrival": "sampled", "option_batch_size": 4},
    "atoms": {"critic_atoms": 11, "value_range": (-5.0, 5.0)},
    "sac": STOCHASTIC,
    "discrete": {"actor": "categorical"},
    "n-step": {"n_step": 3},
    "switch": {"n_step": 3, "n_step_form": "switch"},
    "retrace": {"n_step": 3, "n_step_form": "retrace", **STOCHASTIC},
    "filter": {"option_inference": "filter", "filter_length": 3, **STOCHASTIC},
    "gradient": {"policy_gradient": PolicyGradient(length=3), **STOCHASTIC},
    "gradient of all": {"policy_gradient": PolicyGradient(length=3, options="all"), **STOCHASTIC},
    "student": {"distillation": Distillation("student", student_hidden_sizes=[8])},
    "trust region": {"distillation": Distillation("target")},
}


def batch_of(kind, **options):
    discrete = KINDS[kind].get("actor") == "categorical"
    options = {"num_options": KINDS[kind].get("num_options", 4), **options}
    length = 3 if {"n_step", "policy_gradient", "filter_length"} & set(KINDS[kind]) else 1
    return states_batch(length=length, spec=DISCRETE if discrete else SPEC, **options), DISCRETE if discrete else SPEC


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_update_takes_them(kind):
    batch, spec = batch_of(kind)
    module = built(spec, policy_delay=1, option_delay=1, **KINDS[kind])
    before = {name: x.clone() for name, x in tensors(module)}
    fit(module, batch, spec)
    moved = {name.split(".")[0] for name, x in tensors(module) if not torch.equal(before[name], x)}
    assert {"policy", "states_moments", "states_normalizer"} <= moved
    assert ("option_critic" if "gradient" in kind else "critic") in moved
    assert all(math.isfinite(value) for name, value in module.latest_metrics.items() if name.startswith("loss/"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_workers_get_is_a_policy_of_observations(kind):
    """Acting networks are built and sent as of a task without states, and act without them."""
    spec = batch_of(kind)[1]
    module = built(spec, **KINDS[kind])
    blind = built(EnvSpec.from_json({**spec.to_json(), "states_size": 0}), **KINDS[kind])
    assert module.agent_settings() == blind.agent_settings()
    assert module.policy.flat_size == blind.policy.flat_size
    agent = module.agent(num_lanes=2)
    assert agent.act(np.zeros((2, OBS), np.float32), np.ones(2, bool)).action.shape[0] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_critics_depend_on_states(kind):
    losses = []
    for scale in (1.0, -1.0):
        batch, spec = batch_of(kind)
        start, stop = batch.layout.span("states")
        batch.rows[..., start:stop] *= scale
        torch.manual_seed(1)
        module = make_module(**KINDS[kind])
        fit(module, batch, spec)
        losses.append(module.latest_metrics["loss/critic"])
    assert losses[0] != losses[1]


@pytest.mark.parametrize("kind", ["td3", "gradient"])
def test_images_and_states_beside_an_observation(kind):
    """Policies see observation and features; the critics' loss trains the encoder with states behind both."""
    spec = EnvSpec.from_json({**SPEC.to_json(), "image_shape": [3, 8, 8]})
    plain = batch_of(kind)[0]
    layout = RowLayout(OBS, ACTIONS, STATES, image_shape=spec.image_shape)
    rows = np.zeros((*plain.rows.shape[:-1], layout.words), np.float32)
    for name in plain.layout.fields:
        layout.view(rows, name)[:] = plain.layout.view(plain.rows.numpy(), name)
    pixels = torch.randint(0, 255, (*rows.shape[:-1], layout.image_size), dtype=torch.uint8)
    layout.view(rows, "image")[:] = pixels.numpy()
    batch = replace(plain, rows=torch.from_numpy(rows), layout=layout, next_images=pixels.flip(1))
    module = built(spec, image_features=7, **KINDS[kind])
    assert module.policy.input_size == OBS + 7 and module.critic_input_size == OBS + 7 + STATES
    before = module.policy.encoder.last.weight.clone()
    fit(module, batch, spec)
    assert not torch.equal(before, module.policy.encoder.last.weight)
    assert math.isfinite(module.latest_metrics["loss/critic"])


def test_with_critic_input_obs_a_run_is_to_the_bit_that_of_the_task_without_states():
    modules = []
    for spec in (SPEC, EnvSpec("fake", OBS, ACTIONS, [-1.0] * ACTIONS, [1.0] * ACTIONS)):
        module = make_module(critic_input="obs")
        fit(module, states_batch(wide=False), spec)
        modules.append(dict(tensors(module)))
    assert list(modules[0]) == list(modules[1])
    assert all(torch.equal(x, modules[1][name]) for name, x in modules[0].items())


def test_interruption_asks_values_that_see_observations_alone(monkeypatch):
    """The policy's own option values learn the mean over the states that go with an observation: a worker has none."""
    module = built(value_lr=1e-2, interruption=0.1, normalize_observations=False)
    monkeypatch.setattr(
        module.next_values, "options", lambda judged: judged[:, OBS:].mean(1, keepdim=True).repeat(1, 4)
    )
    batch = states_batch(updates=1, size=64)
    batch.next_obs[:] = 1.0
    data = FakeData([batch] * 300)
    data.spec = SPEC
    fit_fake(module, [], data=data)
    learned = module.policy.option_values(torch.ones(1, OBS))
    torch.testing.assert_close(learned, batch.next_states.mean().expand(1, 4), atol=0.05, rtol=0)
    assert module.agent().act(np.ones((1, OBS), np.float32), np.zeros(1, bool)).option.shape == (1,)


def test_states_are_normalised_by_their_own_moments():
    module, batch = make_module(), states_batch(updates=1, size=400)
    fit(module, batch)
    assert float(module.states_moments.count) == 400 == float(module.moments.count)
    torch.testing.assert_close(module.states_normalizer.std, batch.states[0].std(0, unbiased=False))
    seen = Minibatch.of(batch, module.policy.normalizer, batch.reward, True, module.states_normalizer)
    torch.testing.assert_close(seen.states[0].std(0, unbiased=False), torch.ones(STATES), atol=0.05, rtol=0)
    assert seen.judged.shape == seen.next_judged.shape == (1, 400, OBS + STATES)
    off = make_module(normalize_observations=False)
    fit(off, batch)
    assert torch.equal(off.states_normalizer(batch.states), batch.states)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["td3", "gradient"])
def test_checkpoints_bring_states_back(tmp_path, kind):
    batch, spec = batch_of(kind)
    module = make_module(**KINDS[kind])
    fit(module, batch, spec).save_checkpoint(tmp_path / "a.ckpt")
    loaded = OptionCritic.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.sees_states
    before, after = dict(tensors(module)), dict(tensors(loaded))
    assert list(before) == list(after) and all(torch.equal(x, after[name]) for name, x in before.items())


def test_checkpoints_from_before_there_was_a_choice_load_without_states(tmp_path):
    module = make_module(critic_input="obs")
    trainer = fit(module, states_batch(wide=False))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del stored["claw"]["critic_input"], stored["hyper_parameters"]["critic_input"]
    del stored["claw"]["spec"]["desired_goal_in_states"]
    torch.save(stored, tmp_path / "old.ckpt")
    loaded = OptionCritic.load_from_checkpoint(tmp_path / "old.ckpt", weights_only=True)
    assert not loaded.sees_states and loaded.settings.critic_input == "obs"
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(tensors(module), tensors(loaded), strict=True))
    again = built(critic_input="obs")
    again.on_load_checkpoint(stored)  # a run that goes on from it
    with pytest.raises(ConfigError, match=r"was made with model.critic_input obs; this run has .*critic_input states"):
        built().on_load_checkpoint(stored)


def test_a_checkpoint_of_another_number_of_states_is_refused(tmp_path):
    trainer = fit(make_module(), states_batch())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    other = built(EnvSpec("fake", OBS, ACTIONS, [-1.0] * ACTIONS, [1.0] * ACTIONS, states_size=STATES + 1))
    with pytest.raises(ConfigError, match="made with states_size 5; this run has states_size 6"):
        other.on_load_checkpoint(stored)


# -- runs -------------------------------------------------------------------------------------------------------------

LEARN = {
    "task": "ClawHiddenGoal-v0", "envs_per_worker": 8, "batch_size": 64, "updates_per_step": 4,
    "samples_per_insert": 16, "warmup_steps": 200, "max_env_steps": 1600, "capacity": 4000,
}  # fmt: skip


def hidden_goal(tmp_path, critic_input, **model):
    model = {"critic_input": critic_input, "num_options": 2, "hidden_sizes": [32, 32], "target_noise": 0.0,
             "actor_lr": 3e-3, "critic_lr": 3e-3, **model}  # fmt: skip
    _, module, data = fit_lockstep(tmp_path, model=model, data=LEARN, limit_val_batches=0)
    actions = module.agent(num_lanes=1).act(np.zeros((1, 1), np.float32), np.ones(1, bool)).action
    return module.latest_metrics["loss/critic"], float(actions[0, 0]), module, data


def test_critics_that_see_states_explain_what_observations_hide(tmp_path):
    """The reward varies by a hidden goal: blind critics keep that variance as their loss, both policies learn."""
    blind, blind_action, *_ = hidden_goal(tmp_path, "obs")
    seeing, action, module, data = hidden_goal(tmp_path, "states")
    assert seeing < 0.3 * blind
    assert action == pytest.approx(0.4, abs=0.15) and blind_action == pytest.approx(0.4, abs=0.25)
    assert module.sees_states and data.memory.with_states
    assert float(module.states_moments.count) == float(module.moments.count) > 1500


def test_lockstep_with_states_repeats_itself_and_goes_on_from_its_checkpoint(tmp_path):
    settings = {"enable_checkpointing": True, "limit_val_batches": 0}
    data = {**LEARN, "max_env_steps": 600}
    runs = [fit_lockstep(tmp_path, data=data, limit_val_batches=0)[1] for _ in range(2)]
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(*map(tensors, runs), strict=True))
    keep = RunCheckpoint(dirpath=str(tmp_path / "c"))
    fit_lockstep(tmp_path, callbacks=[keep], data={**data, "max_env_steps": 400}, **settings)
    _, resumed, _ = fit_lockstep(tmp_path, ckpt=tmp_path / "c/last.ckpt", data=data, limit_val_batches=0)
    assert all(torch.equal(x, y) for (_, x), (_, y) in zip(tensors(runs[0]), tensors(resumed), strict=True))


@pytest.mark.parametrize("prefetch", [False, True])
def test_background_workers_deliver_states(tmp_path, prefetch):
    class Look(UpdateCallback):
        fits: ClassVar = []

        def on_batch_sampled(self, trainer, module, batch):
            pairs = ((batch.obs, batch.states), (batch.next_obs, batch.next_states))
            self.fits.extend(torch.equal(obs[..., :6], -states) for obs, states in pairs)

    coded = EnvConfig("claw_lightning.rollout.envs.diagnostic.CodedEnv", {"states_size": 6, "autoreset": "same_step"})
    data = make_data(env=coded, mode="overlapped", num_workers=1, prefetch=prefetch)
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=-1, limit_val_batches=0, callbacks=[Look()], **QUIET)
    trainer.fit(make_module(), datamodule=data)
    assert len(Look.fits) > 10 and all(Look.fits)


def test_ranks_normalise_states_by_the_moments_of_all(tmp_path):
    coded = {
        "env": EnvConfig("claw_lightning.rollout.envs.diagnostic.CodedEnv", {"states_size": 6}),
        "max_env_steps": 400,
    }
    one, two = run_ranks(rank_runs.lockstep, tmp_path, coded, {"num_options": 2})
    assert isinstance(one, dict) and isinstance(two, dict), (one, two)
    assert all(torch.equal(x, two["tensors"][name]) for name, x in one["tensors"].items())
    assert float(one["tensors"]["states_moments.count"]) == one["moments"] > 300
    for name in ("mean", "squares"):
        states, obs = (one["tensors"][f"{kind}.{name}"] for kind in ("states_moments", "moments"))
        torch.testing.assert_close(states.abs(), obs[:6].abs())


def test_a_stored_replay_without_states_is_refused_in_one_line(tmp_path):
    keep = RunCheckpoint(dirpath=str(tmp_path))
    fit_lockstep(tmp_path, callbacks=[keep], data={"task": "ClawIdentity-v0"}, limit_val_batches=0,
                 enable_checkpointing=True)  # fmt: skip
    with pytest.raises(ConfigError, match="1 observations, 1 states and 1 actions") as error:
        fit_lockstep(tmp_path, data={**LEARN, "initial_replay": str(tmp_path / "replay")}, limit_val_batches=0)
    assert "\n" not in str(error.value)
    assert json.loads((tmp_path / "replay/replay.json").read_text())["layout"]["states_size"] == 0
