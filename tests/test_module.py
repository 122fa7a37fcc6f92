"""The update schedule on ready batches: who moves when, towards what, and what never moves."""

import copy
import math

import numpy as np
import pytest
import torch

from callbacks import RunCheckpoint
from claw_lightning import module as schedule
from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.ring import FIRST, SWITCHED, TERMINATED
from claw_lightning.settings import Distillation, Diversity, PolicyGradient
from tests.runs import FakeData, fit_fake, fit_lockstep, make_batch, make_module

NETWORKS = (
    "critic", "policy.actor", "policy.option_policy", "policy.termination", "policy.option_value", "state_value",
)  # fmt: skip


def snapshot(module):
    return {name: copy.deepcopy(module.get_submodule(name).state_dict()) for name in NETWORKS}


def moved(before, after):
    return {n for n in before if any(not torch.equal(before[n][key], after[n][key]) for key in before[n])}


class Watcher(UpdateCallback):
    """Which networks moved at each update, and in each whole step."""

    def __init__(self):
        self.at_update, self.in_step = [], []

    def on_batch_sampled(self, trainer, module, batch):
        self.before = self.start = snapshot(module)

    def on_update_end(self, trainer, module):
        after = snapshot(module)
        self.at_update.append(moved(self.before, after))
        self.before = after

    def on_train_batch_end(self, trainer, module, *args):
        self.in_step.append(moved(self.start, snapshot(module)))


# -- schedule ---------------------------------------------------------------------------------------------------------


def test_policies_move_at_every_second_update_and_values_once_per_step():
    watcher = Watcher()
    fit_fake(make_module(policy_delay=2), [make_batch(3, seed=s) for s in range(2)], [watcher])
    policies = {"policy.actor", "policy.option_policy", "policy.termination"}
    values = {"policy.option_value", "state_value"}
    # Updates 1 .. 6: the delay counts across training steps; values move with the last update of each.
    assert watcher.at_update == [
        {"critic"}, {"critic"} | policies, {"critic"} | values,
        {"critic"} | policies, {"critic"}, {"critic"} | policies | values,
    ]  # fmt: skip
    assert watcher.in_step == [set(NETWORKS)] * 2


def test_options_move_at_a_period_of_their_own():
    watcher = Watcher()
    fit_fake(make_module(policy_delay=2, option_delay=3), [make_batch(6)], [watcher])
    assert [i + 1 for i, names in enumerate(watcher.at_update) if "policy.actor" in names] == [2, 4, 6]
    for network in ("policy.option_policy", "policy.termination"):
        assert [i + 1 for i, names in enumerate(watcher.at_update) if network in names] == [3, 6]


def test_global_step_counts_training_steps_and_updates_count_updates():
    module = make_module()
    trainer, _ = fit_fake(module, [make_batch(4, seed=s) for s in range(3)])
    assert (trainer.global_step, module.updates, module.env_steps) == (3, 12, 100)


def test_each_update_gets_its_own_rows_states_and_successors(monkeypatch):
    settings = {"normalize_observations": False, "policy_delay": 1, "option_delay": 1}
    previous = np.random.default_rng(1).integers(-1, 4, (2, 8))
    flags = np.where(previous < 0, FIRST | SWITCHED, 0) | np.where(np.arange(8) % 3 == 0, TERMINATED, 0)
    module, seen = make_module(**settings), []
    batch = make_batch(2, previous_option=previous, flags=flags, option_age=np.arange(16).reshape(2, 8))

    def spied(name, function):
        def spy(module, rows, *args, **kwargs):
            seen.append((name, rows, kwargs))
            return function(module, rows, *args, **kwargs)

        return spy

    for name in ("update_critic", "update_actor", "update_options", "update_values"):
        monkeypatch.setattr(schedule, name, spied(name, getattr(schedule, name)))
    fit_fake(module, [batch])
    each = ["update_critic", "update_actor", "update_options"]
    assert [name for name, _, _ in seen] == [*each, *each, "update_values"]
    assert [kwargs for name, _, kwargs in seen if name == "update_critic"] == [{"counted": False}, {"counted": True}]
    for (name, rows, _), u in zip(seen, [0, 0, 0, 1, 1, 1, 1], strict=True):
        fields = {
            "obs": batch.obs, "action": batch.action, "option": batch.option, "reward": batch.reward,
            "terminated": batch.terminated, "next_obs": batch.next_obs, "first": batch.first,
            "previous": batch.previous_option, "switched": batch.switched, "age": batch.option_age,
        }  # fmt: skip
        for field, want in fields.items():
            assert torch.equal(getattr(rows, field), want[u]), (name, field)


def test_one_option_has_no_option_networks():
    module = make_module(num_options=1)
    fit_fake(module, [make_batch(2, num_options=1)])
    names = {name.split(".")[0] + "." + name.split(".")[1] for name, _ in module.named_parameters()}
    assert not any("option_policy" in n or "termination" in n or "value" in n for n in names)
    assert module.policy.actor.embedding is None
    assert module._optimizer_names == ["critic", "actor"]
    assert len(module.trainer.optimizers) == 2


def test_gaussian_actor_learns_its_temperature():
    module = make_module(actor="gaussian", policy_delay=1)
    fit_fake(module, [make_batch(4, seed=s) for s in range(3)])
    assert module.target_actor is None
    assert module.log_temperature.item() != pytest.approx(np.log(0.1), abs=1e-7)
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_bf16_mixed_keeps_float32_parameters():
    module = make_module()
    fit_fake(module, [make_batch(4, seed=s) for s in range(3)], precision="bf16-mixed")
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_scaler_is_refused():
    module = make_module()
    module.build(make_spec())
    module._trainer = type("T", (), {"world_size": 1, "precision": "16-mixed"})()
    with pytest.raises(ConfigError, match=r"trainer\.precision"):
        module.on_fit_start()


def make_spec(**changes):
    fields = {"task": "fake", "obs_size": 3, "action_size": 2, "action_low": [-1.0] * 2, "action_high": [1.0] * 2}
    return EnvSpec(**{**fields, **changes})


def critic_norm(module):
    return float(torch.stack([p.grad.norm() for p in module.critic.parameters()]).norm())


def test_gradients_are_clipped():
    batches = [make_batch(2, reward=np.full((2, 8), 100.0))]
    free, clipped = make_module(), make_module(max_grad_norm=0.5)
    fit_fake(free, batches)
    fit_fake(clipped, batches)
    assert critic_norm(free) > 1.0
    assert critic_norm(clipped) == pytest.approx(0.5, rel=1e-3)


def test_terminated_rows_reach_the_target_as_such():
    """With gamma near 1 and huge target values, only terminated rows keep a small loss."""
    flags = np.full((1, 8), TERMINATED)
    for expected, batch in ((True, make_batch(1, reward=np.zeros((1, 8)), flags=flags)), (False, make_batch(1))):
        module = make_module(target_noise=0.0)

        class Raise(UpdateCallback):
            def on_batch_sampled(self, trainer, module, batch):
                with torch.no_grad():
                    module.target_critic.last.bias.fill_(1e3)

        fit_fake(module, [batch], [Raise()])
        assert (module.latest_metrics["loss/critic"] < 100.0) == expected


# -- settings and checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, key",
    [
        ({"num_options": 0}, "model.num_options"),
        ({"gamma": 1.0}, "model.gamma"),
        ({"policy_delay": 0}, "model.policy_delay"),
        ({"option_delay": 0}, "model.option_delay"),
        ({"initial_termination": 1.0}, "model.initial_termination"),
        ({"max_option_duration": -1}, "model.max_option_duration"),
        ({"min_option_duration": 5, "max_option_duration": 3}, "model.min_option_duration"),
        ({"hidden_sizes": []}, "model.hidden_sizes"),
        ({"option_hidden_sizes": [0]}, "model.option_hidden_sizes"),
        ({"critic_lr": 0.0}, "model.critic_lr"),
        ({"actor_lr": math.nan}, "model.actor_lr"),
        ({"value_lr": math.inf}, "model.value_lr"),
        ({"gamma": math.nan}, "model.gamma"),
        ({"deliberation_cost": -0.1}, "model.deliberation_cost"),
        ({"target_noise": -1.0}, "model.target_noise"),
        ({"target_entropy": math.nan}, "model.target_entropy"),
        ({"initial_temperature": 0.0}, "model.initial_temperature"),
        ({"obs_clip": 0.0}, "model.obs_clip"),
        ({"option_batch_size": -1}, "model.option_batch_size"),
        ({"max_grad_norm": math.nan}, "model.max_grad_norm"),
        ({"reward_scale": 0.0}, "model.reward_scale"),
        ({"activation": "gelu"}, "model.activation"),
    ],
)
def test_wrong_settings_are_named(settings, key):
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as error:
        OptionCritic(**settings)
    assert "\n" not in str(error.value)


def test_discrete_tasks_are_refused():
    with pytest.raises(ConfigError, match="discrete"):
        make_module().build(make_spec(num_actions=3))


def test_a_foreign_data_module_is_refused():
    data = FakeData([make_batch()])
    data.spec = None
    with pytest.raises(ConfigError, match="ReplayDataModule"):
        fit_fake(make_module(), [], data=data)


@pytest.mark.parametrize("actor", ["deterministic", "gaussian"])
def test_checkpoint_round_trip_gives_the_same_actions(tmp_path, actor):
    module = make_module(actor=actor)
    trainer, _ = fit_fake(module, [make_batch(4, seed=s) for s in range(3)])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = OptionCritic.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert (loaded.updates, loaded.env_steps, loaded.spec) == (12, 100, module.spec)
    obs, option = torch.randn(16, 3), torch.arange(16) % 4
    got, want = (p.actor.mean_action(p.actor(p.normalizer(obs), option)) for p in (loaded.policy, module.policy))
    assert torch.equal(got, want)
    np.testing.assert_array_equal(loaded.policy.flatten(), module.policy.flatten())


@pytest.mark.parametrize("kind", [
    {"distillation": Distillation("student", student_hidden_sizes=[8])},
    {"distillation": Distillation("target", kl_limit=0.1)},
    {"actor": "gaussian", "policy_gradient": PolicyGradient(length=4), "exploration": Exploration(kind="none")},
    {"actor": "gaussian", "n_step": 4, "n_step_form": "retrace", "exploration": Exploration(kind="none")},
    {"exploration": Exploration(scale_min=0.2, scale_max=0.7, uniform=0.1)},
    {"diversity": Diversity(bonus=0.5, adaptive_weights=True), "option_heads": "separate"},
    {"critic_atoms": 11, "value_range": (-5.0, 5.0)},
])  # fmt: skip
def test_checkpoints_bring_their_groups_and_load_as_weights_alone(tmp_path, kind):
    batch = segment_batch(4) if {"n_step", "policy_gradient"} & set(kind) else make_batch(2)
    module = make_module(**kind)
    trainer, _ = fit_fake(module, [batch])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    torch.load(tmp_path / "a.ckpt", weights_only=True)
    loaded = OptionCritic.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert loaded.groups == module.groups
    assert (loaded.updates, loaded.env_steps) == (module.updates, 100)
    before, after = module.state_dict(), loaded.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (loaded.policy.student is None) == (module.policy.student is None)
    # And the run can be taken up again.
    again = make_module(build=True, **kind)
    again.on_load_checkpoint(torch.load(tmp_path / "a.ckpt", weights_only=True))
    again.load_state_dict(before)


def segment_batch(length):
    """Two updates of segments, all steps of which are valid."""
    flat = make_batch(2, 8 * length, log_prob_action=-np.ones((2, 8 * length)))
    shape = (2, 8, length)
    return ReplayBatch(
        flat.rows.view(*shape, -1), flat.next_obs.view(*shape, -1), flat.layout, flat.moments, 100,
        torch.ones(shape, dtype=torch.bool),
    )  # fmt: skip


@pytest.mark.parametrize(
    "ours, said",
    [({"num_options": 2}, "model.num_options 4; this run has model.num_options 2"),
     ({"hidden_sizes": [8]}, "this run has model.hidden_sizes [8]")],
)  # fmt: skip
def test_a_checkpoint_of_other_networks_is_refused_with_both_named(tmp_path, ours, said):
    trainer, _ = fit_fake(make_module(), [make_batch()])
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ConfigError, match="ckpt_path: the checkpoint was made with") as error:
        make_module(build=True, **ours).on_load_checkpoint(torch.load(tmp_path / "a.ckpt", weights_only=True))
    assert said in str(error.value)


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    trainer, module = fit_fake(make_module(), [make_batch()])[0], make_module()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    module.build(make_spec(task="other", obs_size=7))
    with pytest.raises(ConfigError, match="task fake, obs_size 3; this run has task other, obs_size 7"):
        module.on_load_checkpoint(torch.load(tmp_path / "a.ckpt", weights_only=True))


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(tmp_path):
    batch = make_batch(reward=np.full((2, 8), np.inf))
    module = make_module()
    with pytest.raises(ConfigError, match="is no longer finite after 2 updates: lower"):
        fit_fake(module, [batch], [RunCheckpoint(dirpath=str(tmp_path))], enable_checkpointing=True)
    assert module.diverged
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_foreign_checkpoint_is_refused(tmp_path):
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6", "hyper_parameters": {}}, tmp_path / "b.ckpt")
    with pytest.raises(ConfigError, match="not written by claw-lightning"):
        OptionCritic.load_from_checkpoint(tmp_path / "b.ckpt", weights_only=True)


@pytest.mark.slow
def test_identity_task_is_learned_in_seconds(tmp_path):
    trainer, module, data = fit_lockstep(
        tmp_path,
        model={"num_options": 2, "exploration": Exploration(scale_min=0.3, scale_max=0.3), "hidden_sizes": [32, 32]},
        data={
            "task": "ClawIdentity-v0", "envs_per_worker": 8, "batch_size": 64, "updates_per_step": 4,
            "samples_per_insert": 32, "max_env_steps": 1600, "eval_episodes": 50, "eval_envs": 10,
        },
    )  # fmt: skip
    # A random policy has -2/3; one that always answers 0 has -1/3.
    assert float(trainer.callback_metrics["val/return"]) > -0.03


@pytest.mark.parametrize(
    ("made_with", "resumed_with", "names"),
    [
        ({"distillation": Distillation(kind="student")}, {}, ["distillation.kind student", "distillation.kind none"]),
        (
            {"distillation": Distillation(kind="student", student_hidden_sizes=[8])},
            {"distillation": Distillation(kind="student", student_hidden_sizes=[16])},
            ["student_hidden_sizes [8]", "student_hidden_sizes [16]"],
        ),
        (
            {"distillation": Distillation(kind="target", kl_limit=0.1)},
            {"distillation": Distillation(kind="target")},
            ["kl_limit True", "kl_limit False"],
        ),
        (
            {"actor": "gaussian", "policy_gradient": PolicyGradient(length=2)},
            {"actor": "gaussian"},
            ["policy_gradient True", "policy_gradient False"],
        ),
    ],
)
def test_a_checkpoint_with_other_networks_by_a_group_is_refused_with_both_names(made_with, resumed_with, names):
    checkpoint = {}
    made = make_module(build=True, num_options=2, **made_with)
    made.on_save_checkpoint(checkpoint)
    checkpoint["hyper_parameters"] = dict(made.hparams)
    with pytest.raises(ConfigError) as caught:
        make_module(build=True, num_options=2, **resumed_with).on_load_checkpoint(checkpoint)
    assert all(name in str(caught.value) for name in names)
    assert "\n" not in str(caught.value)


def test_evaluation_in_lockstep_acts_in_full_precision_under_autocast(tmp_path):
    trainer, _, _ = fit_lockstep(tmp_path, model={"num_options": 2}, precision="bf16-mixed", check_val_every_n_epoch=1)
    assert "val/return" in trainer.callback_metrics


def test_a_policy_gradient_from_segments_of_one_step(tmp_path):
    gradient = PolicyGradient(advantage="one_step", length=1)
    _, module, _ = fit_lockstep(tmp_path, model={"num_options": 2, "actor": "gaussian", "policy_gradient": gradient})
    assert module.updates > 0


@pytest.mark.parametrize(
    ("made_with", "resumed_with", "name"),
    [
        (
            {"critic_atoms": 11, "value_range": (-20.0, 5.0)},
            {"critic_atoms": 11, "value_range": (-200.0, 0.0)},
            "value_range",
        ),
        ({"activation": "relu"}, {"activation": "tanh"}, "activation"),
        ({"actor": "gaussian"}, {"actor": "gaussian", "tune_temperature": False}, "tune_temperature"),
    ],
)  # fmt: skip
def test_what_would_silently_mean_something_else_is_compared_on_resume(made_with, resumed_with, name):
    checkpoint = {}
    made = make_module(build=True, num_options=2, **made_with)
    made.on_save_checkpoint(checkpoint)
    checkpoint["hyper_parameters"] = dict(made.hparams)
    with pytest.raises(ConfigError, match=f"model.{name} .* this run has model.{name}"):
        make_module(build=True, num_options=2, **resumed_with).on_load_checkpoint(checkpoint)


def test_a_checkpoint_of_another_version_names_what_it_lacks():
    checkpoint = {}
    made = make_module(build=True, num_options=2)
    made.on_save_checkpoint(checkpoint)
    checkpoint["hyper_parameters"] = dict(made.hparams)
    checkpoint["state_dict"] = {k: v for k, v in made.state_dict().items() if k != "policy.switch_cost"}
    with pytest.raises(ConfigError, match="another version of claw-lightning; it lacks policy.switch_cost"):
        make_module(build=True, num_options=2).on_load_checkpoint(checkpoint)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_precisions_that_do_not_work_are_refused(tmp_path, precision):
    with pytest.raises(ConfigError, match=f"trainer.precision {precision}"):
        fit_lockstep(tmp_path, precision=precision)


def test_the_agent_of_a_loaded_checkpoint_acts(tmp_path):
    model = {"num_options": 2, "distillation": Distillation(kind="student", student_hidden_sizes=[8])}
    trainer, module, _ = fit_lockstep(tmp_path, model=model)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    loaded = OptionCritic.load_from_checkpoint(tmp_path / "x.ckpt")
    obs, first = np.zeros((3, 3), np.float32), np.ones(3, bool)
    for student in (False, True):
        decisions = [m.agent(num_lanes=3, student=student).act(obs, first) for m in (module, loaded)]
        assert np.array_equal(decisions[0].action, decisions[1].action) and decisions[0].action.shape == (3, 1)
    with pytest.raises(ConfigError, match="distilled no student"):
        make_module(build=True).agent(student=True)
