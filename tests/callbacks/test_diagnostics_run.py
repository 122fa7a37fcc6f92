"""All diagnostics together in whole runs: nothing is disturbed, and TensorBoard has what the pages promise."""

import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import OptionDiagnostics, PipelineThroughput, QRange, WorkerHealth
from claw_lightning.loggers import LAYOUT, RunLogger
from tests.runs import ROOT, fit_lockstep, tensors

DIAGNOSTICS = (OptionDiagnostics, QRange, PipelineThroughput, WorkerHealth)


@pytest.mark.parametrize("model", [{"num_options": 3}, {"num_options": 1, "actor": "gaussian"}])
def test_a_lockstep_run_is_the_same_to_the_bit_with_and_without(model, tmp_path):
    logger = RunLogger(str(tmp_path / "runs"), name=None)
    _, plain, _ = fit_lockstep(tmp_path, model=model)
    _, watched, _ = fit_lockstep(tmp_path, model=model, callbacks=[cls() for cls in DIAGNOSTICS], logger=logger)
    for (name, mine), (_, theirs) in zip(tensors(plain), tensors(watched), strict=True):
        assert torch.equal(mine, theirs), name
    found = EventAccumulator(logger.log_dir, size_guidance={"histograms": 0}).Reload().Tags()
    assert "custom_scalars__config__" in found["tensors"]
    names = {"q/p50", "q/disagreement", "learner/forward_backward", "memory/learner_gb", "grad_norm/critic"}
    if model["num_options"] > 1:
        names |= {"option/action_divergence", "option/embedding_cosine", "entropy/termination"}
        assert {f"termination/option_{k}" for k in range(3)} <= set(found["histograms"])
    else:
        names.add("entropy/action")
    assert names <= set(found["scalars"])


def test_every_chart_shows_names_that_are_documented():
    documented = (ROOT / "docs/logged.md").read_text()
    for charts in LAYOUT.values():
        for kind, patterns in charts.values():
            for pattern in patterns:
                group = pattern.split("/")[0]
                assert f"`{group}/" in documented, pattern
                assert kind == "Multiline" or re.fullmatch(r"[a-z0-9/_]+", pattern), (
                    "a margin takes names, not patterns"
                )
