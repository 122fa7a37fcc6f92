"""TwinCritic: two critics at once, all options at once."""

import sys
import types
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from claw_lightning import networks
from claw_lightning.networks import DiscreteCritic, StackedLinear, TwinCritic
from claw_lightning.rollout.networks import NetworkBlock

BATCH, OBS, ACTION = 9, 5, 3
KINDS = [(k, norm) for k in (1, 4) for norm in (False, True)]


def make(num_options=4, layer_norm=False, activation="elu", hidden=(32, 16), last=0.3):
    torch.manual_seed(0)
    critic = TwinCritic(OBS, ACTION, num_options, hidden, activation, layer_norm)
    with torch.no_grad():
        critic.last.weight.normal_(0, last)  # the initial one is so small that a wrong value would pass for a right one
        for parameter in critic.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return critic


def inputs(num_options):
    return torch.randn(BATCH, OBS), torch.rand(BATCH, num_options, ACTION) * 2 - 1


def by_hand(critic, index, obs, action, option):
    """One critic as plain linear layers."""
    if critic.num_options > 1:
        action = torch.cat((action, F.one_hot(option, critic.num_options).float()), 1)
    h = obs @ critic.obs_layer.weight[index] + critic.obs_layer.bias[index] + action @ critic.action_layer.weight[index]
    for i, layer in enumerate([*critic.hidden, critic.last]):
        if critic.norms is not None:
            h = critic.norms[i](h)
        h = F.elu(h) @ layer.weight[index] + layer.bias[index]
    return h[:, 0]


@pytest.mark.parametrize("num_options, layer_norm", KINDS)
def test_values_equal_plain_layers(num_options, layer_norm):
    critic = make(num_options, layer_norm)
    obs, actions = inputs(num_options)
    option = torch.arange(BATCH) % num_options
    q = critic(obs, actions[:, 0], option)
    assert q.shape == (2, BATCH)
    for index in range(2):
        torch.testing.assert_close(q[index], by_hand(critic, index, obs, actions[:, 0], option), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("num_options, layer_norm", KINDS)
def test_all_options_at_once_equal_one_by_one(num_options, layer_norm, activation):
    critic = make(num_options, layer_norm, activation)
    obs, actions = inputs(num_options)
    together = critic.forward_all(obs, actions)
    assert together.shape == (2, BATCH, num_options)
    for option in range(num_options):
        alone = critic(obs, actions[:, option], torch.full((BATCH,), option))
        torch.testing.assert_close(together[:, :, option], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_options, layer_norm", KINDS)
def test_first_critic_alone_equals_row_0(num_options, layer_norm):
    critic = make(num_options, layer_norm)
    obs, actions = inputs(num_options)
    option = torch.arange(BATCH) % num_options
    both, alone = critic(obs, actions[:, 0], option), critic(obs, actions[:, 0], option, first=1)
    assert alone.shape == (1, BATCH)
    torch.testing.assert_close(alone[0], both[0])
    torch.testing.assert_close(critic.forward_all(obs, actions, first=1)[0], critic.forward_all(obs, actions)[0])


def test_the_critics_are_two_and_both_get_gradients():
    critic = make()
    obs, actions = inputs(4)
    q = critic(obs, actions[:, 0], torch.arange(BATCH) % 4)
    assert not torch.allclose(q[0], q[1])
    q.sum().backward()
    for name, parameter in critic.named_parameters():
        assert all(parameter.grad[index].any() for index in range(2)), name


def test_one_critic_leaves_the_others_gradient_at_zero_and_reaches_the_action():
    critic = make()
    obs, actions = inputs(4)
    action = actions[:, 0].clone().requires_grad_()
    critic(obs, action, torch.zeros(BATCH, dtype=torch.long), first=1).sum().backward()
    assert (action.grad != 0).any(1).all()
    for name, parameter in critic.named_parameters():
        assert parameter.grad[0].any() and not parameter.grad[1].any(), name


def test_inputs_stay_as_they_are():
    critic = make(activation="relu")
    obs, actions = inputs(4)
    kept = obs.clone(), actions.clone()
    critic.forward_all(obs, actions)
    critic(obs, actions[:, 0], torch.zeros(BATCH, dtype=torch.long))
    assert torch.equal(obs, kept[0]) and torch.equal(actions, kept[1])


@pytest.mark.parametrize("num_options, layer_norm", KINDS)
def test_bfloat16_is_close_to_float32(num_options, layer_norm):
    critic = make(num_options, layer_norm, hidden=(64, 64))
    obs, actions = inputs(num_options)
    option = torch.arange(BATCH) % num_options
    with torch.autocast("cpu", torch.bfloat16):
        low = critic(obs, actions[:, 0], option), critic.forward_all(obs, actions)
    full = critic(obs, actions[:, 0], option), critic.forward_all(obs, actions)
    for a, b in zip(low, full):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.05 * float(b.detach().abs().max()))


def test_initial_values_are_near_zero():
    torch.manual_seed(0)
    critic = TwinCritic(OBS, ACTION, 4, (32, 32), "relu")
    obs, actions = inputs(4)
    assert critic.forward_all(obs, actions).abs().max() < 0.1


def test_one_hot_is_not_saved():
    assert not [name for name in make().state_dict() if "one_hot" in name]


def test_stacked_linear_takes_shared_and_separate_inputs():
    layer, x = StackedLinear(3, 4, 2), torch.randn(5, 4)
    shared = layer(x)
    torch.testing.assert_close(layer(x.expand(3, -1, -1).contiguous()), shared)
    torch.testing.assert_close(shared[1], x @ layer.weight[1] + layer.bias[1])
    assert layer(x, 2).shape == (2, 5, 2)


class Block(NetworkBlock):
    def __init__(self, input_size, output_size):
        super().__init__(input_size, output_size)
        self.out = torch.nn.Linear(input_size, output_size)

    def forward(self, x):
        return self.out(torch.relu(x))


def test_critics_with_a_block_of_the_users_own(monkeypatch):
    """All options at once as one by one, whatever the kind of critic; a part of the critics alone."""
    module = types.ModuleType("own_critic_blocks")
    module.Block = Block
    monkeypatch.setitem(sys.modules, "own_critic_blocks", module)
    network = {"class_path": "own_critic_blocks.Block", "init_args": {}}
    obs, option = torch.randn(5, 3), torch.randint(0, 4, (5,))
    common = (3, 2, 4, [8, 8], "relu", False, "orthogonal", 3)
    for critic, actions in (
        (TwinCritic(*common, network=network), torch.rand(5, 4, 2)),
        (TwinCritic(*common, atoms=5, value_range=(-1.0, 1.0), network=network), torch.rand(5, 4, 2)),
        (DiscreteCritic(*common, network=network), torch.randint(0, 2, (5, 4, 1)).float()),
    ):
        every = critic.forward_all(obs, actions)
        assert every.shape == (3, 5, 4)
        one = critic(obs, actions[torch.arange(5), option], option)
        torch.testing.assert_close(one, every[:, torch.arange(5), option])
        if isinstance(critic, TwinCritic):
            torch.testing.assert_close(critic.forward_all(obs, actions, 1), every[:1])


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("wanted_inputs", [(0,), (1,), (0, 1)])
def test_relu_networks_have_the_gradients_of_their_layers(depth, count, frozen, wanted_inputs):
    """Values and gradients by PyTorch's own graph; of networks that are not asked for: zeros."""
    torch.manual_seed(3)
    sizes = [5, *[7] * (depth - 1), 2]
    layers = [networks.StackedLinear(2, a, b) for a, b in pairwise(sizes)]
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    for p in parameters:
        p.data.normal_().requires_grad_(not frozen)
    inputs = [torch.randn(6, size, requires_grad=side in wanted_inputs) for side, size in enumerate((3, 2))]
    plain = []
    for c in range(count):
        h = torch.cat(inputs, 1)
        for layer in layers:
            h = (torch.relu(h) if layer is not layers[0] else h) @ layer.weight[c] + layer.bias[c]
        plain.append(h)
    weight = torch.randn(count, 6, 2)
    wanted = [inputs[side] for side in wanted_inputs] + ([] if frozen else parameters)
    expected = torch.autograd.grad((torch.stack(plain) * weight).sum(), wanted)
    out = networks.ReluNetworks.apply(count, *inputs, *parameters)
    torch.testing.assert_close(out, torch.stack(plain))
    for found, right in zip(torch.autograd.grad((out * weight).sum(), wanted), expected, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("num_options", [1, 3])
def test_the_critics_are_the_same_in_one_node_and_layer_by_layer(num_options, monkeypatch):
    torch.manual_seed(4)
    critic = networks.TwinCritic(4, 2, num_options, [8, 8], "relu")
    for p in critic.parameters():
        p.data.normal_()
    obs, action, option = torch.randn(5, 4), torch.randn(5, 2, requires_grad=True), torch.arange(5) % num_options
    found = []
    for plain in (True, False):
        monkeypatch.setattr(networks.TwinCritic, "_is_plain", plain)
        q = critic(obs, action, option)
        found.append((q, *torch.autograd.grad(q.square().sum(), [action, *critic.parameters()])))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_penalty_on_the_gradients_of_the_critics_is_learned_from(monkeypatch):
    torch.manual_seed(5)
    critic = networks.TwinCritic(4, 2, 1, [8, 8], "relu")
    for p in critic.parameters():
        p.data.normal_()
    obs, action, option = torch.randn(5, 4), torch.randn(5, 2, requires_grad=True), torch.zeros(5, dtype=torch.int64)
    found = []
    for plain in (True, False):
        monkeypatch.setattr(networks.TwinCritic, "_is_plain", plain)
        (slope,) = torch.autograd.grad(critic(obs, action, option).sum(), action, create_graph=True)
        weights = [critic.obs_layer.weight, critic.action_layer.weight, critic.hidden[0].weight, critic.last.weight]
        found.append((slope, *torch.autograd.grad(slope.square().sum(), weights, materialize_grads=True)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert all(float(x.abs().sum()) > 0.0 for x in found[0][2:])


def test_a_backward_pass_within_autocast_has_the_precision_of_the_forward_pass():
    critic = networks.TwinCritic(4, 2, 1, [8, 8], "relu")
    q = critic(torch.randn(5, 4), torch.randn(5, 2), torch.zeros(5, dtype=torch.int64))
    with torch.autocast("cpu", torch.bfloat16):
        q.sum().backward()
    assert critic.hidden[0].weight.grad.dtype == torch.float32
