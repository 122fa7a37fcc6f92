"""The policy-gradient variant: estimators, clipping, and the choice of options against exact derivatives."""

import gymnasium
import numpy as np
import pytest
import torch

from claw_lightning import returns
from claw_lightning.settings import PolicyGradient
from claw_lightning.updates import policy_gradient as update
from claw_lightning.updates.rows import executed_probs
from tests.mdp import random_mdp, solve
from tests.runs import fit_lockstep
from tests.test_losses import true_beta_gradient, true_option_logit_gradient
from tests.updates.support import capture, constant, make_discrete, make_rows

ADVANTAGES = ["one_step", "n_step", "gae"]


class GuessTask(gymnasium.Env):
    """Four steps; the best action is the number of the observation's largest entry."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left, self._obs = 4, self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self._obs, {}

    def step(self, action):
        reward, self._left = float(int(action) == int(self._obs.argmax())), self._left - 1
        self._obs = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return self._obs, reward, self._left == 0, False, {}


if "ClawGuess-v0" not in gymnasium.registry:
    gymnasium.register("ClawGuess-v0", entry_point=GuessTask)


def make(**settings):
    names = ("advantage", "length", "trace", "ratio_clip", "surrogate_clip", "options", "entropy")
    group = {name: settings.pop(name) for name in names if name in settings}
    return make_discrete(policy_gradient=PolicyGradient(**{"length": 4, **group}), **settings)


def segments(**fields):
    valid = torch.ones(6, 4, dtype=torch.bool)
    valid[2, 3:] = valid[3, 1:] = False
    terminated = torch.zeros(6, 4, dtype=torch.bool)
    terminated[0, 3] = terminated[2, 2] = True
    return make_rows(6, length=4, num_actions=3, **{"valid": valid, "terminated": terminated, **fields})


def on_policy(module, rows):
    """Stored log-probabilities of the module's own policy."""
    raw = module.policy.actor(rows.obs.flatten(0, 1), rows.option.flatten()).view(*rows.option.shape, 3)
    rows.log_prob_action = raw.log_softmax(-1).gather(-1, rows.action.long())[..., 0].detach()
    rows.log_prob_option = executed_probs(module, rows).gather(-1, rows.option[..., None])[..., 0].log()
    return rows


@pytest.mark.parametrize("options", ["sampled", "all"])
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_each_variant_runs_in_lock_step(tmp_path, advantage, options):
    trainer, module, _ = fit_lockstep(
        tmp_path,
        model={"num_options": 2, "actor": "categorical",
               "policy_gradient": PolicyGradient(advantage, length=3, options=options)},
        data={"task": "ClawGuess-v0", "max_env_steps": 120, "batch_size": 8, "warmup_steps": 80, "capacity": 400},
        limit_train_batches=3, limit_val_batches=0,
    )  # fmt: skip
    assert module.updates > 0
    assert trainer.global_step * 2 == module.updates
    assert all(torch.isfinite(p).all() for p in module.parameters())


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("clip", [1.0, 5.0])
def test_advantages_are_those_of_returns_by_hand(monkeypatch, advantage, clip):
    module = make(advantage=advantage, trace=0.8, ratio_clip=clip, gamma=0.9, deliberation_cost=0.2)
    monkeypatch.setattr(module.policy, "beta", constant([0.3, 0.6]))
    rows = segments(log_prob_action=-2.5 + torch.rand(6, 4) * 3, log_prob_option=-torch.rand(6, 4) * 2)
    values = update.option_values(module, rows)
    _, log_ratio = update.action_ratios(module, rows)
    got, rho = update.advantages(module, rows, values, log_ratio)

    index = rows.option.unsqueeze(-1)
    raw = module.policy.actor.forward_all(rows.obs).log_softmax(-1)
    own = raw.gather(2, index.unsqueeze(-1).expand(-1, -1, 1, 3))[:, :, 0].gather(2, rows.action.long())[..., 0]
    ratio = (own - rows.log_prob_action).exp().detach()
    joint = ratio * executed_probs(module, rows).gather(2, index)[..., 0] / rows.log_prob_option.exp()
    assert (ratio > 1).any() and (ratio < 1).any()
    torch.testing.assert_close(rho, ratio.clamp_max(clip))
    decay = {"one_step": 0.0, "n_step": 1.0, "gae": 0.8}[advantage]
    q = module.target_option_value(rows.obs).gather(2, index)[..., 0].detach()
    after = module.target_option_value(rows.next_obs).detach()
    value = (module.policy.option_probs(rows.next_obs) * after).sum(-1, keepdim=True)
    beta = torch.tensor([0.3, 0.6])
    arrival = ((1 - beta) * after + beta * (value - 0.2)).gather(2, index)[..., 0].detach()
    want = returns.generalized_advantage(
        rows.reward, rows.terminated, rows.valid, q, arrival, decay * joint.clamp_max(clip), 0.9
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_every_option_has_an_advantage_of_its_own():
    module = make(options="all", gamma=0.9)
    rows = segments()
    values = update.option_values(module, rows)
    _, log_ratio = update.action_ratios(module, rows)
    executed, executed_rho = update.advantages(module, rows, values, log_ratio)
    got, rho = update.spread_over_options(module, rows, values, log_ratio, executed, executed_rho)
    q, arrival = values
    going_on = (~rows.terminated).float().unsqueeze(-1)
    one_step = rows.reward.unsqueeze(-1) + 0.9 * going_on * arrival - q
    mine = torch.nn.functional.one_hot(rows.option, 2).bool()
    torch.testing.assert_close(got[mine], executed.flatten())
    torch.testing.assert_close(got[~mine], one_step[~mine])
    torch.testing.assert_close(rho[~mine], log_ratio.detach().exp().clamp_max(1.0)[~mine])
    torch.testing.assert_close(
        update.learning_weight(module, rows), executed_probs(module, rows) * rows.valid.unsqueeze(-1)
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("options", ["sampled", "all"])
def test_the_action_becomes_likelier_where_its_advantage_is_positive(monkeypatch, sign, options):
    module = make(options=options, entropy=0.0)
    rows = on_policy(module, segments(valid=torch.ones(6, 4, dtype=torch.bool)))
    raw, log_ratio = update.action_ratios(module, rows)
    raw.retain_grad()
    advantage = torch.full_like(log_ratio, sign).detach()
    weight = executed_probs(module, rows) if options == "all" else torch.ones(6, 4)
    capture(module, monkeypatch, lambda *_: None)
    update.update_actor(module, rows, raw, log_ratio, advantage, weight)
    action = rows.action.long() if options == "sampled" else rows.action.long().unsqueeze(2).expand(-1, -1, 2, -1)
    pushed = -raw.grad.gather(-1, action)[..., 0] * sign
    if options == "sampled":
        assert (pushed > 0).all()
    else:  # of options that were not executed the ratio may already be clipped
        mine = torch.nn.functional.one_hot(rows.option, 2).bool()
        assert (pushed[mine & (weight > 1e-6)] > 0).all() and (pushed >= -1e-9).all()


def test_ratios_beyond_the_clip_teach_nothing(monkeypatch):
    module = make(entropy=0.0, surrogate_clip=0.2)
    rows = on_policy(module, segments(valid=torch.ones(6, 4, dtype=torch.bool)))
    for shift, advantage, moves in ((-1.0, 1.0, False), (-1.0, -1.0, True), (1.0, 1.0, True), (1.0, -1.0, False)):
        on_policy(module, rows).log_prob_action += shift  # ratio e or 1/e
        raw, log_ratio = update.action_ratios(module, rows)
        raw.retain_grad()
        capture(module, monkeypatch, lambda *_: None)
        update.update_actor(module, rows, raw, log_ratio, torch.full_like(log_ratio, advantage), torch.ones(6, 4))
        assert bool(raw.grad.abs().max() > 1e-6) == moves


@pytest.mark.parametrize("rho", [1.0, 0.25])
def test_option_values_learn_towards_the_corrected_advantage(monkeypatch, rho):
    module, rows = make(), segments()
    q, advantage = torch.randn(6, 4, 2), torch.randn(6, 4)
    monkeypatch.setattr(module.policy, "option_values", lambda obs: q.clone().requires_grad_())
    found = capture(module, monkeypatch)
    valid = rows.valid.float()
    update.update_option_values(module, rows, (q, q), advantage, torch.full((6, 4), rho), valid, counted=True)
    want = (valid * (rho * advantage).square()).sum() / valid.sum()
    assert float(found["option_value"]) == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("cost", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_executed_choices_descend_along_the_exact_gradient(monkeypatch, seed, cost):
    """Every (s, o_prev) of arrivals, every first step, and every option chosen there, repeated by its probability.

    With ratio 1 and exact values the surrogate's gradient is that of J, which holds choices and ends in one.
    """
    mdp = random_mdp(seed, num_states=3, num_options=2, num_actions=2).but(cost=cost)
    mdp = mdp.but(start=torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    solution = solve(mdp)
    reselect = torch.diag_embed(1 - mdp.beta) + mdp.beta.unsqueeze(-1) * mdp.option_probs.unsqueeze(-2)
    found = [(s, p, o, float(solution.arrived[s, p] * reselect[s, p, o]))
             for s in range(2) for p in range(2) for o in range(2)]  # fmt: skip
    found += [(s, -1, o, float(mdp.start[s] * mdp.option_probs[s, o])) for s in range(2) for o in range(2)]
    weight = torch.tensor([w for *_, w in found])
    state, previous, option = (torch.tensor([row[i] for row in found]) for i in range(3))

    module = make(normalize_advantages=False, option_entropy=0.0, termination_entropy=0.0)
    logits = mdp.option_probs.log().float().requires_grad_()
    beta = mdp.beta.float().requires_grad_()
    index = state.unsqueeze(1)
    monkeypatch.setattr(module.policy, "option_probs", lambda obs: logits.softmax(-1)[index])
    monkeypatch.setattr(module.policy, "beta", lambda obs: beta[index])
    module.policy.switch_cost.fill_(cost)
    # Rows enter with their weight in place of a number of repetitions.
    monkeypatch.setattr(update, "option_distillation_losses", lambda *_: (torch.tensor(0.0), torch.tensor(0.0)))
    n = len(found)
    rows = make_rows(n, length=1, num_actions=3, previous=previous[:, None], option=option[:, None],
                     first=previous[:, None] < 0, valid=torch.ones(n, 1, dtype=torch.bool))  # fmt: skip
    rows.log_prob_option = executed_probs(module, rows).gather(-1, rows.option[..., None])[..., 0].log()
    mean = update.losses.weighted_mean

    def weighted_mean(value, w):
        return mean(value, w * weight[:, None]) if value.shape == (n, 1) else mean(value, w)

    gain = {}

    def surrogate(log_ratio, advantages, clip, w):
        gain["scaled"] = advantages
        return -weighted_mean(log_ratio.exp() * advantages, w)

    monkeypatch.setattr(update.losses, "weighted_mean", weighted_mean)
    monkeypatch.setattr(update.losses, "clipped_surrogate_loss", surrogate)
    grads = {}

    def descend_together(networks, loss, counted=False):
        grads["option"], grads["beta"] = torch.autograd.grad(loss, (logits, beta))

    monkeypatch.setattr(module, "descend_together", descend_together)
    q = solution.q.float()[index]
    update.update_executed_choices(module, rows, (q, q), torch.zeros(n, 1))
    # The scale of the gains, from a row that is a first step: gain = Q - V.
    row = n - 1
    raw = float(solution.q[state[row], option[row]] - solution.value[state[row]])
    factor = float(weight.sum()) * raw / float(gain["scaled"][row, 0])
    torch.testing.assert_close(-grads["beta"].double() * factor, true_beta_gradient(mdp), rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(
        -grads["option"].double() * factor, true_option_logit_gradient(mdp), rtol=2e-4, atol=2e-5
    )
