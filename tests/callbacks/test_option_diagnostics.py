"""Shares, entropy, decision rate, duration and rank by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributions
from torch.utils.tensorboard import SummaryWriter

from callbacks import OptionDiagnostics
from claw_lightning.inspection import action_divergence, undisturbed
from claw_lightning.rollout.networks import OptionActor
from claw_lightning.rollout.ring import FIRST, SWITCHED
from tests.runs import make_batch, make_module


def figures(num_options, batches, embedding=None):
    module = make_module(num_options=num_options, build=True)
    if embedding is not None:
        module.policy.actor.embedding = torch.nn.Embedding.from_pretrained(embedding)
    diagnostics = OptionDiagnostics()
    diagnostics.setup(None, module, "fit")
    for batch in batches:
        diagnostics.on_batch_sampled(None, module, batch)
    return diagnostics, diagnostics.metrics()


def test_values_by_hand():
    option = np.array([[0, 0, 0, 0, 1, 1, 0, 0]])
    flags = np.array([[FIRST | SWITCHED, 0, 0, 0, SWITCHED, 0, SWITCHED, 0]])
    _, values = figures(2, [make_batch(1, option=option, flags=flags)])
    assert (values["option/share_0"], values["option/share_1"]) == (0.75, 0.25)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(2)
    assert values["option/usage_entropy"] == pytest.approx(entropy)
    # Two switches among the seven steps that are no first steps.
    assert values["option/decision_rate"] == pytest.approx(2 / 7)
    assert values["option/mean_duration"] == pytest.approx(3.5)


def test_batches_add_up_and_each_log_starts_anew():
    ones = [make_batch(1, option=np.full((1, 8), k)) for k in (0, 1)]
    diagnostics, values = figures(2, ones)
    assert values["option/usage_entropy"] == pytest.approx(1.0)
    assert "option/mean_duration" not in values  # none ended
    assert diagnostics.metrics() == {}


def test_collapse_to_one_option_shows():
    _, values = figures(4, [make_batch(1, option=np.full((1, 8), 2))])
    assert [values[f"option/share_{k}"] for k in range(4)] == [0.0, 0.0, 1.0, 0.0]
    assert values["option/usage_entropy"] == 0.0


@pytest.mark.parametrize("embedding, rank", [(torch.eye(4, 16), 4.0), (torch.ones(4, 16), 1.0)])
def test_embedding_rank(embedding, rank):
    _, values = figures(4, [make_batch()], embedding)
    assert values["option/embedding_rank"] == pytest.approx(rank, rel=1e-4)


def test_nothing_for_one_option():
    _, values = figures(1, [make_batch(num_options=1)])
    assert values == {}


def test_durations_of_each_option_by_hand():
    # Option 0 arrives at four steps and ends at two of them, option 1 at three and ends at one. Row 0 is a first step.
    previous = np.array([[-1, 0, 0, 0, 0, 1, 1, 1]])
    flags = np.array([[FIRST | SWITCHED, 0, SWITCHED, 0, SWITCHED, 0, 0, SWITCHED]])
    _, values = figures(2, [make_batch(1, option=previous * 0, previous_option=previous, flags=flags)])
    assert (values["option/duration_0"], values["option/duration_1"]) == (2.0, 3.0)


def test_steps_outside_their_segment_are_not_counted():
    valid = torch.tensor([[[True, False], [True, True]]])
    batch = make_batch(1, size=4, option=np.array([[1, 0, 1, 1]]), previous_option=np.array([[1, 0, 1, 1]]))
    batch.rows, batch.next_obs = batch.rows.unflatten(1, (2, 2)), batch.next_obs.unflatten(1, (2, 2))
    batch.valid = valid
    _, values = figures(2, [batch])
    assert values["option/share_1"] == 1.0


def test_entropies_have_their_greatest_value_where_nothing_is_decided():
    module = make_module(num_options=4, build=True)
    for network in (module.policy.option_policy, module.policy.termination):
        for parameter in network.parameters():
            parameter.data.zero_()
    values = look(module, make_batch(previous_option=np.ones((2, 8))))
    assert values["entropy/option_policy"] == pytest.approx(math.log(4))
    assert values["entropy/termination"] == pytest.approx(math.log(2))
    assert "entropy/action" not in values  # deterministic


def test_entropy_of_a_gaussian_actor_by_many_draws():
    module = make_module(num_options=1, actor="gaussian", build=True)
    values = look(module, make_batch(1, size=4096, num_options=1), rows=4096)
    with torch.no_grad():
        raw = module.policy.actor.forward_all(torch.randn(4096, 3)).squeeze(1)
        _, log_prob = module.policy.actor.sample(raw)
    assert values == {"entropy/action": pytest.approx(float(-log_prob.mean()), abs=0.1)}


def look(module, batch, **settings):
    diagnostics = OptionDiagnostics(**settings)
    diagnostics.setup(None, module, "fit")
    diagnostics.on_batch_sampled(None, module, batch)
    return diagnostics.metrics()


def test_embeddings_of_opposite_and_equal_options():
    weight = torch.zeros(3, 16)
    weight[0, 0], weight[1, 0], weight[2, 1] = 1.0, 2.0, 1.0  # the first two point the same way
    _, values = figures(3, [make_batch(num_options=3)], weight)
    assert values["option/embedding_cosine"] == pytest.approx(1 / 3)
    assert values["option/embedding_cosine_max"] == pytest.approx(1.0)


def test_divergence_of_actions_by_hand():
    actor = make_module(num_options=2, build=True).policy.actor
    raw = torch.atanh(torch.tensor([[[0.5, 0.0], [0.0, 0.0]], [[0.1, 0.1], [0.1, 0.1]]]))
    # Squared distances 0.25, 0, 0, 0 over rows and components.
    assert action_divergence(actor, raw)[0, 1] == pytest.approx(0.25)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_divergence_of_distributions_is_that_of_torch(kind):
    torch.manual_seed(0)
    actor = OptionActor(3, 2, 3, kind, (8,), "relu", 16, "torch")
    raw = torch.randn(5, 3, actor.out_size)
    if kind == "gaussian":
        mean, std = actor.gaussian(raw)
        each = [distributions.Independent(distributions.Normal(mean[:, k], std[:, k]), 1) for k in range(3)]
    else:
        each = [distributions.Categorical(logits=raw[:, k]) for k in range(3)]
    found = action_divergence(actor, raw)
    for p, q in ((0, 1), (0, 2), (1, 2)):
        wanted = (distributions.kl_divergence(each[p], each[q]) + distributions.kl_divergence(each[q], each[p])) / 2
        assert found[p, q] == pytest.approx(float(wanted.mean()), rel=1e-4)
        assert found[q, p] == found[p, q]


def test_histograms_hold_the_arriving_options_probabilities():
    written = {}

    experiment = SimpleNamespace(add_histogram=lambda name, values, step, bins: written.update({name: values}))
    module = make_module(num_options=2, build=True)
    trainer = SimpleNamespace(is_global_zero=True, loggers=[SimpleNamespace(experiment=experiment)])
    diagnostics = OptionDiagnostics()
    diagnostics.setup(trainer, module, "fit")
    batch = make_batch(1, previous_option=np.array([[0, 0, 0, 1, 1, -1, -1, -1]]))
    diagnostics.on_batch_sampled(trainer, module, batch)
    diagnostics.metrics()
    with torch.no_grad():
        beta = module.policy.beta(module.policy.normalizer(batch.obs[0]))
    torch.testing.assert_close(written["termination/option_0"], beta[:3, 0])
    torch.testing.assert_close(written["termination/option_1"], beta[3:5, 1])


@pytest.mark.parametrize("kind", ["deterministic", "gaussian"])
def test_networks_that_have_diverged_are_left_to_the_check_of_the_losses(kind, tmp_path):
    """Which names the setting to lower; it comes after the callbacks' figures."""
    module = make_module(num_options=3, actor=kind, build=True)
    for parameter in module.parameters():
        parameter.data.fill_(math.nan)
    with SummaryWriter(str(tmp_path)) as writer:
        logger = SimpleNamespace(experiment=writer)
        diagnostics = OptionDiagnostics()
        diagnostics.setup(SimpleNamespace(is_global_zero=True, loggers=[logger]), module, "fit")
        diagnostics.on_batch_sampled(None, module, make_batch(num_options=3, previous_option=np.ones((2, 8))))
        assert math.isnan(diagnostics.metrics()["entropy/option_policy"])


def test_a_block_that_draws_and_counts_in_training_is_left_as_it_was():
    block = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    block[1].eval()
    state, before = torch.random.get_rng_state(), block[0].running_mean.clone()
    with undisturbed(block):
        block(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.random.get_rng_state(), state) and torch.equal(block[0].running_mean, before)
    assert block[0].training and not block[1].training
