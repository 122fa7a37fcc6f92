"""OptionDiagnostics: which options are used, how long they last, how sure each decision is, whether options differ."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from claw_lightning import losses
from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.inspection import action_divergence, networks_that_see, sampled_rows, undisturbed
from claw_lightning.loggers import each_tensorboard
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch

#: Edges of the histograms of termination probabilities.
BINS = np.linspace(0.0, 1.0, 31)


class OptionDiagnostics(UpdateCallback):
    """Logs how options are used and whether they differ. Of one option only ``entropy/action`` is logged.

    Counted over all samples since the last logging step:

    * ``option/share_<k>``: share of steps executed by option k; 1/K is balance, one at 1 is collapse.
    * ``option/usage_entropy``: entropy of the shares divided by log K; 1 is balance.
    * ``option/decision_rate``: share of steps (other than first steps) at which the option ended.
    * ``option/mean_duration``: its inverse, in steps; left out where none ended.
    * ``option/duration_<k>``: the same of option k alone: steps at which it arrived, per one at which it ended there.
      Where episodes are much longer than options that is the mean length of its spells.

    On ``rows`` rows of the last batch, at logging steps:

    * ``entropy/option_policy``, ``entropy/termination`` (of the option that arrives) and, of stochastic actors,
      ``entropy/action`` (of the option that was executed): means in nats. They are at most log K, log 2 and, for
      discrete actions, log A; that of Gaussian actors is differential, at most A log 2, and estimated by one draw per
      row.
    * ``option/embedding_rank``: exp of the entropy of the normalised singular values of the actor's option
      embeddings; K when they are orthogonal, 1 when they are all alike. Like the next two only where the actor has
      embeddings (``model.option_heads``).
    * ``option/embedding_cosine``, ``option/embedding_cosine_max``: cosine similarity of two options' embeddings, mean
      and greatest over all pairs; 0 when they are orthogonal, 1 when they are alike.
    * ``option/action_divergence``, ``option/action_divergence_min``: how far apart two options act in the same state,
      mean and least over all pairs. Deterministic actors: root mean square distance of actions, 0 to 2. Stochastic
      ones: symmetric Kullback-Leibler divergence in nats.
    * TensorBoard histograms ``termination/option_<k>``: probabilities that option k ends where it arrives.

    Nothing of it touches the networks or the run's random numbers.

    Args:
        rows: of the last batch that are looked at.
        histograms: also write histograms to TensorBoard.

    Raises:
        ConfigError: ``rows`` is not positive.
    """

    def __init__(self, rows: int = 256, histograms: bool = True) -> None:
        check_types("OptionDiagnostics", {"rows": rows, "histograms": histograms}, OptionDiagnostics.__init__)
        if rows < 1:
            raise ConfigError(f"OptionDiagnostics.rows is {rows}; it must be at least 1")
        self.rows, self.histograms = rows, histograms
        self._shares: Tensor | None = None  # counts on the module's device between logging steps, [K] each
        self._arrived: Any = 0.0
        self._ended: Any = 0.0
        self._batch: ReplayBatch | None = None
        self._module: OptionCritic | None = None
        self._trainer: pl.Trainer | None = None
        # Its own: the run's random numbers are those of a run without diagnostics.
        self._generator = torch.Generator().manual_seed(0)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember the module, and where histograms go."""
        assert isinstance(pl_module, OptionCritic)
        self._module, self._trainer = pl_module, trainer

    def on_batch_sampled(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> None:
        """Count on the device."""
        self._batch = batch
        num_options = module.policy.num_options
        if num_options < 2:
            return
        # What is not to be counted goes into a bin of its own, which is cut off: steps that do not belong to their
        # segment, and in the last two first steps, at which no option arrives.
        option, previous = batch.option, batch.previous_option
        if batch.valid is not None:
            option, previous = (torch.where(batch.valid, x, num_options) for x in (option, previous))
        arriving = torch.where(batch.first | (previous < 0), num_options, previous)
        ending = torch.where(batch.switched, arriving, num_options)
        counts = [
            torch.bincount(x.flatten(), minlength=num_options + 1)[:num_options].double()
            for x in (option, arriving, ending)
        ]
        self._shares = counts[0] if self._shares is None else self._shares + counts[0]
        self._arrived, self._ended = self._arrived + counts[1], self._ended + counts[2]

    def metrics(self) -> dict[str, Any]:
        """Figures since the last call."""
        module, batch = self._module, self._batch
        if module is None or batch is None:
            return {}
        values = self._counted() if self._shares is not None else {}
        with undisturbed(*networks_that_see(module)):
            values |= self._looked_at(module, batch)
        self._shares, self._arrived, self._ended, self._batch = None, 0.0, 0.0, None
        return values

    def _counted(self) -> dict[str, float]:
        assert self._shares is not None
        shares = (self._shares / self._shares.sum()).tolist()
        arrived, ended = self._arrived.tolist(), self._ended.tolist()
        rate = sum(ended) / max(1, sum(arrived))
        values = {f"option/share_{k}": share for k, share in enumerate(shares)}
        values["option/usage_entropy"] = -sum(p * math.log(p) for p in shares if p > 0) / math.log(len(shares))
        values["option/decision_rate"] = rate
        if rate > 0:
            values["option/mean_duration"] = 1.0 / rate
        values |= {
            f"option/duration_{k}": n / end for k, (n, end) in enumerate(zip(arrived, ended, strict=True)) if end
        }
        return values

    def _looked_at(self, module: OptionCritic, batch: ReplayBatch) -> dict[str, float]:
        policy, rows = module.policy, sampled_rows(module, batch, self.rows)
        raw = policy.actor.forward_all(rows.obs).view(len(rows.obs), policy.num_options, -1)
        values: dict[str, float] = {}
        if policy.actor.kind != "deterministic":
            values["entropy/action"] = float(self._action_entropy(module, raw, rows.option))
        if policy.num_options < 2:
            return values
        probs, beta = policy.option_probs(rows.obs), policy.beta(rows.obs)
        values["entropy/option_policy"] = float(losses.categorical_entropy(probs).mean())
        arrives = rows.previous >= 0 if rows.previous is not None else torch.zeros_like(rows.terminated)
        if bool(arrives.any()):
            assert rows.previous is not None
            option = rows.previous[arrives]
            ending = beta[arrives].gather(1, option.unsqueeze(1)).squeeze(1)
            values["entropy/termination"] = float(losses.bernoulli_entropy(ending).mean())
            self._write_histograms(module, option, ending)
        divergence = action_divergence(policy.actor, raw)
        values |= _over_pairs("option/action_divergence", divergence, "min")
        return values | self._embeddings(policy.actor.embedding)

    def _action_entropy(self, module: OptionCritic, raw: Tensor, option: Tensor) -> Tensor:
        actor = module.policy.actor
        raw = raw[torch.arange(len(raw), device=raw.device), option]
        if actor.kind == "categorical":
            return losses.categorical_entropy(raw.float().softmax(-1)).mean()
        mean, std = actor.gaussian(raw)
        noise = torch.randn(mean.shape, generator=self._generator).to(mean.device)
        return -actor.log_prob(raw, torch.tanh(mean + std * noise)).mean()

    def _write_histograms(self, module: OptionCritic, option: Tensor, ending: Tensor) -> None:
        if not self.histograms or self._trainer is None:
            return
        finite = ending.isfinite()  # of others no histogram can be made; that a run has diverged its losses tell
        option, ending = option[finite].cpu(), ending[finite].cpu()

        def write(writer: Any) -> None:
            for k in range(module.policy.num_options):
                if bool((option == k).any()):
                    writer.add_histogram(f"termination/option_{k}", ending[option == k], module.env_steps, bins=BINS)

        each_tensorboard(self._trainer, write)

    @staticmethod
    def _embeddings(embedding: torch.nn.Embedding | None) -> dict[str, float]:
        if embedding is None:
            return {}
        weight = embedding.weight.detach().float()
        if not bool(weight.isfinite().all()):  # they have no singular values
            return {}
        singular = torch.linalg.svdvals(weight)
        rank = losses.categorical_entropy(singular / singular.sum()).exp()
        directions = torch.nn.functional.normalize(weight, dim=1)
        cosines = _over_pairs("option/embedding_cosine", directions @ directions.T, "max")
        return {"option/embedding_rank": float(rank), **cosines}


def _over_pairs(name: str, matrix: Tensor, extreme: str) -> dict[str, float]:
    """Mean and extreme (``min`` or ``max``) of a symmetric matrix [K, K] over pairs of different options."""
    first, second = torch.triu_indices(len(matrix), len(matrix), offset=1)
    pairs = matrix.cpu()[first, second]
    return {name: float(pairs.mean()), f"{name}_{extreme}": float(getattr(pairs, extreme)())}
