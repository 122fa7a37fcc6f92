"""The update schedule on ready batches: who moves when, towards what, and what never moves."""

import copy
import math

import numpy as np
import pytest
import torch

from callbacks import RunCheckpoint
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.ring import TERMINATED
from tests.runs import FakeData, fit_fake, fit_lockstep, make_batch, make_module

NETWORKS = ("critic", "policy.actor", "policy.option_policy", "policy.termination", "option_value", "state_value")


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


def capture(module, monkeypatch, step=None):
    """Replace optimiser steps: losses by name, after a plain backward pass."""
    losses = {}

    def descend(name, loss, network, counted=False):
        losses[name] = loss.detach()
        if step is not None:
            module.zero_grad()
            loss.backward()
            step(name, network)

    monkeypatch.setattr(module, "_descend", descend)
    return losses


# -- schedule ---------------------------------------------------------------------------------------------------------


def test_policies_move_at_every_second_update_and_values_once_per_step():
    watcher = Watcher()
    fit_fake(make_module(policy_delay=2), [make_batch(3, seed=s) for s in range(2)], [watcher])
    policies = {"policy.actor", "policy.option_policy", "policy.termination"}
    # Updates 1 .. 6: the delay counts across training steps.
    assert watcher.at_update == [{"critic"}, {"critic"} | policies] * 3
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
    module, batch, seen = make_module(**settings), make_batch(2), []

    def spied(name, method):
        def spy(*args, **kwargs):
            seen.append((name, args))
            return method(*args, **kwargs)

        return spy

    for name in ("update_critic", "update_actor", "update_options", "update_values"):
        monkeypatch.setattr(module, name, spied(name, getattr(module, name)))
    fit_fake(module, [batch])
    obs, successors = batch.obs, batch.next_obs
    expected = []
    for u in range(2):
        rows = (obs[u], batch.action[u], batch.option[u], batch.reward[u], batch.terminated[u], successors[u])
        expected += [
            ("update_critic", rows),
            ("update_actor", (obs[u], batch.option[u])),
            ("update_options", (successors[u], batch.option[u], batch.terminated[u])),
        ]
    expected.append(("update_values", (successors[1],)))
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (name, got), (_, want) in zip(seen, expected):
        for left, right in zip(got, want, strict=True):
            assert torch.equal(left, right), name


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


# -- targets ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stubbed(monkeypatch):
    """K = 2. Networks that are plain functions of their input, so that a wrong index or state shows."""
    module = make_module(num_options=2, gamma=0.9, deliberation_cost=0.25, target_noise=0.0, build=True)
    policy = module.policy
    twin = torch.tensor([[[1.0, 2.0]], [[3.0, 0.5]]])  # the smaller twin is another one for each option

    monkeypatch.setattr(module.target_actor, "forward_all", lambda x: torch.zeros(len(x), 2, 2))
    monkeypatch.setattr(module.target_critic, "forward_all", lambda x, a: twin + x[:, 0].view(1, -1, 1))
    monkeypatch.setattr(policy, "option_probs", lambda x: torch.stack([0.2 + 0 * x[:, 0], 0.8 + 0 * x[:, 0]], 1))
    monkeypatch.setattr(policy, "beta", lambda x: torch.stack([x[:, 1], 1 - x[:, 1]], 1))
    return module


def expected_target(reward, terminated, next_obs, option):
    # Twin minimum per option first: (1.0, 0.5) + x0; then the mixture of pi = (0.2, 0.8).
    q = [1.0 + next_obs[0], 0.5 + next_obs[0]]
    value = 0.2 * q[0] + 0.8 * q[1]
    beta = [next_obs[1], 1 - next_obs[1]][option]
    arrival = (1 - beta) * q[option] + beta * (value - 0.25)
    return reward + (0.0 if terminated else 0.9 * arrival)


def test_target_is_the_arrival_value_of_the_executed_option_at_the_next_state(stubbed, monkeypatch):
    obs, next_obs = torch.full((4, 3), 7.0), torch.tensor([[0.0, 0.3, 0], [1.0, 0.3, 0], [2.0, 0.9, 0], [3.0, 0.9, 0]])
    option, reward = torch.tensor([0, 1, 0, 1]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    terminated = torch.tensor([False, False, True, False])
    want = torch.tensor([expected_target(float(reward[i]), bool(terminated[i]), next_obs[i].tolist(), int(option[i]))
                         for i in range(4)])  # fmt: skip
    q = torch.stack([want + 1.0, want - 2.0]).requires_grad_()
    monkeypatch.setattr(stubbed.critic, "forward", lambda o, a, option, first=None: q)
    losses = capture(stubbed, monkeypatch)
    stubbed.update_critic(obs, torch.zeros(4, 2), option, reward, terminated, next_obs, last=True)
    assert float(losses["critic"]) == pytest.approx(1.0**2 + 2.0**2, rel=1e-5)


def test_smaller_twin_is_taken_per_option_before_anything_is_mixed(stubbed):
    next_obs = torch.tensor([[0.0, 0.3, 0.0], [2.0, 0.3, 0.0]])
    torch.testing.assert_close(stubbed.next_option_values(next_obs), torch.tensor([[1.0, 0.5], [3.0, 2.5]]))


def test_sampled_arrival_has_the_expected_one_as_its_mean(stubbed, monkeypatch):
    n = 20_000
    next_obs, option = torch.tensor([[1.0, 0.3, 0.0]]).repeat(n, 1), torch.arange(n) % 2
    monkeypatch.setattr(stubbed.target_actor, "forward", lambda x, option: torch.zeros(len(x), 2))
    monkeypatch.setattr(
        stubbed.target_critic,
        "forward",
        lambda x, action, option: stubbed.target_critic.forward_all(x, None).gather(
            2, option.view(1, -1, 1).repeat(2, 1, 1)
        )[..., 0],
    )
    torch.manual_seed(0)
    expected, drawn = (f(next_obs, option) for f in (stubbed.expected_arrival, stubbed.sampled_arrival))
    for o in (0, 1):
        assert float(expected[o]) == pytest.approx((expected_target(0, False, [1.0, 0.3], o)) / 0.9, rel=1e-5)
        # Standard deviation of one draw below 0.4: four standard errors.
        assert float(drawn[option == o].mean()) == pytest.approx(float(expected[o]), abs=4 * 0.4 / (n / 2) ** 0.5)


def test_critic_sees_executed_option_action_and_state(stubbed, monkeypatch):
    seen = {}

    def critic(obs, action, option, first=None):
        seen.update(obs=obs, action=action, option=option)
        return torch.zeros(2, len(obs), requires_grad=True)

    monkeypatch.setattr(stubbed.critic, "forward", critic)
    capture(stubbed, monkeypatch)
    obs, action, option = torch.rand(3, 3), torch.rand(3, 2), torch.tensor([1, 0, 1])
    stubbed.update_critic(obs, action, option, torch.zeros(3), torch.zeros(3, dtype=bool), torch.rand(3, 3), last=True)
    assert seen["obs"] is obs and seen["action"] is action and seen["option"] is option


def test_smoothing_noise_is_clipped_and_actions_stay_in_bounds(monkeypatch):
    module = make_module(num_options=2, target_noise=10.0, target_noise_clip=0.5, build=True)
    monkeypatch.setattr(module.target_actor, "forward_all", lambda x: torch.atanh(torch.full((len(x), 2, 2), 0.8)))
    seen = {}

    def forward_all(obs, actions):
        seen["actions"] = actions
        return torch.zeros(2, len(obs), 2)

    monkeypatch.setattr(module.target_critic, "forward_all", forward_all)
    module.next_option_values(torch.zeros(64, 3))
    assert float(seen["actions"].max()) == 1.0
    assert float(seen["actions"].min()) == pytest.approx(0.3)


# -- losses of the policies -------------------------------------------------------------------------------------------


def test_policy_losses_leave_no_gradient_in_critics(monkeypatch):
    for actor in ("deterministic", "gaussian"):
        module = make_module(actor=actor, build=True)
        outside = [p for net in (module.critic, module.target_critic) for p in net.parameters()]
        grads = {}

        def step(name, network):
            grads[name] = any(p.grad is not None and bool(p.grad.any()) for p in outside)  # noqa: B023

        capture(module, monkeypatch, step)
        option = torch.randint(0, 4, (8,))
        module.update_actor(torch.randn(8, 3), option)
        assert all(p.requires_grad for p in module.critic.parameters())
        module.update_options(torch.randn(8, 3), option, torch.zeros(8, dtype=bool))
        assert {"actor", "option_policy", "termination"} <= set(grads)
        assert not any(grads.values())


@pytest.fixture
def option_step(monkeypatch):
    """One plain gradient step of update_options on K = 2; returns beta and pi before and after."""

    def take(q_next, option, terminated):
        module = make_module(num_options=2, option_entropy=0.0, termination_entropy=0.0, build=True)
        next_obs = torch.randn(len(option), 3, generator=torch.Generator().manual_seed(1))

        def step(name, network):
            with torch.no_grad():
                for p in network.parameters():
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)

        capture(module, monkeypatch, step)
        monkeypatch.setattr(module, "next_option_values", lambda x: q_next)
        before = module.policy.beta(next_obs).detach(), module.policy.option_probs(next_obs).detach()
        module.update_options(next_obs, option, terminated)
        after = module.policy.beta(next_obs).detach(), module.policy.option_probs(next_obs).detach()
        return before, after

    return take


def test_termination_falls_where_the_advantage_is_positive_and_rises_where_negative(option_step):
    q_next = torch.tensor([[1.0, 0.0]]).repeat(8, 1)
    alive = torch.zeros(8, dtype=torch.bool)
    (beta, _), (after, _) = option_step(q_next, torch.zeros(8, dtype=torch.int64), alive)
    assert (after[:, 0] < beta[:, 0]).all()
    (beta, _), (after, _) = option_step(q_next, torch.ones(8, dtype=torch.int64), alive)
    assert (after[:, 1] > beta[:, 1]).all()


def test_option_policy_climbs_to_the_better_option(option_step):
    q_next = torch.tensor([[1.0, 0.0]]).repeat(8, 1)
    (_, probs), (_, after) = option_step(q_next, torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.bool))
    assert (after[:, 0] > probs[:, 0]).all()


def test_nothing_is_learned_about_options_where_the_episode_ended(option_step):
    q_next = torch.tensor([[1.0, 0.0]]).repeat(8, 1)
    before, after = option_step(q_next, torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.bool))
    for left, right in zip(before, after):
        assert torch.equal(left, right)


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
    from claw_lightning.exploration import Exploration

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
