"""Learner: what surrounds the updates — optimiser steps, logging, evaluation. The schedule itself is in module.py."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.ranks import SINGLE, Ranks, merge_metrics
from claw_lightning.rollout.networks import Policy

#: Setting of the learning rate behind each loss, where the names differ.
RATES = {"option_value": "value_lr", "state_value": "value_lr", "distillation": "actor_lr", "diversity": "actor_lr"}

#: Logging steps between comparisons of all ranks' parameters.
CHECK_EVERY = 10


class Learner(pl.LightningModule):
    """A module with several optimisers whose losses and episodes are logged over environment steps."""

    policy: Policy
    #: Whether batches are to hold the states of a task beside its observations.
    sees_states = False
    _optimizer_names: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.updates = 0
        self.env_steps = 0
        #: Batches whose updates were begun in this process.
        self.batches_begun = 0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._rate_mark = (0.0, 0, 0)
        #: The ranks of the run, see :mod:`claw_lightning.ranks`; this one alone outside of runs.
        self.ranks: Ranks = SINGLE
        self._checked = 0
        #: Seconds spent in each phase, where a callback wants to know; whoever reads them empties it. None: not kept.
        self.phase_seconds: dict[str, float] | None = None
        #: Set when a loss stopped being finite: nothing of that state is saved.
        self.diverged = False

    @property
    def evaluated_policy(self) -> Policy:
        """What evaluations play with."""
        return self.policy

    @property
    def settings(self) -> Any:
        """The constructor's arguments by name (Lightning's hparams)."""
        return self.hparams

    def agent_settings(self) -> dict[str, Any]:
        """Plain settings from which a worker builds its OptionAgent."""
        raise NotImplementedError

    # -- optimiser steps ----------------------------------------------------------------------------------------

    def descend(self, name: str, loss: Tensor, network: nn.Module | None, counted: bool = False) -> None:
        """One optimiser step; only ``counted`` ones go through Lightning's wrapper, which counts global_step."""
        self.descend_together({name: network}, loss, counted)

    def descend_together(self, networks: dict[str, nn.Module | None], loss: Tensor, counted: bool = False) -> None:
        """One step of several optimisers on one loss; the first of them is the counted one.

        With several ranks the gradient is the mean of theirs, before it is clipped: all of them make the same step.
        """
        wrapped = [self.optimizers()[self._optimizer_names.index(name)] for name in networks]  # type: ignore[index]
        for each in wrapped:
            each.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.ranks.size > 1:
            groups = (group for each in wrapped for group in each.optimizer.param_groups)
            self.ranks.average_gradients(p for group in groups for p in group["params"])
        for each, (name, network) in zip(wrapped, networks.items(), strict=True):
            if self.settings.max_grad_norm > 0 and network is not None:
                norm = nn.utils.clip_grad_norm_(network.parameters(), self.settings.max_grad_norm)
                self.record(f"grad_norm/{name}", norm)
            if counted and each is wrapped[0]:
                each.step()
            else:
                each.optimizer.step()

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Parameters of each optimiser, by the name that its losses and settings carry."""
        wrapped: Any = self.optimizers()
        return {
            name: [p for group in each.optimizer.param_groups for p in group["params"]]
            for name, each in zip(self._optimizer_names, wrapped, strict=True)
        }

    def phase(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A part of the update for Lightning's profilers, as ``[OptionCritic]<name>``, and for ``phase_seconds``."""
        if self._trainer is None:
            return contextlib.nullcontext()
        profiled = self.trainer.profiler.profile(f"[{type(self).__name__}]{name}")  # type: ignore[attr-defined]
        return profiled if self.phase_seconds is None else self._timed(name, profiled)

    @contextlib.contextmanager
    def _timed(self, name: str, profiled: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        started = time.perf_counter()
        with profiled:
            yield
        if self.phase_seconds is not None:
            spent = time.perf_counter() - started
            self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + spent

    def callbacks(self) -> list[UpdateCallback]:
        """Callbacks that act between updates."""
        return [c for c in self.trainer.callbacks if isinstance(c, UpdateCallback)]  # type: ignore[attr-defined]

    # -- evaluation ---------------------------------------------------------------------------------------------

    def validation_step(self, seed: int, batch_idx: int) -> None:
        """Noise-free episodes in the evaluator's process."""
        self._evaluate(int(seed), "val")

    def test_step(self, seed: int, batch_idx: int) -> None:
        """As validation, on another seed."""
        self._evaluate(int(seed), "test")

    def predict_step(self, seed: int, batch_idx: int = 0) -> dict[str, Any] | None:
        """Noise-free episodes step by step, as :meth:`ReplayDataModule.record` returns them; None after a stop."""
        data, trainer = self.trainer.datamodule, self.trainer  # type: ignore[attr-defined]
        frames = max(getattr(each, "frames_of", 0) for each in trainer.callbacks)  # type: ignore[attr-defined]
        return data.record(self.evaluated_policy, self.agent_settings(), data.eval_episodes, int(seed), frames)

    def _evaluate(self, seed: int, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        metrics: dict[str, float] = {}
        for prefix in ("", "student_") if self.policy.student is not None else ("",):
            result = None
            if self.ranks.rank == 0:
                policy, agent = self.evaluated_policy, self.agent_settings()
                result = data.evaluate(policy, agent, data.eval_episodes, seed, bool(prefix))
            if self.ranks.size > 1:  # one rank plays, the others look after their workers meanwhile
                result = self.ranks.broadcast(result, data.supervise)
            if result is None or not result["return"]:
                return
            for name in ("return", "length", "success"):
                if values := result[name]:
                    metrics[f"{stage}/{prefix}{name}"] = sum(values) / len(values)
            returns = torch.tensor(result["return"])
            metrics[f"{stage}/{prefix}return_std"] = float(returns.std()) if len(returns) > 1 else 0.0
        for name, value in metrics.items():
            several = self.ranks.size > 1  # the same on all; Lightning wants to be told
            self.log(name, value, batch_size=1, logger=False, prog_bar=name == "val/return", sync_dist=several)
        self._to_loggers({**metrics, "time/env_steps": float(self.env_steps), "time/updates": float(self.updates)})

    # -- logging ------------------------------------------------------------------------------------------------

    def record(self, name: str, value: Tensor) -> None:
        """Accumulate a mean on the device; nothing is synchronised before the next logging step."""
        mean = value.detach().float().mean()
        self._sums[name] = self._sums[name] + mean if name in self._sums else mean
        self._counts[name] = self._counts.get(name, 0) + 1

    def log_training(self) -> None:
        """Send the means since the last logging step to the loggers, every ``log_every_n_steps`` training steps.

        Raises:
            ConfigError: a loss is no longer finite.
        """
        trainer = self.trainer
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        metrics = {name: float(total / self._counts[name]) for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        metrics.update(data.log_metrics())
        for callback in self.callbacks():
            metrics.update(callback.metrics())
        if self.ranks.size > 1:
            metrics = merge_metrics(self.ranks.gather(metrics))
            if self._checked % CHECK_EVERY == 0:
                self.ranks.check_equal(self.state_dict().items())
            self._checked += 1
        broken = [name for name, value in metrics.items() if name.startswith("loss/") and not math.isfinite(value)]
        if broken:
            self.diverged = True
            name = broken[0].removeprefix("loss/")
            raise ConfigError(
                f"{broken[0]} is no longer finite after {self.updates} updates: lower "
                f"model.{RATES.get(name, f'{name}_lr')} or model.reward_scale, or set model.max_grad_norm; "
                "the last checkpoint is from before"
            )
        now, steps, updates = time.monotonic(), self.env_steps, self.updates
        then, steps_then, updates_then = self._rate_mark
        self._rate_mark = (now, steps, updates)
        metrics.update({"time/env_steps": float(steps), "time/updates": float(updates)})
        if then > 0:
            seconds = max(1e-9, now - then)
            metrics["time/env_steps_per_s"] = (steps - steps_then) / seconds
            metrics["time/updates_per_s"] = (updates - updates_then) / seconds
        self._to_loggers(metrics)
        self.latest_metrics = metrics

    #: Values of the last logging step, for progress bars and callbacks.
    latest_metrics: dict[str, float] = {}

    def _to_loggers(self, metrics: dict[str, float]) -> None:
        """Straight to the loggers with environment steps as the axis; ``self.log`` would cost more than an update."""
        if self.ranks.rank > 0:
            return
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.env_steps)
            if isinstance(logger, CSVLogger):
                # By itself it writes at steps that end in 99, which numbers of environment steps seldom do.
                logger.experiment.save()
