"""OptionDiagnostics: which options are used, how long they last, whether they differ."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch

from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch


class OptionDiagnostics(UpdateCallback):
    """Logs for K > 1, over the samples since the last logging step.

    * ``option/share_<k>``: share of steps executed by option k; 1/K is balance, one at 1 is collapse.
    * ``option/usage_entropy``: entropy of the shares divided by log K; 1 is balance.
    * ``option/decision_rate``: share of steps (other than first steps) at which the option ended.
    * ``option/mean_duration``: its inverse, in steps; left out where none ended.
    * ``option/embedding_rank``: exp of the entropy of the normalised singular values of the actor's option
      embeddings; K when they are orthogonal, 1 when they are all alike.
    """

    def __init__(self) -> None:
        self._shares: torch.Tensor | None = None
        self._ended: Any = 0.0  # tensors on the module's device between logging steps
        self._steps: Any = 0.0
        self._module: OptionCritic | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember the module."""
        assert isinstance(pl_module, OptionCritic)
        self._module = pl_module

    def on_batch_sampled(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> None:
        """Count on the device."""
        num_options = module.policy.num_options
        if num_options < 2:
            return
        counts = torch.bincount(batch.option.flatten(), minlength=num_options).double()
        self._shares = counts if self._shares is None else self._shares + counts
        inner = ~batch.first
        self._ended = self._ended + (batch.switched & inner).sum()
        self._steps = self._steps + inner.sum()

    def metrics(self) -> dict[str, Any]:
        """Figures since the last call."""
        if self._shares is None or self._module is None:
            return {}
        shares = (self._shares / self._shares.sum()).tolist()
        entropy = -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))
        rate = float(self._ended) / max(1.0, float(self._steps))
        values = {f"option/share_{k}": share for k, share in enumerate(shares)}
        values |= {
            "option/usage_entropy": entropy,
            "option/decision_rate": rate,
        }
        if rate > 0:
            values["option/mean_duration"] = 1.0 / rate
        embedding = self._module.policy.actor.embedding
        if embedding is not None:
            singular = torch.linalg.svdvals(embedding.weight.detach().float())
            p = singular / singular.sum()
            values["option/embedding_rank"] = float((-(p * p.clamp_min(1e-12).log()).sum()).exp())
        self._shares, self._ended, self._steps = None, 0.0, 0.0
        return values
