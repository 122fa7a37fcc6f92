"""Policy and its parts: flat parameters, all options at once, squashed Gaussian."""

import math
import sys
import types

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from claw_lightning.rollout import networks
from claw_lightning.rollout.distributions import squashed_gaussian_log_prob
from claw_lightning.rollout.networks import (
    LOG_STD_MAX,
    LOG_STD_MIN,
    Policy,
    build_policy,
    init_linear,
)
from tests.builders import policy_settings

SHAPES = [{"num_options": k, "actor": actor} for k in (1, 4) for actor in ("deterministic", "gaussian")]


def make(seed=0, **changes):
    torch.manual_seed(seed)
    return build_policy(policy_settings(**changes))


@pytest.mark.parametrize("changes", SHAPES)
def test_flat_round_trip(changes):
    source, target = make(0, **changes), make(1, **changes)
    source.normalizer.mean.fill_(0.25)
    source.exploration.copy_(torch.tensor([0.5, 0.0]))
    source.switch_cost.fill_(0.125)
    values = source.flatten()
    assert values.shape == (source.flat_size,) and values.dtype == np.float32
    assert source.flat_size == sum(p.numel() for p in source.parameters()) + 2 * 3 + 2 + 1
    target.load_flat(values)
    for (name, a), (_, b) in zip(source.state_dict().items(), target.state_dict().items()):
        assert torch.equal(a, b), name
    assert float(target.switch_cost) == 0.125
    values[:] = 9.0  # the policy keeps no reference to the letter
    assert torch.equal(target.actor.obs_layer.weight, source.actor.obs_layer.weight)


@pytest.mark.parametrize("change", [-1, 1])
def test_another_size_is_refused(change):
    policy = make()
    with pytest.raises(ValueError, match="received"):
        policy.load_flat(np.zeros(policy.flat_size + change, np.float32))


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh", "silu"])
@pytest.mark.parametrize("changes", SHAPES)
def test_all_options_at_once_equal_one_by_one(changes, activation):
    actor = make(activation=activation, **changes).actor
    obs = torch.randn(7, 3)
    together = actor.forward_all(obs)
    assert together.shape == (7, changes["num_options"], 2 * (1 + (changes["actor"] == "gaussian")))
    for option in range(changes["num_options"]):
        alone = actor(obs, torch.full((7,), option))
        torch.testing.assert_close(together[:, option], alone, rtol=1e-5, atol=1e-6)
    mixed = actor(obs, torch.arange(7) % changes["num_options"])
    torch.testing.assert_close(mixed[0], together[0, 0], rtol=1e-5, atol=1e-6)


def test_options_differ_and_all_receive_gradients():
    actor = make(num_options=3).actor
    raw = actor.forward_all(torch.randn(5, 3))
    assert not torch.allclose(raw[:, 0], raw[:, 1])
    raw.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in actor.parameters())


def test_probabilities():
    policy, obs = make(num_options=4), torch.randn(6, 3)
    torch.testing.assert_close(policy.option_probs(obs).sum(-1), torch.ones(6))
    beta = policy.beta(obs)
    assert beta.shape == (6, 4)
    torch.testing.assert_close(beta, torch.full((6, 4), 0.1), rtol=0.2, atol=0.0)  # initial_termination


def test_one_option_switches_the_machinery_off():
    policy, obs = make(num_options=1), torch.randn(6, 3)
    assert policy.option_probs(obs).tolist() == [[1.0]] * 6
    assert policy.beta(obs).tolist() == [[0.0]] * 6
    assert not [name for name, _ in policy.named_parameters() if not name.startswith("actor.")]


@pytest.mark.parametrize("shape", [(3, 13, 13), (1, 1, 2), (9, 84, 84), (4, 30, 7)])
def test_an_encoder_of_images_of_any_size(shape):
    policy = make(image_shape=shape, image_features=5)
    images = torch.randint(0, 256, (2, 4, *shape), dtype=torch.uint8)
    features = policy.encoder(images)
    assert features.shape == (2, 4, 5) and features.dtype == torch.float32
    assert features.abs().max() < 1
    # Each image by itself, and pixels count.
    torch.testing.assert_close(policy.encoder(images[1, 2]), features[1, 2], rtol=1e-4, atol=1e-5)
    assert not torch.equal(policy.encoder(255 - images), features)
    assert policy.perceive(torch.zeros(2, 4, 3), images).shape == (2, 4, 8)


def test_an_encoder_keeps_where_things_are():
    encoder = make(image_shape=(1, 13, 13)).encoder
    places = torch.eye(169, dtype=torch.uint8).view(169, 1, 13, 13) * 255
    features = encoder(places)
    assert torch.cdist(features, features).fill_diagonal_(1.0).min() > 1e-3


def test_a_policy_with_images_travels_whole():
    changes = {"obs_size": 0, "num_options": 2, "image_shape": (3, 6, 7), "student_hidden_sizes": [8]}
    source, target = make(0, **changes), make(1, **changes)
    assert source.input_size == 50 and source.normalizer.mean.shape == (0,)
    target.load_flat(source.flatten())
    image = torch.randint(0, 256, (4, 3, 6, 7), dtype=torch.uint8)
    a, b = (p.option_probs(p.perceive(p.normalizer(torch.zeros(4, 0)), image)) for p in (source, target))
    assert torch.equal(a, b)


def test_a_policy_without_images_has_no_encoder():
    assert make().encoder is None and make().input_size == 3
    assert not [name for name in make().state_dict() if "encoder" in name]


def test_gaussian_log_prob_equals_torch_distributions():
    torch.manual_seed(0)
    mean, std = torch.randn(50, 3, dtype=torch.float64), torch.rand(50, 3, dtype=torch.float64) + 0.05
    pre_tanh = mean + std * torch.randn_like(mean)
    exact = TransformedDistribution(Independent(Normal(mean, std), 1), [TanhTransform(cache_size=1)])
    base = Independent(Normal(mean, std), 1).log_prob(pre_tanh)
    expected = base - TanhTransform().log_abs_det_jacobian(pre_tanh, torch.tanh(pre_tanh)).sum(-1)
    torch.testing.assert_close(squashed_gaussian_log_prob(pre_tanh, mean, std), expected)
    inside = pre_tanh.abs().amax(-1) < 3  # where the inverse of tanh is accurate
    torch.testing.assert_close(expected[inside], exact.log_prob(torch.tanh(pre_tanh))[inside], rtol=1e-6, atol=1e-6)


def test_gaussian_log_prob_far_out_is_finite_and_exact():
    pre_tanh = torch.tensor([[30.0], [-30.0]])
    # log(1 - tanh(x)^2) -> 2 (log 2 - |x|)
    expected = -0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - 30.0)
    assert squashed_gaussian_log_prob(pre_tanh, pre_tanh, torch.ones(2, 1)).tolist() == pytest.approx([expected] * 2)


def test_gaussian_actor():
    actor = make(actor="gaussian").actor
    mean, std = actor.gaussian(torch.tensor([[0.5, -0.5, -99.0, 99.0]]))
    assert mean.tolist() == [[0.5, -0.5]]
    torch.testing.assert_close(std, torch.tensor([[LOG_STD_MIN, LOG_STD_MAX]]).exp())
    raw = torch.tensor([[0.3, -0.2, -1.0, -1.0]]).expand(20_000, -1).clone().requires_grad_()
    torch.manual_seed(0)
    action, log_prob = actor.sample(raw)
    assert action.abs().max() < 1 and log_prob.shape == (20_000,)
    torch.testing.assert_close(actor.mean_action(raw), torch.tanh(raw[:, :2]))
    torch.testing.assert_close(torch.atanh(action).mean(0), raw[0, :2], rtol=0.0, atol=0.02)
    action.sum().backward()
    assert (raw.grad != 0).all()


@pytest.mark.parametrize("scheme", ["orthogonal", "xavier", "he", "torch"])
def test_initial_actions_are_small_and_biases_zero(scheme):
    policy = make(init=scheme, num_options=2)
    if scheme != "torch":
        assert policy.actor.mean_action(policy.actor.forward_all(torch.randn(50, 3))).abs().max() < 0.2
        assert not policy.actor.obs_layer.bias.any()


def test_unknown_initialisation_names_the_setting():
    with pytest.raises(ValueError, match="model.init: magic"):
        init_linear(torch.nn.Linear(2, 2), 1.0, "magic")


def test_normalisation_switched_off_does_not_clip():
    policy = Policy(**policy_settings(normalize=False))
    assert policy.normalizer(torch.full((1, 3), 1e6)).tolist() == [[1e6] * 3]


@pytest.mark.parametrize("actor", ["deterministic", "gaussian", "categorical"])
def test_separate_heads_share_a_body_alone(actor):
    policy = make(num_options=3, actor=actor, option_heads="separate").actor
    assert policy.embedding is None
    obs = torch.randn(5, 3)
    raw = policy.forward_all(obs)
    assert raw.shape == (5, 3, policy.out_size)
    for option in range(3):
        torch.testing.assert_close(policy(obs, torch.full((5,), option)), raw[:, option])
    raw[:, 1].sum().backward()
    last = policy.body[-1].weight.grad.view(3, policy.out_size, -1)
    assert last[1].any() and not last[0].any() and not last[2].any()


def test_categorical_actor():
    actor = make(actor="categorical", action_size=4).actor
    raw = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 9.0]])
    assert actor.mean_action(raw).tolist() == [[1.0], [3.0]]
    got = actor.log_prob(raw, torch.tensor([[2.0], [3.0]]))
    torch.testing.assert_close(got, raw.log_softmax(-1)[[0, 1], [2, 3]])


def test_log_prob_of_stored_gaussian_actions_is_finite_at_the_bound():
    actor = make(actor="gaussian").actor
    raw = torch.tensor([[0.3, -0.2, -1.0, -1.0]])
    torch.manual_seed(0)
    action, log_prob = actor.sample(raw)
    torch.testing.assert_close(actor.log_prob(raw, action), log_prob, rtol=1e-4, atol=1e-4)
    assert torch.isfinite(actor.log_prob(raw, torch.tensor([[1.0, -1.0]]))).all()


@pytest.mark.parametrize("selection, probs", [("random", [1 / 3] * 3), (2, [0.0, 0.0, 1.0])])
def test_options_may_be_chosen_by_a_rule(selection, probs):
    policy = make(num_options=3, option_selection=selection)
    for shape in ((4,), (4, 2)):
        torch.testing.assert_close(policy.option_probs(torch.randn(*shape, 3)), torch.tensor(probs).expand(*shape, 3))


# -- a block of the user's own ----------------------------------------------------------------------------------------


class Block(networks.NetworkBlock):
    def __init__(self, input_size, output_size, width=2, fault=""):
        super().__init__(input_size, output_size)
        self.up = torch.nn.Linear(input_size, width)
        self.out = torch.nn.Linear(width, output_size + (fault == "size"))
        if fault == "double":
            self.out.double()

    def forward(self, x):
        return self.out(torch.relu(self.up(x)).to(self.out.weight.dtype))


class NoBlock(torch.nn.Module):
    pass


class FailingBlock(Block):
    """Fails where it is told to, in one of the ways in which a user's code can."""

    def __init__(self, input_size, output_size, where="", how=""):
        super().__init__(input_size, output_size)
        self.where, self.how = where, how
        self.fail("constructor")

    def forward(self, x):
        self.fail("forward")
        return None if self.where == "nothing" else super().forward(x)

    def fail(self, where):
        if where == self.where:
            raise {"ValueError": ValueError("two\nlines"), "KeyError": KeyError("k"), "exit": SystemExit("no GPU")}[
                self.how
            ]


@pytest.fixture
def block(monkeypatch):
    """Named as a configuration names it."""
    module = types.ModuleType("own_blocks")
    module.Block, module.NoBlock, module.FailingBlock = Block, NoBlock, FailingBlock
    monkeypatch.setitem(sys.modules, "own_blocks", module)
    return lambda **init_args: {"class_path": "own_blocks.Block", "init_args": init_args}


@pytest.mark.parametrize("actor", ["deterministic", "gaussian", "categorical"])
@pytest.mark.parametrize("heads", ["embedding", "separate"])
def test_a_block_takes_the_place_of_the_hidden_layers_everywhere(block, actor, heads):
    policy = networks.Policy(
        3, 2, 4, actor, [8], [8], network=block(width=5), option_heads=heads, student_hidden_sizes=[8]
    )
    owners = (policy.actor.body, policy.student.body, *(n[1] for n in (policy.option_policy, policy.option_value)))
    assert all(isinstance(owner, Block) for owner in owners) and isinstance(policy.termination[1], Block)
    obs = torch.randn(6, 3)
    each = torch.stack([policy.actor(obs, torch.full((6,), k)) for k in range(4)], 1)
    torch.testing.assert_close(policy.actor.forward_all(obs), each)
    assert policy.option_probs(obs).shape == (6, 4)
    # Options begin as long as without a block, but for what its random outputs add.
    torch.testing.assert_close(policy.termination[2].bias.sigmoid(), torch.full((4,), 0.1))
    other = networks.Policy(
        3, 2, 4, actor, [8], [8], network=block(width=5), option_heads=heads, student_hidden_sizes=[8]
    )
    other.load_flat(policy.flatten())
    torch.testing.assert_close(other.actor.forward_all(obs), policy.actor.forward_all(obs))


@pytest.mark.parametrize(
    "network, said",
    [
        ({"class_path": "no_such.Block"}, "class_path: cannot import no_such.Block"),
        ({"class_path": "own_blocks.NoBlock"}, "own_blocks.NoBlock is not a"),
        ({"class_path": "own_blocks.Block", "init_args": {"widht": 3}}, "init_args:.*widht"),
        ({"class_path": "own_blocks.Block", "init_args": {"fault": "size"}}, r"expected \(2, 3, "),
        ({"class_path": "own_blocks.Block", "init_args": {"fault": "double"}}, "use float32"),
    ],
)
def test_blocks_that_cannot_be_used_are_named(block, network, said):
    with pytest.raises(networks.NetworkError, match=said):
        networks.Policy(3, 2, 2, network=network)


@pytest.mark.parametrize("how, said", [("ValueError", "ValueError: two lines"), ("KeyError", "KeyError: 'k'"),
                                       ("exit", r"it called exit\(no GPU\)")])  # fmt: skip
@pytest.mark.parametrize("where, which", [("constructor", "constructor of"), ("forward", "FailingBlock fails for")])
def test_whatever_a_block_raises_is_one_line_with_its_class(block, where, which, how, said):
    network = {**block(where=where, how=how), "class_path": "own_blocks.FailingBlock"}
    with pytest.raises(networks.NetworkError, match=said) as caught:
        networks.Policy(3, 2, 2, network=network)
    text = str(caught.value)
    assert text.startswith("model.network: ") and which in text and "own_blocks.FailingBlock" in text
    assert "\n" not in text


def test_a_block_that_gives_nothing_is_one_line(block):
    network = {**block(where="nothing"), "class_path": "own_blocks.FailingBlock"}
    with pytest.raises(networks.NetworkError, match="own_blocks.FailingBlock fails for inputs"):
        networks.Policy(3, 2, 2, network=network)


@pytest.mark.parametrize("line", ["raise RuntimeError('no driver')", "raise SystemExit(3)", "1 +"])
def test_a_module_of_a_block_that_fails_is_one_line(tmp_path, monkeypatch, line):
    (tmp_path / "failing_module.py").write_text(line + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(networks.NetworkError, match="cannot import failing_module.Block ") as caught:
        networks.make_block({"class_path": "failing_module.Block"}, 3, 2)
    assert "\n" not in str(caught.value)
