"""Shares, entropy, decision rate, duration and rank by hand."""

import math

import numpy as np
import pytest
import torch

from callbacks import OptionDiagnostics
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


@pytest.mark.parametrize("embedding, rank", [(torch.eye(4), 4.0), (torch.ones(4, 4), 1.0)])
def test_embedding_rank(embedding, rank):
    _, values = figures(4, [make_batch()], embedding)
    assert values["option/embedding_rank"] == pytest.approx(rank, rel=1e-4)


def test_nothing_for_one_option():
    _, values = figures(1, [make_batch(num_options=1)])
    assert values == {}
