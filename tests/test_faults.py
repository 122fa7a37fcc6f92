"""The classical faults of option-critics, each shown by what a whole training step does to beta, pi or the critics.

scripts/mutation_check.py puts each fault into a copy of the package and expects a test here (or elsewhere) to fail.
"""

import copy

import numpy as np
import pytest
import torch

from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.normalizer import batch_moments
from claw_lightning.rollout.ring import FIRST, SWITCHED, TERMINATED, TRUNCATED, RowLayout
from tests.runs import SPEC, fit_fake, make_batch, make_module

#: The state left (first component -1) and the state arrived in (+1) are far apart.
LEFT, ARRIVED = [-1.0, 0.5, 0.5], [1.0, 0.5, 0.5]
SETTINGS = {
    "num_options": 2, "gamma": 0.99, "option_delay": 1, "policy_delay": 1, "normalize_observations": False,
    "option_entropy": 0.0, "termination_entropy": 0.0, "termination_lr": 1e-2, "option_policy_lr": 1e-2,
}  # fmt: skip


def one_way(option=0, flags=0, size=8):
    """Every row leads from LEFT to ARRIVED without a reward."""
    batch = make_batch(
        1, size, obs=np.full((1, size, 3), LEFT), reward=np.zeros((1, size)), option=np.full((1, size), option),
        flags=np.full((1, size), flags), previous_option=np.full((1, size), -1 if flags & FIRST else option),
    )  # fmt: skip
    batch.next_obs[:] = torch.tensor(ARRIVED)
    return batch


def learn(batch, values, **settings):
    """One training step where the target critics say ``values(obs)`` [B, 2].

    Returns the module and the policy from before.
    """
    module = make_module(build=True, **{**SETTINGS, **settings})
    before = copy.deepcopy(module.policy)
    critic = module.target_critic
    critic.forward_all = lambda obs, actions, *_: values(obs).expand(2, -1, -1)
    critic.forward = lambda obs, action, option, *_: values(obs).gather(1, option.unsqueeze(1)).squeeze(1).expand(2, -1)
    fit_fake(module, [batch])
    return module, before


def constant(*values):
    return lambda obs: torch.tensor([values]).expand(len(obs), -1).float()


def change(module, before, name, state):
    """By how much beta or pi of both options moved at a state."""
    x = torch.tensor([state])
    with torch.no_grad():
        return (getattr(module.policy, name)(x) - getattr(before, name)(x))[0].tolist()


# -- termination ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [0, 1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_termination_is_judged_at_the_state_arrived_in(option, sign):
    """The running option's advantage is of one sign at s and of the other at s': the one at s' counts."""

    def values(obs):
        mine = sign * obs[:, :1]
        return torch.cat((mine, -mine) if option == 0 else (-mine, mine), 1)

    module, before = learn(one_way(option), values)
    moved = change(module, before, "beta", ARRIVED)[option]
    assert moved * sign < -1e-4  # an option that is better than choosing afresh persists


def test_only_the_option_that_arrives_learns_to_end():
    module, before = learn(one_way(0), constant(1.0, -1.0))
    moved = change(module, before, "beta", ARRIVED)
    # Both heads share a hidden layer; the other option must not be told to end, as its own advantage would.
    assert moved[0] < 0.0 and moved[1] < abs(moved[0])


@pytest.mark.parametrize("form", ["full", "regularizer"])
def test_a_cost_alone_makes_options_persist(form):
    for cost in (0.0, 1.0):
        module, before = learn(one_way(), constant(3.0, 3.0), deliberation_cost=cost, deliberation_form=form)
        moved = change(module, before, "beta", ARRIVED)[0]
        assert moved == 0.0 if cost == 0.0 else moved < -1e-4


def test_a_cost_tips_a_small_disadvantage():
    for cost, sign in ((0.0, 1.0), (2.0, -1.0)):
        settings = {"deliberation_cost": cost}
        module, before = learn(one_way(), constant(0.0, 1.0), **settings)
        assert change(module, before, "beta", ARRIVED)[0] * sign > 1e-4


def test_an_end_of_the_task_teaches_nothing_about_options():
    module, before = learn(one_way(flags=TERMINATED), constant(1.0, -1.0))
    assert change(module, before, "beta", ARRIVED) == [0.0, 0.0]
    assert change(module, before, "option_probs", ARRIVED) == [0.0, 0.0]


def test_a_time_limit_teaches_as_any_step():
    module, before = learn(one_way(flags=TRUNCATED), constant(1.0, -1.0))
    assert change(module, before, "beta", ARRIVED)[0] < -1e-4


# -- the policy over options ------------------------------------------------------------------------------------------


def test_first_steps_choose_for_certain():
    """Rows that open an episode and end it: nothing is chosen at s', something was at s."""
    module, before = learn(one_way(flags=FIRST | SWITCHED | TERMINATED), constant(0.0, 1.0))
    assert change(module, before, "option_probs", LEFT)[1] > 1e-4


def test_other_steps_do_not_choose_where_they_began():
    module, before = learn(one_way(flags=TERMINATED), constant(0.0, 1.0))
    assert change(module, before, "option_probs", LEFT) == [0.0, 0.0]


# -- critics ----------------------------------------------------------------------------------------------------------


def root_target(module):
    """Size of the targets behind the critics' loss: two critics, whose own values are near 0."""
    return (module.latest_metrics["loss/critic"] / 2) ** 0.5


@pytest.mark.parametrize("arrival", ["expected", "sampled"])
def test_the_cost_is_inside_the_target_once_and_with_its_sign(arrival):
    settings = {"initial_termination": 0.9999, "arrival": arrival, "deliberation_form": "full"}
    module, _ = learn(one_way(), constant(100.0, 100.0), deliberation_cost=50.0, **settings)
    assert root_target(module) == pytest.approx(0.99 * 50.0, rel=0.02)


@pytest.mark.parametrize("arrival", ["expected", "sampled"])
@pytest.mark.parametrize("flags, expected", [(0, 99.0), (TRUNCATED, 99.0), (TERMINATED, 0.0)])
def test_only_an_end_of_the_task_ends_the_target(flags, expected, arrival):
    module, _ = learn(one_way(flags=flags), constant(100.0, 100.0), arrival=arrival)
    assert root_target(module) == pytest.approx(expected, rel=0.02, abs=1.0)


def test_an_option_that_persists_is_worth_its_own_value():
    module, _ = learn(one_way(1), constant(0.0, 100.0), initial_termination=1e-4)
    assert root_target(module) == pytest.approx(99.0, rel=0.02)


# -- returns of several steps -----------------------------------------------------------------------------------------


def two_steps(options, flags=(0, 0), rewards=(0.0, 0.0), size=8):
    """Segments of two rows, all alike: options, flags and rewards of both."""
    layout = RowLayout(SPEC.obs_size, SPEC.action_size)
    rows = np.zeros((1, size, 2, layout.words), np.float32)
    for name, value in (("option", options), ("flags", flags), ("reward", rewards)):
        layout.view(rows, name)[:] = value
    layout.view(rows, "previous_option")[:] = (options[0], options[0])
    next_obs = torch.tensor(ARRIVED).expand(1, size, 2, -1).clone()
    moments = batch_moments(rows[..., : SPEC.obs_size].reshape(-1, SPEC.obs_size))
    valid = torch.ones(1, size, 2, dtype=torch.bool)
    return ReplayBatch(torch.from_numpy(rows), next_obs, layout, moments, 100, valid)


def test_two_steps_bootstrap_with_the_option_executed_last():
    settings = {"n_step": 2, "n_step_form": "executed", "initial_termination": 1e-4}
    module, _ = learn(two_steps((0, 1), (0, SWITCHED)), constant(0.0, 100.0), **settings)
    assert root_target(module) == pytest.approx(0.99**2 * 100.0, rel=0.02)


def test_a_switch_on_the_path_pays_its_cost():
    settings = {"n_step": 2, "n_step_form": "executed", "initial_termination": 1e-4, "deliberation_cost": 50.0}
    module, _ = learn(two_steps((0, 1), (0, SWITCHED)), constant(0.0, 100.0), **settings)
    assert root_target(module) == pytest.approx(0.99**2 * 100.0 - 0.99 * 50.0, rel=0.02)


def test_two_steps_cut_at_a_switch_bootstrap_with_choosing_afresh():
    settings = {"n_step": 2, "n_step_form": "switch", "initial_termination": 1e-4}
    # The second step pays 1,000 and belongs to another option: nothing of it may be seen.
    batch = two_steps((0, 1), (0, SWITCHED), (0.0, 1000.0))
    module, before = learn(batch, constant(0.0, 100.0), **settings)
    with torch.no_grad():
        value = float(before.option_probs(torch.tensor([ARRIVED]))[0, 1]) * 100.0
    assert root_target(module) == pytest.approx(0.99 * value, rel=0.02)
