"""QRange: whether the critics' values are possible, agree, and come from gradients of a sane size."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.inspection import networks_that_see, sampled_rows, undisturbed
from claw_lightning.minibatch import Minibatch
from claw_lightning.module import OptionCritic
from claw_lightning.replay import ReplayBatch

log = logging.getLogger(__name__)


class QRange(UpdateCallback):
    """Logs the range of the critics at logging steps, on some rows of the last batch, in scaled rewards.

    * ``q/min``, ``q/p05``, ``q/p50``, ``q/p95``, ``q/max``: values of the executed options and actions, means over the
      critics. With ``policy_gradient`` of the executed options.
    * ``q/disagreement``: greatest less smallest critic, mean over rows; of several critics alone.
    * ``q/target_min``, ``q/target_max``: one-step targets ``r + gamma (1 - terminated) U(s', o)`` of these rows.
    * ``q/bound``: greatest absolute reward that was drawn so far divided by ``1 - gamma``: no value can be beyond. With
      a stochastic actor the rewards of its entropy are counted in, by their size at the highest entropy.
    * ``grad_norm/<network>``: of the last update, where ``model.max_grad_norm`` does not clip (where it does they are
      logged anyway, before clipping).

    It warns once where a value lies beyond ``limit`` times the bound. It does not where callbacks add rewards of their
    own: nothing bounds those.

    Args:
        rows: of the last batch that are looked at.
        limit: multiple of the bound above which it warns, at least 1.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, rows: int = 256, limit: float = 3.0) -> None:
        check_types("QRange", {"rows": rows, "limit": limit}, QRange.__init__)
        if rows < 1:
            raise ConfigError(f"QRange.rows is {rows}; it must be at least 1")
        if not 1 <= limit < math.inf:
            raise ConfigError(f"QRange.limit is {limit}; it must be at least 1")
        self.rows, self.limit = rows, limit
        self._greatest: Any = 0.0  # absolute reward, on the module's device
        self._batch: ReplayBatch | None = None
        self._module: OptionCritic | None = None
        self._has_warned = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember whose critics to look at."""
        assert isinstance(pl_module, OptionCritic)
        self._module = pl_module

    def on_batch_sampled(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> None:
        """Keep the batch and its greatest reward."""
        self._batch = batch
        greatest = batch.reward.abs().amax()
        self._greatest = torch.maximum(torch.as_tensor(self._greatest, device=greatest.device), greatest)

    def metrics(self) -> dict[str, Any]:
        """Figures of the last batch."""
        module, batch = self._module, self._batch
        if module is None or batch is None:
            return {}
        self._batch = None
        critics: list[nn.Module] = [module.value_network[0]] if module.policy_gradient is not None else []
        if module.policy_gradient is None:
            critics += [module.critic, module.target_critic, module.next_values.actor]
        with undisturbed(*networks_that_see(module), *critics):
            rows = sampled_rows(module, batch, self.rows)
            q, values = self._executed(module, rows), {}
            if module.policy_gradient is None:
                values = self._targets(module, rows)
        mean = q.mean(0)
        marks = torch.quantile(mean, torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], device=mean.device)).tolist()
        values |= {f"q/{name}": mark for name, mark in zip(("min", "p05", "p50", "p95", "max"), marks, strict=True)}
        if len(q) > 1:
            values["q/disagreement"] = float((q.amax(0) - q.amin(0)).mean())
        values["q/bound"] = bound = self._bound(module)
        values |= self._gradients(module)
        self._warn_of_divergence(module, max(-marks[0], marks[-1]), bound)
        return values

    @staticmethod
    def _executed(module: OptionCritic, rows: Minibatch) -> Tensor:
        """Values of what was executed, [C, R]."""
        if module.policy_gradient is not None:
            return module.value_network[0](rows.judged).float().gather(1, rows.option.unsqueeze(1)).T
        return module.critic(rows.judged, rows.action, rows.option).float()

    @staticmethod
    def _targets(module: OptionCritic, rows: Minibatch) -> dict[str, float]:
        device = module.device
        # The target policy's noise is drawn; the run's own numbers stay as they are.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            arrival = module.next_values.arrivals(rows.next_judged).gather(1, rows.option.unsqueeze(1)).squeeze(1)
        target = rows.reward + module.settings.gamma * (~rows.terminated).float() * arrival
        return {"q/target_min": float(target.amin()), "q/target_max": float(target.amax())}

    def _bound(self, module: OptionCritic) -> float:
        h = module.settings
        reward = float(self._greatest) * abs(h.reward_scale)
        if module.log_temperature is not None and module.spec is not None:
            size = module.spec.num_actions
            greatest = math.log(size) if size else module.spec.action_size * math.log(2.0)
            reward += float(module.log_temperature.detach().exp()) * max(greatest, abs(module.target_entropy))
        return reward / (1.0 - h.gamma) if h.gamma < 1 else math.inf

    @staticmethod
    def _gradients(module: OptionCritic) -> dict[str, float]:
        """Norms of the gradients that the last update has left."""
        if module.settings.max_grad_norm > 0:
            return {}
        found = {}
        for name, parameters in module.parameter_groups().items():
            gradients = [each.grad for each in parameters if each.grad is not None]
            if gradients:
                norms = torch.stack(torch._foreach_norm(gradients))
                found[f"grad_norm/{name}"] = float(norms.norm())
        return found

    def _warn_of_divergence(self, module: OptionCritic, greatest: float, bound: float) -> None:
        if self._has_warned or bound == 0 or greatest <= self.limit * bound:
            return
        if any(type(each).intrinsic_reward is not UpdateCallback.intrinsic_reward for each in module.callbacks()):
            return
        self._has_warned = True
        log.warning(
            "the critics' values reach %.3g, rewards allow %.3g at most (QRange): they diverge; lower model.critic_lr "
            "or model.tau, or set model.max_grad_norm or model.target_range",
            greatest, bound,
        )  # fmt: skip
