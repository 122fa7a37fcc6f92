"""A Trainer as the command makes it, for scripts: :func:`make_trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter, ProgressBar

from claw_lightning.errors import ConfigError
from claw_lightning.strategy import refuse, register


def shipped_callbacks(
    chosen: Sequence[pl.Callback], command: str = "fit", saves: bool = True, has_bar: bool = True
) -> list[pl.Callback]:
    """The callbacks that were chosen, and those that every run needs, where none of the kind was.

    What nothing is learned without (TargetUpdate, PolicyPublisher, StalenessMonitor) the module itself brings.

    Args:
        chosen: the user's.
        command: fit, validate, test or predict.
        saves: whether checkpoints are written.
        has_bar: whether progress is shown.
    """
    import callbacks

    wanted: list[type[pl.Callback]] = [
        callbacks.OrderlyStop, callbacks.WorkerHealth, callbacks.OptionDiagnostics, callbacks.QRange,
        callbacks.PipelineThroughput,
    ]  # fmt: skip
    if saves:
        wanted.append(callbacks.RunCheckpoint)  # also keeps Lightning from adding its own, which saves at epochs
    if has_bar and not any(isinstance(each, ProgressBar) for each in chosen):
        wanted.append(callbacks.TrainingProgress)
    if command == "predict" and not any(isinstance(each, BasePredictionWriter) for each in chosen):
        wanted.append(callbacks.RolloutWriter)
    return [*chosen, *(cls() for cls in wanted if not any(isinstance(each, cls) for each in chosen))]


def make_trainer(**settings: Any) -> pl.Trainer:
    """A ``lightning.pytorch.Trainer`` with what the command adds: callbacks, logger, strategies and lengths of epochs.

    Args:
        settings: of the Trainer; each wins over what is said here. ``callbacks`` come in addition.

    Raises:
        ConfigError: a strategy that cannot train this module, or something in ``callbacks`` that is no callback.
    """
    from claw_lightning.loggers import RunLogger

    register()
    if isinstance(settings.get("strategy"), str):
        refuse(settings["strategy"])
    defaults: dict[str, Any] = {
        "max_epochs": -1,  # the data module ends the run, at max_env_steps
        "num_sanity_val_steps": 0,
        "limit_train_batches": 100,
        "check_val_every_n_epoch": 5,
        "log_every_n_steps": 10,
    }
    if settings.get("logger", True) is True:
        settings["logger"] = RunLogger("runs", name=None)
    chosen = settings.pop("callbacks", None) or []
    chosen = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
    for each in chosen:
        if not isinstance(each, pl.Callback):
            raise ConfigError(f"make_trainer(callbacks): {each!r} is no callback; give objects, as in [TargetUpdate()]")
    saves, has_bar = (settings.get(key) is not False for key in ("enable_checkpointing", "enable_progress_bar"))
    return pl.Trainer(**{**defaults, **settings, "callbacks": shipped_callbacks(chosen, "fit", saves, has_bar)})
