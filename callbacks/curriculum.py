"""Curriculum: a setting of the running simulators, made harder as the policy gets better."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl

from claw_lightning.checks import check_numbers, check_types
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic
from claw_lightning.ranks import ranks_of
from claw_lightning.replay import ReplayBatch

log = logging.getLogger(__name__)


class Curriculum(UpdateCallback):
    """Begins with the first stage and goes on to the next when ``metric`` has reached ``threshold`` in the present one.

    ``metric`` is looked at whenever it is logged: at logging steps, and after validations for what they log. Averages
    over episodes (``rollout/...``) count only once as many episodes as they hold have ended since the stage began: what
    was achieved in an easier stage would else carry the run through the following ones. Evaluations keep the setting
    that ``data.env`` gives, so give the hardest there.

    Logs ``curriculum/stage`` (from 0) and ``curriculum/value``. A resumed run goes on in its stage.

    Args:
        setting: what to change; see :meth:`ReplayDataModule.configure_envs`.
        stages: its values, easiest first.
        metric: a logged value that grows with success.
        threshold: its value that ends a stage.
        min_env_steps: environment steps that a stage lasts at least.
    """

    def __init__(
        self,
        setting: str,
        stages: list[float],
        metric: str = "rollout/success",
        threshold: float = 0.8,
        min_env_steps: int = 5000,
    ) -> None:
        values = {
            "setting": setting,
            "stages": stages,
            "metric": metric,
            "threshold": threshold,
            "min_env_steps": min_env_steps,
        }
        check_types("Curriculum", values, Curriculum.__init__)
        if not setting.isidentifier() or setting == "evaluation":
            raise ConfigError(f"Curriculum.setting is '{setting}'; name one setting of the simulator")
        if not stages:
            raise ConfigError("Curriculum.stages is empty; it must hold at least one value")
        for stage in stages:
            check_numbers("Curriculum", {"stages": stage})
        if not metric:
            raise ConfigError("Curriculum.metric is empty; name a logged value, such as rollout/success")
        check_numbers("Curriculum", {"threshold": threshold})
        if min_env_steps < 0:
            raise ConfigError(f"Curriculum.min_env_steps is {min_env_steps}; it cannot be negative")
        self.setting, self.stages, self.metric = setting, list(stages), metric
        self.threshold, self.min_env_steps = threshold, min_env_steps
        self.stage = 0
        self._since_steps: int | None = None  # environment steps and episodes when the stage began
        self._since_episodes = 0
        self._seen: dict[str, float] | None = None  # values of the logging step that was looked at last
        self._pending: float | None = None  # logged before a resumed run's checkpoint, and not looked at yet
        self._module: Any = None
        self._warned = False

    @property
    def state_key(self) -> str:
        """Two settings may have a curriculum each."""
        return self._generate_state_key(setting=self.setting)

    @property
    def value(self) -> float:
        """The setting's present value."""
        return self.stages[self.stage]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set the stage before workers start; here a resumed run's state has been restored."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if self._since_steps is None:
            self._since_steps, self._since_episodes = data.env_steps, data.episodes.total
        self._seen = getattr(pl_module, "latest_metrics", None)  # an earlier run's, if any
        self._module = pl_module
        data.configure_envs(**{self.setting: self.value})

    def on_batch_sampled(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> None:
        """Look at the values of the last logging step, once each."""
        if self._pending is not None:
            value, self._pending = self._pending, None
            self._consider(trainer, value)
        if module.latest_metrics is not self._seen:
            self._seen = module.latest_metrics
            if not self.metric.startswith("val/"):
                self._consider(trainer, self._seen.get(self.metric))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at what the validation has logged."""
        if self.metric.startswith("val/") and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._consider(trainer, trainer.callback_metrics.get(self.metric))

    def _consider(self, trainer: pl.Trainer, value: Any) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        assert self._since_steps is not None
        if self.stage + 1 == len(self.stages) or data.env_steps - self._since_steps < self.min_env_steps:
            return
        if value is None:
            if not self._warned:
                log.warning("Curriculum.metric: nothing has logged %s so far; the stage stays until then", self.metric)
            self._warned = True
            return
        in_average = data.episodes.recent.maxlen if self.metric.startswith("rollout/") else 0
        is_over = data.episodes.total - self._since_episodes >= in_average and float(value) >= self.threshold
        if not ranks_of(trainer).everyone(is_over):
            return
        self.stage += 1
        self._since_steps, self._since_episodes = data.env_steps, data.episodes.total
        log.info("%s reached %.4g: %s is now %g", self.metric, float(value), self.setting, self.value)
        data.configure_envs(**{self.setting: self.value})

    def metrics(self) -> dict[str, Any]:
        """Number and value of the stage."""
        return {"curriculum/stage": float(self.stage), "curriculum/value": float(self.value)}

    def state_dict(self) -> dict[str, Any]:
        """The stage, and when it began."""
        latest = getattr(self._module, "latest_metrics", self._seen)
        pending = None if latest is self._seen or latest is None else latest.get(self.metric)
        return {
            "stage": self.stage, "env_steps": self._since_steps, "episodes": self._since_episodes, "pending": pending,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; where the stages have become fewer, the last one."""
        self.stage = min(state_dict["stage"], len(self.stages) - 1)
        self._since_steps, self._since_episodes = state_dict["env_steps"], state_dict["episodes"]
        self._pending = None if self.metric.startswith("val/") else state_dict.get("pending")
