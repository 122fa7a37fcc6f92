"""PolicyPublisher: puts the newest policy into the mailbox from which workers pull."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic


class PolicyPublisher(UpdateCallback):
    """Publishes parameters, normaliser statistics and exploration together, under one version: the number of updates.

    Args:
        every: critic updates between publications.
    """

    def __init__(self, every: int = 8) -> None:
        check_types("PolicyPublisher", {"every": every}, PolicyPublisher.__init__)
        if every < 1:
            raise ConfigError(f"PolicyPublisher.every is {every}; it must be at least 1")
        self.every = every
        self._last = 0

    def on_update_end(self, trainer: pl.Trainer, module: OptionCritic) -> None:
        """Publish when due."""
        if module.updates - self._last < self.every:
            return
        self._last = module.updates
        module.set_exploration()
        trainer.datamodule.publish(module.policy, module.updates)  # type: ignore[attr-defined]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from the last publication of a resumed run, or, where that is not known, from where it stands."""
        assert isinstance(pl_module, OptionCritic)
        is_known = pl_module.updates - self.every < self._last <= pl_module.updates
        self._last = self._last if is_known else pl_module.updates

    def state_dict(self) -> dict[str, Any]:
        """Updates at the last publication."""
        return {"last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._last = state_dict["last"]
