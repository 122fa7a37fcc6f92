"""The forward passes in NumPy against those of the modules."""

import itertools

import numpy as np
import pytest
import torch

from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.forward import ArrayForward, ModuleForward, make_forward
from claw_lightning.rollout.networks import Policy

OBS = np.random.default_rng(0).standard_normal((7, 5)).astype(np.float32)
CPU = torch.device("cpu")
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def policy_of(**settings):
    torch.manual_seed(0)
    policy = Policy(**{"obs_size": 5, "action_size": 3, "num_options": 4, "hidden_sizes": (16, 8),
                       "option_hidden_sizes": (6, 10), "init": "torch", **settings})  # fmt: skip
    with torch.no_grad():
        policy.normalizer.mean.normal_()
        policy.normalizer.std.uniform_(0.1, 2.0)
    return policy


def both(policy, obs=OBS):
    """What both give: option probabilities, terminations, raw outputs."""
    found = []
    for forward in (ArrayForward(policy), ModuleForward(policy, CPU)):
        forward.observe(obs, None)
        parts = list(forward.options()) if policy.num_options > 1 else []
        option = np.arange(len(obs), dtype=np.int32) % policy.num_options
        found.append([*parts, forward.raw(option).numpy()])
    return found


def assert_alike(policy, obs=OBS):
    for ours, theirs in zip(*both(policy, obs), strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, theirs, **NEAR)


@pytest.mark.parametrize("kind, heads, options", [
    *itertools.product(("deterministic", "gaussian", "categorical"), ("embedding", "separate"), (4,)),
    ("deterministic", "embedding", 1),
])  # fmt: skip
def test_both_agree_for_every_actor(kind, heads, options):
    assert_alike(policy_of(actor=kind, option_heads=heads, num_options=options))


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh", "silu"])
@pytest.mark.parametrize("sizes", [(8,), (16, 8, 4)])
def test_both_agree_for_every_activation_and_depth(activation, sizes):
    assert_alike(policy_of(activation=activation, hidden_sizes=sizes, option_hidden_sizes=sizes), 30 * OBS)


@pytest.mark.parametrize("selection", ["random", 2])
def test_both_agree_where_the_choice_is_not_learned(selection):
    assert_alike(policy_of(option_selection=selection))


def test_both_agree_on_observations_that_are_not_finite_or_tensors():
    obs = OBS.copy()
    obs[1, 2], obs[3, 0], obs[4, 4] = np.nan, np.inf, -np.inf
    assert_alike(policy_of(), obs)
    assert_alike(policy_of(), torch.from_numpy(OBS))
    assert_alike(policy_of(normalize=False), 3 * OBS)


def test_observations_are_left_as_they_were():
    obs, forward = OBS.copy(), ArrayForward(policy_of())
    forward.observe(obs, None)
    np.testing.assert_array_equal(obs, OBS)


def test_parameters_that_are_loaded_or_changed_in_place_take_effect():
    policy = policy_of()
    forward = ArrayForward(policy)
    forward.observe(OBS, None)
    torch.manual_seed(1)
    policy.load_flat(policy.flatten() + 0.1 * torch.randn(policy.flat_size).numpy())
    for parameter in (None, policy.actor.embedding.weight, policy.actor.option_layer.bias, policy.termination[0].bias):
        with torch.no_grad():
            _ = None if parameter is None else parameter.add_(0.5)
        module = ModuleForward(policy, CPU)
        for each in (forward, module):
            each.observe(OBS, None)
        for ours, theirs in zip(forward.options(), module.options(), strict=True):
            np.testing.assert_allclose(ours, theirs, **NEAR)
        option = np.full(len(OBS), 3)
        np.testing.assert_allclose(forward.raw(option), module.raw(option), **NEAR)


def test_results_outlive_the_next_step():
    forward = ArrayForward(policy_of())
    forward.observe(OBS, None)
    kept = [*forward.options(), forward.raw(np.zeros(len(OBS), int)).numpy()]
    before = [each.copy() for each in kept]
    forward.observe(2 * OBS, None)
    forward.options(), forward.raw(np.ones(len(OBS), int))
    for ours, then in zip(kept, before, strict=True):
        np.testing.assert_array_equal(ours, then)


def test_what_is_no_plain_network_goes_through_the_modules():
    assert type(make_forward(policy_of(), CPU)) is ArrayForward
    assert type(make_forward(policy_of(), torch.device("meta"))) is ModuleForward
    block = {"class_path": "tests.test_networks.Block"}
    for settings in ({"network": block}, {"image_shape": (1, 8, 8)}):
        assert type(make_forward(policy_of(**settings), CPU)) is ModuleForward


def test_an_agent_with_images_says_that_they_are_missing():
    settings = {"obs_size": 5, "action_size": 3, "image_shape": (1, 8, 8)}
    with pytest.raises(ValueError, match="give image"):
        OptionAgent(settings, len(OBS), 0).act(OBS, np.ones(len(OBS), bool))
