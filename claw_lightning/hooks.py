"""Hook points beyond Lightning's own, for callbacks that must act between the updates of one ``training_step``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch import Tensor

from claw_lightning.ranks import ranks_of

if TYPE_CHECKING:
    from claw_lightning.module import OptionCritic
    from claw_lightning.replay import ReplayBatch


def end_run(trainer: pl.Trainer) -> None:
    """End the run after this training step, with a validation on the way out.

    With several ranks one of them is enough: all end together, one step later.
    """
    data = getattr(trainer, "datamodule", None)
    if ranks_of(trainer).size > 1 and data is not None and not data.finished:
        data.ask_to_stop()
        return
    trainer.should_stop = True
    # Lightning validates then too, but else only in epochs that are due.
    trainer.check_val_every_n_epoch = None


class UpdateCallback(pl.Callback):
    """A callback that is also called after every critic update.

    One ``training_step`` makes ``data.updates_per_step`` updates; Lightning's batch hooks fire once for all of them.
    """

    def on_update_end(self, trainer: pl.Trainer, module: OptionCritic) -> None:
        """After one critic update (and the policy updates that were due). ``module.updates`` has been counted."""

    def on_batch_sampled(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> None:
        """Before the updates of a ``training_step``, with the raw batch."""

    def intrinsic_reward(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> Tensor | None:
        """What to add to the rewards of a batch before they are learned from, [U, B] or [U, B, L]; None: nothing."""
        return None

    def metrics(self) -> dict[str, Any]:
        """Values to log at the next logging step; called once per ``log_every_n_steps``. May reset accumulators."""
        return {}
