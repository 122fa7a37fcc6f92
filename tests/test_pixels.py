"""Learning from images: who trains the encoder, what everybody else sees, and what is refused."""

import copy

import numpy as np
import pytest
import torch

from callbacks import NoveltyBonus
from claw_lightning.data import EnvConfig, ReplayDataModule
from claw_lightning.errors import ConfigError, WorkerError
from claw_lightning.exploration import Exploration
from claw_lightning.hooks import UpdateCallback
from claw_lightning.minibatch import Minibatch
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.envs.base import EnvError, EnvSpec
from claw_lightning.rollout.ring import RowLayout
from claw_lightning.settings import Distillation, PolicyGradient
from claw_lightning.updates.distillation import load_teacher, reference_obs
from tests.runs import FakeData, fit_fake, fit_lockstep, make_module

SHAPE, OBS_SIZE = (3, 6, 7), 2
SPEC = EnvSpec("seen", OBS_SIZE, 2, [-1.0, -1.0], [1.0, 1.0], image_shape=SHAPE)
SMALL = {"image_features": 5, "hidden_sizes": [8], "option_hidden_sizes": [8]}
OWN = {"actor": "gaussian", "exploration": Exploration(kind="none")}
KINDS = {
    "single": {},
    "all options": {"all_options": 1.0},
    "gaussian": {"actor": "gaussian"},
    "one option": {"num_options": 1},
    "atoms": {"critic_atoms": 11, "value_range": (-5.0, 5.0)},
    "n step": {"n_step": 3},
    "retrace": {**OWN, "n_step": 3, "n_step_form": "retrace"},
    "filter": {**OWN, "option_inference": "filter", "filter_length": 3},
    "policy gradient": {**OWN, "policy_gradient": PolicyGradient(length=3)},
    "policy gradient, all": {**OWN, "policy_gradient": PolicyGradient(length=3, options="all")},
    "slow copy": {"distillation": Distillation("target")},
    "student": {"distillation": Distillation("student", student_hidden_sizes=[8])},
}


def batch_of(updates=2, size=6, length=1, seed=0, num_options=4):
    """Random batch of SPEC, segments of ``length`` steps."""
    rng = np.random.default_rng(seed)
    lead = (updates, size) if length == 1 else (updates, size, length)
    layout = RowLayout(OBS_SIZE, 2, image_shape=SHAPE)
    rows = np.zeros((*lead, layout.words), np.float32)
    values = {
        "obs": rng.normal(size=(*lead, OBS_SIZE)),
        "image": rng.integers(0, 256, (*lead, layout.image_size)),
        "action": rng.uniform(-1, 1, (*lead, 2)),
        "reward": rng.normal(size=lead),
        "option": rng.integers(0, num_options, lead),
        "log_prob_action": -np.ones(lead),
    }
    for name, value in values.items():
        layout.view(rows, name)[:] = value
    next_obs = torch.from_numpy(rng.normal(size=(*lead, OBS_SIZE)).astype(np.float32))
    next_images = torch.from_numpy(rng.integers(0, 256, (*lead, layout.image_size), dtype=np.uint8))
    moments = (1.0, np.zeros(OBS_SIZE), np.zeros(OBS_SIZE))
    valid = torch.ones(lead, dtype=torch.bool) if length > 1 else None
    return ReplayBatch(torch.from_numpy(rows), next_obs, layout, moments, 100, valid, next_images=next_images)


def module_of(build=True, **settings):
    module = make_module(**{**SMALL, **settings})
    if build:
        module.build(SPEC)
    return module


def fit(module, batches, callbacks=(), **trainer):
    data = FakeData(batches)
    data.spec = SPEC
    return fit_fake(module, batches, callbacks, data=data, **trainer)


# -- the update schedule --------------------------------------------------------------------------------------------


class WatchedSteps:
    """Which optimiser steps give the encoder a gradient."""

    def __init__(self, module, monkeypatch):
        self.found = {}
        descend = module.descend_together

        def watched(networks, loss, counted=False):
            module.policy.encoder.zero_grad()
            descend(networks, loss, counted)
            grads = [p.grad for p in module.policy.encoder.parameters()]
            for name in networks:
                self.found[name] = any(g is not None and bool(g.any()) for g in grads)

        monkeypatch.setattr(module, "descend_together", watched)


@pytest.mark.parametrize("kind", KINDS)
def test_the_critics_loss_alone_trains_the_encoder(kind, monkeypatch):
    module = module_of(build=False, **KINDS[kind])
    steps = WatchedSteps(module, monkeypatch)
    fit(module, [batch_of(length=module.segment_length, num_options=module.settings.num_options)])
    teaching = "option_value" if "policy gradient" in kind else "critic"
    assert [name for name, gives in steps.found.items() if gives] == [teaching]
    assert len(steps.found) > 1


class EncoderWatcher(UpdateCallback):
    """States of encoder and target encoder after each update."""

    def __init__(self):
        self.states = []

    def on_update_end(self, trainer, module):
        networks = (module.policy.encoder, module.target_encoder)
        self.states.append(tuple(copy.deepcopy(network.state_dict()) for network in networks))


def test_the_target_encoder_follows_slowly():
    module, watcher = module_of(build=False), EncoderWatcher()
    fit(module, [batch_of(3)], [watcher])
    assert (module.policy.encoder, module.target_encoder) in module.target_pairs
    assert not any(p.requires_grad for p in module.target_encoder.parameters())
    # The default callback was put before or behind the watcher: either way it moves by 0.005 at each update.
    online, target = (torch.cat([x.flatten() for x in state.values()]) for state in watcher.states[-1])
    first = torch.cat([x.flatten() for x in watcher.states[0][1].values()])
    assert 0 < float((target - first).norm()) < 0.05 * float((online - first).norm())


def test_networks_see_observation_and_features_side_by_side():
    module = module_of()
    assert module.policy.input_size == OBS_SIZE + 5
    rows = stacked(module).at(0)
    seen = module.perceived(rows)
    assert torch.equal(seen.obs[:, :OBS_SIZE], rows.obs) and torch.equal(seen.next_obs[:, :OBS_SIZE], rows.next_obs)
    assert torch.equal(seen.obs[:, OBS_SIZE:], module.policy.encoder(rows.image))
    assert torch.equal(seen.next_obs[:, OBS_SIZE:], module.target_encoder(rows.next_image))
    assert seen.obs.requires_grad and not seen.next_obs.requires_grad
    assert seen.image is None and seen.next_image is None


def stacked(module, **batch):
    made = batch_of(**batch)
    return Minibatch.of(made, module.policy.normalizer, made.reward, True)


def test_shifts_are_applied_to_both_images_and_nowhere_without_the_setting():
    torch.manual_seed(0)
    module, still = module_of(image_shift=2), module_of()
    still.load_state_dict(module.state_dict())
    rows = stacked(module, size=64).at(0)
    moved, kept = module.perceived(rows), still.perceived(rows)
    for a, b in ((moved.obs, kept.obs), (moved.next_obs, kept.next_obs)):
        assert (a != b).any(1).float().mean() > 0.8  # one in 25 is not shifted
    again = still.perceived(rows)
    assert torch.equal(again.obs, kept.obs)


def test_gradients_of_critic_and_encoder_are_clipped_together():
    module = module_of()
    clipped = {id(p) for p in module.with_encoder(module.critic).parameters()}
    assert clipped == {id(p) for p in [*module.critic.parameters(), *module.policy.encoder.parameters()]}


# -- acting, checkpoints, teachers ----------------------------------------------------------------------------------


def test_an_agent_sees_and_says_when_it_is_shown_nothing():
    module = module_of()
    agent, obs, first = module.agent(3), np.zeros((3, OBS_SIZE), np.float32), np.ones(3, bool)
    images = np.random.default_rng(0).integers(0, 256, (3, *SHAPE), dtype=np.uint8)
    decision = agent.act(obs, first, images)
    x = module.policy.perceive(torch.zeros(3, OBS_SIZE), torch.from_numpy(images))
    actor = module.policy.actor
    expected = actor.mean_action(actor(x, torch.from_numpy(decision.option.astype(np.int64))))
    np.testing.assert_allclose(decision.action, expected.detach(), atol=1e-6)
    assert (decision.action != agent.act(obs, first, images[::-1].copy()).action).any()
    with pytest.raises(ValueError, match="give image"):
        agent.act(obs, first)


@pytest.mark.parametrize("kind", ["single", "policy gradient", "student"])
def test_checkpoints_bring_encoder_and_target(tmp_path, kind):
    module = module_of(build=False, **KINDS[kind])
    trainer, _ = fit(module, [batch_of(length=module.segment_length)])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = OptionCritic.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    before, after = module.state_dict(), loaded.state_dict()
    assert list(before) == list(after) and any(name.startswith("target_encoder.") for name in before)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.spec == module.spec and loaded.spec.image_shape == SHAPE
    np.testing.assert_array_equal(loaded.policy.flatten(), module.policy.flatten())


@pytest.mark.parametrize(
    "changes, spec, said",
    [
        ({"image_features": 6}, {}, "model.image_features 5; this run has model.image_features 6"),
        ({}, {"image_shape": (3, 6, 8)}, r"image_shape \(3, 6, 7\); this run has image_shape \(3, 6, 8\)"),
        ({}, {"image_shape": None}, r"image_shape \(3, 6, 7\); this run has image_shape None"),
    ],
)
def test_a_checkpoint_of_other_images_is_refused(tmp_path, changes, spec, said):
    trainer, _ = fit(module_of(build=False), [batch_of()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module = module_of(build=False, **changes)
    module.build(EnvSpec("seen", OBS_SIZE, 2, [-1.0] * 2, [1.0] * 2, **{"image_shape": SHAPE, **spec}))
    with pytest.raises(ConfigError, match=said):
        module.on_load_checkpoint(torch.load(tmp_path / "a.ckpt", weights_only=True))


def test_a_teacher_sees_with_its_own_encoder(tmp_path):
    trainer, _ = fit(module_of(build=False, seed=1), [batch_of()])
    trainer.save_checkpoint(tmp_path / "teacher.ckpt")
    path = str(tmp_path / "teacher.ckpt")
    module = module_of(build=False, distillation=Distillation("teacher", teacher=path))
    fit(module, [batch_of()])
    rows = stacked(module)
    rows.raw_obs = rows.obs
    seen = module.perceived(rows.at(0))
    teacher = module._teacher[0]
    expected = teacher.perceive(teacher.normalizer(rows.raw_obs[0]), rows.image[0])
    assert torch.equal(reference_obs(module, seen), expected)
    assert not torch.equal(teacher.encoder.last.weight, module.policy.encoder.last.weight)
    for shape in (None, (3, 6, 8)):
        spec = EnvSpec("seen", OBS_SIZE, 2, [-1.0] * 2, [1.0] * 2, image_shape=shape)
        with pytest.raises(ConfigError, match="image_shape") as error:
            load_teacher(path, spec, 4, "deterministic")
        assert "\n" not in str(error.value)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, said",
    [({"image_features": 0}, "model.image_features is 0"), ({"image_shift": -1}, "model.image_shift")],
)
def test_settings_without_meaning(settings, said):
    with pytest.raises(ConfigError, match=said):
        OptionCritic(**settings)


def test_a_shift_beyond_the_image_is_refused():
    with pytest.raises(ConfigError, match="model.image_shift is 6; images of seen have 6 x 7 pixels"):
        module_of(image_shift=6)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"image_codec": "png"}, "data.image_codec is 'png'; give none, zlib or lz4"),
        ({"image_codec": "zlib", "image_bytes": 0}, "data.image_bytes is 0"),
        ({"image_bytes": 100}, r"data.image_bytes \(100\) does nothing with data.image_codec 'none'"),
    ],
)
def test_settings_of_compression(settings, said):
    with pytest.raises(ConfigError, match=said):
        ReplayDataModule(EnvConfig("FourRoomsEnv"), **settings)


def test_same_step_autoreset_and_wrong_shapes_are_refused():
    with pytest.raises(EnvError, match="same-step autoreset are not supported"):
        EnvSpec("seen", 2, 2, [-1.0] * 2, [1.0] * 2, autoreset="same_step", image_shape=SHAPE)
    for shape in ((3, 6), (3, 0, 6)):
        with pytest.raises(EnvError, match=r"\(channels, height, width\)"):
            EnvSpec("seen", 2, 2, [-1.0] * 2, [1.0] * 2, image_shape=shape)
    spec = EnvSpec("seen", 0, 2, [-1.0] * 2, [1.0] * 2, image_shape=[np.int64(3), 6, 7])
    assert spec.image_shape == SHAPE and EnvSpec.from_json(spec.to_json()) == spec


def test_novelty_of_images_is_refused():
    with pytest.raises(ConfigError, match="NoveltyBonus looks at observations, not at images"):
        fit(module_of(build=False), [batch_of()], [NoveltyBonus()])


def test_missing_package_of_the_codec_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lz4", None)
    with pytest.raises((ConfigError, WorkerError), match="pip install lz4"):
        fit_lockstep(tmp_path, model=FOUR_ROOMS_MODEL, data={**FOUR_ROOMS, "image_codec": "lz4"})


# -- whole runs -----------------------------------------------------------------------------------------------------

FOUR_ROOMS = {
    "env": EnvConfig("FourRoomsEnv", {"pixels": True, "max_episode_steps": 40}), "envs_per_worker": 2,
    "capacity": 200, "warmup_steps": 40, "max_env_steps": 80, "eval_episodes": 2, "eval_envs": 2,
}  # fmt: skip
FOUR_ROOMS_MODEL = {"actor": "categorical", "num_options": 2, **SMALL}


@pytest.mark.parametrize("codec", ["none", "zlib"])
def test_lockstep_run_from_pixels_with_evaluation(tmp_path, codec):
    data = {**FOUR_ROOMS, "image_codec": codec, **({"image_bytes": 200} if codec == "zlib" else {})}
    trainer, module, made = fit_lockstep(tmp_path, model={**FOUR_ROOMS_MODEL, "image_shift": 1}, data=data)
    assert module.updates > 0 and made.spec.obs_size == 0
    assert 0 < float(trainer.callback_metrics["val/length"]) <= 40
    layout = made.memory.layout
    assert (layout.image_codec, layout.image_shape) == (codec, (3, 13, 13))


def test_compression_changes_nothing_of_what_is_learned(tmp_path):
    runs = []
    for codec in ("none", "zlib"):
        data = {**FOUR_ROOMS, "image_codec": codec, **({"image_bytes": 500} if codec == "zlib" else {})}
        runs.append(fit_lockstep(tmp_path / codec, model=FOUR_ROOMS_MODEL, data=data)[1].state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
