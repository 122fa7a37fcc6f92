"""OptionAgent: the option machine on policies whose probabilities are set by hand, noise, evaluation, seeds."""

import numpy as np
import pytest
import torch

from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.distributions import squashed_gaussian_log_prob
from tests.builders import policy_settings

LANES = 6
OBS = np.random.default_rng(0).standard_normal((LANES, 3)).astype(np.float32)
FIRST, LATER = np.ones(LANES, bool), np.zeros(LANES, bool)
PROBS = [0.2, 0.5, 0.3]


def agent_of(beta=None, probs=PROBS, policy=None, lanes=LANES, seed=0, exploration=(1.0, 0.0), **settings):
    """Agent with fixed option probabilities and terminations, [K] or [N, K]; 3 options unless told otherwise."""
    torch.manual_seed(0)
    agent = OptionAgent(policy_settings(**{"num_options": 3, **(policy or {})}), lanes, seed, **settings)
    agent.policy.exploration.copy_(torch.tensor(exploration))
    if beta is not None:

        def fixed(values):
            return np.broadcast_to(np.array(values, np.float32), (lanes, np.shape(values)[-1]))

        agent.forward.options = lambda: (fixed(probs), fixed(beta))
    return agent


def play(agent, num_steps, obs=OBS):
    """Decisions of one episode that starts in all lanes."""
    return [agent.act(obs, LATER if t else FIRST) for t in range(num_steps)]


def test_first_steps_select_and_have_no_previous_option():
    agent = agent_of(beta=[0.0] * 3)
    for decision in (agent.act(OBS, FIRST), agent.act(OBS, FIRST)):
        assert decision.switched.all() and not decision.by_cap.any()
        assert (decision.previous_option == -1).all() and (decision.age == 0).all()
        np.testing.assert_allclose(decision.log_prob_option, np.log(np.array(PROBS)[decision.option]), rtol=1e-6)


def test_beta_0_keeps_the_option():
    decisions = play(agent_of(beta=[0.0] * 3), 8)
    for t, decision in enumerate(decisions[1:], 1):
        np.testing.assert_array_equal(decision.option, decisions[0].option)
        np.testing.assert_array_equal(decision.previous_option, decisions[0].option)
        assert not decision.switched.any() and (decision.age == t).all()
        assert (decision.log_prob_option == 0).all()  # certain


def test_beta_1_selects_at_every_step():
    decisions = play(agent_of(beta=[1.0] * 3), 8)
    for before, decision in zip(decisions, decisions[1:]):
        assert decision.switched.all() and (decision.age == 0).all() and not decision.by_cap.any()
        np.testing.assert_array_equal(decision.previous_option, before.option)
        np.testing.assert_allclose(decision.log_prob_option, np.log(np.array(PROBS)[decision.option]), rtol=1e-6)


def test_only_the_running_options_beta_counts():
    agent = agent_of(beta=[0.0, 1.0, 0.0])
    before = agent.act(OBS, FIRST)
    for _ in range(20):
        decision = agent.act(OBS, LATER)
        np.testing.assert_array_equal(decision.switched, before.option == 1)
        before = decision


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_the_cap_ends_an_option_and_says_so(cap):
    decisions = play(agent_of(beta=[0.0] * 3, max_option_duration=cap), 10)
    for t, decision in enumerate(decisions):
        assert (decision.age == t % cap).all()
        assert (decision.switched == (t % cap == 0)).all()
        assert (decision.by_cap == (t > 0 and t % cap == 0)).all()


def test_an_end_of_its_own_is_not_one_by_the_cap():
    for decision in play(agent_of(beta=[1.0] * 3, max_option_duration=1), 5):
        assert decision.switched.all() and not decision.by_cap.any()


def test_log_prob_does_not_know_of_the_cap():
    agent = agent_of(beta=[0.25] * 3, max_option_duration=1)
    before, probs = agent.act(OBS, FIRST), np.array(PROBS)
    for _ in range(20):
        decision = agent.act(OBS, LATER)
        stay = decision.option == before.option
        expected = np.where(stay, 0.75, 0.0) + 0.25 * probs[decision.option]  # p_hat = (1 - beta) 1 + beta pi
        np.testing.assert_allclose(decision.log_prob_option, np.log(expected), rtol=1e-5)
        before = decision


def test_impossible_arrival_has_a_finite_log_prob():
    agent = agent_of(beta=[0.0] * 3, max_option_duration=1)
    decisions = play(agent, 20)
    assert np.isfinite(np.stack([d.log_prob_option for d in decisions])).all()
    assert min(d.log_prob_option.min() for d in decisions) < -80


def test_minimum_duration():
    decisions = play(agent_of(beta=[1.0] * 3, min_option_duration=3), 10)
    for t, decision in enumerate(decisions):
        assert (decision.switched == (t % 3 == 0)).all()


def test_a_new_episode_ends_any_option():
    agent = agent_of(beta=[0.0] * 3, min_option_duration=5, max_option_duration=9)
    play(agent, 2)
    first = np.arange(LANES) % 2 == 0
    decision = agent.act(OBS, first)
    np.testing.assert_array_equal(decision.switched, first)
    np.testing.assert_array_equal(decision.previous_option == -1, first)
    np.testing.assert_array_equal(decision.age, np.where(first, 0, 2))
    assert not decision.by_cap.any()


def test_frequencies_of_ends_and_selections():
    lanes = 20_000
    agent, obs = agent_of(beta=[0.3] * 3, lanes=lanes), np.zeros((lanes, 3), np.float32)
    agent.act(obs, np.ones(lanes, bool))
    decision = agent.act(obs, np.zeros(lanes, bool))
    assert decision.switched.mean() == pytest.approx(0.3, abs=0.015)
    share = np.bincount(decision.option[decision.switched], minlength=3) / decision.switched.sum()
    np.testing.assert_allclose(share, PROBS, atol=0.025)


def test_certain_options_are_selected():
    for option in range(3):
        agent = agent_of(beta=[1.0] * 3, probs=np.eye(3)[option].tolist())
        assert all((decision.option == option).all() for decision in play(agent, 20))


def test_one_option():
    decisions = play(agent_of(policy={"num_options": 1}), 4)
    for t, decision in enumerate(decisions):
        assert (decision.option == 0).all() and (decision.log_prob_option == 0).all()
        assert (decision.switched == (t == 0)).all() and not decision.by_cap.any()
        assert (decision.previous_option == (-1 if t == 0 else 0)).all()
        assert (decision.age == t).all()


@pytest.mark.parametrize("actor", ["deterministic", "gaussian"])
@pytest.mark.parametrize("num_options", [1, 3])
def test_types_and_ownership(num_options, actor):
    agent = agent_of(policy={"num_options": num_options, "actor": actor}, exploration=(1.0, 0.3))
    kept = agent.act(OBS, FIRST)
    copies = [array.copy() for array in kept]
    play(agent, 3)
    types = [np.float32, np.int32, np.int32, np.int32, np.bool_, np.bool_, np.float32, np.float32]
    for array, copy, dtype in zip(kept, copies, types):
        np.testing.assert_array_equal(array, copy)
        assert array.dtype == dtype and len(array) == LANES


# -- actions ------------------------------------------------------------------------------------------------------


def noisy(scale, multiplier=1.0, kind="gaussian", lanes=4000):
    """Deviation of noisy actions from the policy's own."""
    exploration = {"kind": kind, "scale_min": scale, "scale_max": scale}
    agent = OptionAgent(policy_settings(), lanes, 0, exploration=exploration)
    agent.policy.exploration.copy_(torch.tensor([multiplier, 0.0]))
    obs = np.zeros((lanes, 3), np.float32)
    mean = agent.policy.actor.mean_action(agent.policy.actor(torch.from_numpy(obs), torch.zeros(lanes).long()))
    return agent.act(obs, np.ones(lanes, bool)).action - mean.detach().numpy()


@pytest.mark.parametrize("kind", ["gaussian", "ornstein_uhlenbeck"])
@pytest.mark.parametrize("scale, multiplier", [(0.1, 1.0), (0.2, 0.5), (0.1, 0.0)])
def test_noise_has_its_scale(kind, scale, multiplier):
    assert noisy(scale, multiplier, kind).std() == pytest.approx(scale * multiplier, rel=0.05)


def test_noise_is_spread_over_lanes_of_all_workers():
    exploration = {"kind": "gaussian", "scale_min": 0.1, "scale_max": 0.7}
    scales = [OptionAgent(policy_settings(), 2, 0, exploration=exploration, worker=w, num_workers=2).noise.scales
              for w in range(2)]  # fmt: skip
    np.testing.assert_allclose(np.sort(np.ravel(scales)), [0.1, 0.3, 0.5, 0.7], rtol=1e-6)


def test_actions_stay_in_range_under_any_noise():
    exploration = {"kind": "gaussian", "scale_min": 5.0, "scale_max": 5.0}
    agent = OptionAgent(policy_settings(), LANES, 0, exploration=exploration)
    agent.policy.exploration.copy_(torch.tensor([1.0, 0.0]))
    actions = np.stack([decision.action for decision in play(agent, 50)])
    assert np.abs(actions).max() == 1.0


def test_uniform_probability_1():
    lanes = 4000
    agent = agent_of(policy={"num_options": 1}, lanes=lanes, exploration=(1.0, 1.0))
    action = agent.act(np.zeros((lanes, 3), np.float32), np.ones(lanes, bool)).action
    counts, _ = np.histogram(action, bins=10, range=(-1, 1))
    assert counts.sum() == action.size
    np.testing.assert_allclose(counts / action.size, 0.1, atol=0.015)


def test_uniform_probability_is_per_lane():
    lanes = 4000
    agent = agent_of(policy={"num_options": 1}, lanes=lanes, exploration=(1.0, 0.25))
    action = agent.act(np.zeros((lanes, 3), np.float32), np.ones(lanes, bool)).action
    policy_action = np.median(action, axis=0)
    differs = np.abs(action - policy_action) > 1e-6
    np.testing.assert_array_equal(differs[:, 0], differs[:, 1])
    assert differs[:, 0].mean() == pytest.approx(0.25, abs=0.03)


def test_gaussian_actions_and_their_log_prob():
    agent = agent_of(policy={"actor": "gaussian", "num_options": 1})
    decision = agent.act(OBS, FIRST)
    mean, std = agent.policy.actor.gaussian(agent.policy.actor(torch.from_numpy(OBS), torch.zeros(LANES).long()))
    pre_tanh = torch.atanh(torch.from_numpy(decision.action).double())
    expected = squashed_gaussian_log_prob(pre_tanh, mean.double(), std.double()).detach().numpy()
    np.testing.assert_allclose(decision.log_prob_action, expected, rtol=1e-3, atol=1e-3)


def test_observations_that_are_not_finite_do_not_reach_the_networks():
    obs = OBS.copy()
    obs[0], obs[1, 1] = np.nan, np.inf
    for decision in play(agent_of(), 3, obs):
        assert np.isfinite(decision.action).all() and np.isfinite(decision.log_prob_option).all()


@pytest.mark.parametrize("uniform", [0.0, 0.3, 1.0])
def test_categorical_actions_are_whole_numbers_with_their_log_prob(uniform):
    lanes = 6000
    policy = {"actor": "categorical", "action_size": 4, "num_options": 1}
    agent = agent_of(policy=policy, lanes=lanes, exploration=(1.0, uniform))
    with torch.no_grad():
        agent.policy.actor.body[-1].bias.copy_(torch.tensor([2.0, 0.0, -1.0, -6.0]))
    obs = np.zeros((lanes, 3), np.float32)
    decision = agent.act(obs, np.ones(lanes, bool))
    assert agent.noise is None and decision.action.shape == (lanes, 1)
    chosen = decision.action[:, 0].astype(int)
    np.testing.assert_array_equal(chosen, decision.action[:, 0])
    raw = agent.policy.actor(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))[0]
    mixture = (1 - uniform) * raw.softmax(0).detach().numpy() + uniform / 4
    np.testing.assert_allclose(decision.log_prob_action, np.log(mixture[chosen]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.bincount(chosen, minlength=4) / lanes, mixture, atol=0.03)


def test_the_density_of_uniform_exploration_is_a_mixture():
    agent = agent_of(policy={"actor": "gaussian", "num_options": 1}, exploration=(1.0, 0.25), lanes=200)
    obs = np.random.default_rng(1).standard_normal((200, 3)).astype(np.float32)
    decision = agent.act(obs, np.ones(200, bool))
    raw = agent.policy.actor(torch.from_numpy(obs), torch.zeros(200, dtype=torch.int64))
    own = agent.policy.actor.log_prob(raw, torch.from_numpy(decision.action)).detach().double().exp().numpy()
    np.testing.assert_allclose(decision.log_prob_action, np.log(0.75 * own + 0.25 * 0.25), rtol=1e-3, atol=1e-3)
    assert decision.log_prob_action.min() >= np.log(0.25 * 0.25) - 1e-4  # never below the uniform part


# -- interruption and the student ---------------------------------------------------------------------------------


def interrupting(q, cost=0.0, margin=0.1, evaluate=True, **settings):
    agent = agent_of(beta=[0.0] * 3, evaluate=evaluate, interruption=margin, **settings)
    agent.policy.option_values = lambda obs: torch.tensor(q).expand(len(obs), -1)
    agent.policy.switch_cost.fill_(cost)
    return agent


@pytest.mark.parametrize("cost, margin", [(0.0, 0.1), (0.3, 0.1), (0.0, 0.4)])
@pytest.mark.parametrize("over, ends", [(0.01, True), (-0.01, False)])
def test_an_option_is_interrupted_below_v_by_more_than_cost_and_margin(cost, margin, over, ends):
    # V = 0.5 q_1 with pi = (0.2, 0.5, 0.3) and q_0 = q_2 = 0; the option that runs is 2.
    best = 2 * (cost + margin + over)
    agent = interrupting([0.0, best, 0.0], cost, margin)
    agent._option[:] = 2
    decision = agent.act(OBS, LATER)
    assert (decision.switched == ends).all()
    assert (decision.option == (1 if ends else 2)).all()
    agent._option[:] = 1  # the better one is left alone
    assert not agent.act(OBS, LATER).switched.any()


def test_interruption_is_for_evaluation_alone_and_respects_the_minimum_duration():
    agent = interrupting([0.0, 9.0, 0.0], evaluate=False)
    agent._option[:] = 2
    assert not agent.act(OBS, LATER).switched.any()
    agent = interrupting([0.0, 9.0, 0.0], min_option_duration=3)
    agent.act(OBS, FIRST)
    agent._option[:] = 2
    assert [bool(agent.act(OBS, LATER).switched.any()) for _ in range(3)] == [False, False, True]


def test_the_student_acts_in_place_of_the_options():
    agent = agent_of(policy={"student_hidden_sizes": (8,)}, evaluate=True)
    student = agent.policy.student
    want = torch.tanh(student(torch.from_numpy(OBS), torch.zeros(LANES, dtype=torch.int64))).detach().numpy()
    by_options = agent.act(OBS, FIRST)
    agent.use_student = True
    for t in range(3):
        decision = agent.act(OBS, LATER if t else FIRST)
        np.testing.assert_allclose(decision.action, want, rtol=1e-6)
        assert (decision.switched == (t == 0)).all()
    assert not np.allclose(by_options.action, want)
    agent.use_student = False
    np.testing.assert_array_equal(agent.act(OBS, FIRST).action, by_options.action)


# -- evaluation, parameters, seeds --------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ["deterministic", "gaussian"])
def test_greedy_evaluation_is_deterministic(actor):
    runs = []
    for seed in (0, 1):
        agent = agent_of(policy={"actor": actor}, seed=seed, exploration=(1.0, 1.0), evaluate=True)
        assert agent.noise is None
        runs.append(play(agent, 5))
    for one, other in zip(*runs):
        for a, b in zip(one, other):
            np.testing.assert_array_equal(a, b)
    raw = agent.policy.actor(torch.from_numpy(OBS), torch.from_numpy(runs[1][-1].option).long())
    np.testing.assert_allclose(runs[1][-1].action, torch.tanh(raw[:, :2]).detach().numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("beta, switches", [(0.51, True), (0.49, False)])
def test_greedy_evaluation_ends_above_a_half_and_takes_the_most_probable(beta, switches):
    decisions = play(agent_of(beta=[beta] * 3, evaluate=True), 5)
    assert all((decision.option == 1).all() for decision in decisions)
    assert all((decision.switched == switches).all() for decision in decisions[1:])


def test_evaluation_may_draw_its_options():
    agent = agent_of(beta=[0.49] * 3, evaluate=True, greedy_options=False)
    decisions = play(agent, 30)
    assert {int(o) for d in decisions for o in d.option} == {0, 1, 2}
    assert any(d.switched.any() for d in decisions[1:])


@pytest.mark.parametrize("actor", ["deterministic", "gaussian"])
def test_equal_seeds_act_equally(actor):
    noise = {"kind": "gaussian", "scale_min": 0.1, "scale_max": 0.3}

    def run(seed):
        torch.manual_seed(0)
        agent = OptionAgent(policy_settings(num_options=3, actor=actor), LANES, seed, exploration=noise)
        agent.policy.exploration.copy_(torch.tensor([1.0, 0.2]))
        return np.concatenate([np.column_stack(decision) for decision in play(agent, 10)])

    torch.manual_seed(5)
    one = run(3)
    torch.manual_seed(6)  # nothing depends on torch's global generator
    np.testing.assert_array_equal(one, run(3))
    assert not np.array_equal(one, run(4))


def test_load_adopts_parameters_and_version():
    source, agent = agent_of(policy={"num_options": 1}), agent_of(policy={"num_options": 1})
    with torch.no_grad():
        for parameter in source.policy.parameters():
            parameter.add_(0.1)
    agent.load(source.policy.flatten(), 42)
    assert agent.version == 42
    np.testing.assert_array_equal(agent.act(OBS, FIRST).action, source.act(OBS, FIRST).action)


@pytest.mark.parametrize("share, mean", [(0.2, 8.0), (0.5, 3.0), (1.0, 5.0)])
def test_uniform_actions_are_kept_for_a_while_and_take_their_share(share, mean):
    lanes, steps = 200, 400
    agent = agent_of(policy={"num_options": 1}, lanes=lanes, exploration=(1.0, share))
    agent._uniform_steps = mean
    obs, first = np.zeros((lanes, 3), np.float32), np.ones(lanes, bool)
    own = agent_of(policy={"num_options": 1}, lanes=1).act(obs[:1], first[:1]).action
    taken = []
    for _ in range(steps):
        taken.append(agent.act(obs, first).action)
        first = np.zeros(lanes, bool)
    taken = np.array(taken)
    uniform = ~np.isclose(taken, own).all(-1)
    assert uniform.mean() == pytest.approx(share, abs=0.03)
    changes = uniform[1:] & uniform[:-1] & (taken[1:] != taken[:-1]).any(-1)
    begins = (uniform[1:] & ~uniform[:-1]).sum() + changes.sum()
    assert uniform[1:].sum() / begins == pytest.approx(mean, rel=0.1)
    assert np.abs(taken[uniform].mean(0)).max() < 0.1 and taken[uniform].std() == pytest.approx(3**-0.5, rel=0.1)


@pytest.mark.parametrize("mean", [1.0, 8.0])
def test_uniform_actions_replace_a_share_of_the_components(mean):
    lanes, size, share = 20_000, 10, 0.5
    agent = agent_of(policy={"num_options": 1, "action_size": size}, lanes=lanes, exploration=(1.0, share))
    agent._uniform_steps, agent._uniform_components, agent._held_action = mean, 0.2, np.zeros((lanes, size))
    obs, first = np.zeros((lanes, 3), np.float32), np.ones(lanes, bool)
    own = agent_of(policy={"num_options": 1, "action_size": size}, lanes=1).act(obs[:1], first[:1]).action
    for _ in range(1 if mean == 1.0 else 60):
        taken = agent.act(obs, first).action
        first = np.zeros(lanes, bool)
    replaced = ~np.isclose(taken, own)
    assert replaced.any(1).mean() == pytest.approx(share, abs=0.02)
    # One component is always replaced, each other one with probability 0.2.
    assert replaced[replaced.any(1)].sum(1).mean() == pytest.approx(1 + 0.2 * (size - 1), abs=0.05)
    assert replaced[replaced.any(1)].mean(0) == pytest.approx(np.full(size, 0.28), abs=0.03)


def test_uniform_actions_from_beyond_the_limits_lie_at_them():
    lanes = 20_000
    agent = agent_of(policy={"num_options": 1}, lanes=lanes, exploration=(1.0, 1.0))
    agent._uniform_scale = 1.5
    taken = agent.act(np.zeros((lanes, 3), np.float32), np.ones(lanes, bool)).action
    at_limit = np.abs(taken) == 1.0
    assert at_limit.mean() == pytest.approx(1 / 3, abs=0.01) and (taken == 1.0).mean() == pytest.approx(1 / 6, abs=0.01)
    assert taken[~at_limit].std() == pytest.approx(3**-0.5, rel=0.02)


def test_the_warm_up_replaces_all_components():
    agent = agent_of(policy={"num_options": 1}, lanes=300, exploration=(1.0, 1.0))
    agent._uniform_steps, agent._uniform_components = 8.0, 0.2
    own = agent_of(policy={"num_options": 1}, lanes=300).act(np.zeros((300, 3), np.float32), np.ones(300, bool)).action
    taken = agent.act(np.zeros((300, 3), np.float32), np.ones(300, bool)).action
    assert not np.isclose(taken, own).any()


def test_a_kept_action_ends_with_its_episode():
    lanes = 300
    agent = agent_of(lanes=lanes, exploration=(1.0, 0.5))
    obs = np.zeros((lanes, 3), np.float32)
    agent._uniform_steps, agent._held[:] = 1e9, True
    agent._held_action[:] = 0.123
    assert np.isclose(agent.act(obs, np.zeros(lanes, bool)).action, 0.123).all()
    assert not np.isclose(agent.act(obs, np.ones(lanes, bool)).action, 0.123).all(-1).any()


def test_options_may_be_drawn_in_evaluation_as_in_training():
    agent = agent_of(beta=[0.4] * 3, evaluate=True)
    greedy = play(agent, 30)
    assert not any(decision.switched.any() for decision in greedy[1:])
    agent.draws_options = True
    drawn = play(agent, 300)
    share = np.mean([decision.switched for decision in drawn[1:]])
    assert 0.35 < share < 0.45
    counts = np.bincount(np.concatenate([d.option[d.switched] for d in drawn]), minlength=3)
    np.testing.assert_allclose(counts / counts.sum(), PROBS, atol=0.08)


def test_parameters_take_effect_that_are_loaded_in_inference_mode():
    """As lock-step evaluations do it, whose agent is built and loaded within Lightning's inference mode."""
    with torch.inference_mode():
        agent = agent_of(evaluate=True)
        before = agent.act(OBS, FIRST).action
        agent.load(agent.policy.flatten() + 0.3, 1)
        after = agent.act(OBS, FIRST)
    other = agent_of(evaluate=True)
    other.load(agent.policy.flatten(), 1)
    expected = other.act(OBS, FIRST)
    np.testing.assert_array_equal(after.action, expected.action)
    np.testing.assert_array_equal(after.option, expected.option)
    assert not np.allclose(before, after.action)
