"""The command ``lightning {fit,validate,test,predict} --config FILE ... [--key value]``."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from claw_lightning.limits import keep_freed_memory

SUBCOMMANDS = ("fit", "validate", "test", "predict")
LOG_FILE = "error.log"


def expand_configs(arguments: list[str]) -> list[str]:
    """Replace names of shipped configurations behind ``--config`` by their paths.

    Raises:
        FileNotFoundError: one line with the file's name and those that are shipped.
    """
    from claw_lightning.configs import find_config

    expanded, expects = [], False
    for argument in arguments:
        if expects:
            argument = str(find_config(argument))
        elif argument.startswith("--config="):
            argument = "--config=" + str(find_config(argument.partition("=")[2]))
        expects = argument == "--config"
        expanded.append(argument)
    return expanded


def make_cli_class() -> Any:
    """The LightningCLI of this project; a function, because importing Lightning takes seconds."""
    from jsonargparse import set_parsing_settings
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    import callbacks
    from claw_lightning.data import EnvConfig, ReplayDataModule
    from claw_lightning.module import OptionCritic
    from claw_lightning.rollout.envs import EnvPoolEnv, GymnasiumEnv, VectorEnv
    from claw_lightning.rollout.envs.base import plain_init_args

    shipped_adapters = (EnvPoolEnv, GymnasiumEnv)  # imported, so that their bare names are known
    assert all(issubclass(adapter, VectorEnv) for adapter in shipped_adapters)
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)

    class ClawCLI(LightningCLI):
        """OptionCritic and ReplayDataModule, with the callbacks that every run needs."""

        def __init__(self) -> None:
            super().__init__(
                OptionCritic,
                ReplayDataModule,
                subclass_mode_model=False,
                subclass_mode_data=False,
                save_config_kwargs={"overwrite": True},
                auto_configure_optimizers=False,
                parser_kwargs={"parser_mode": "omegaconf+", "prog": "lightning"},
                trainer_defaults={
                    "logger": {
                        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                        "init_args": {"save_dir": "runs", "name": None},
                    },
                    "num_sanity_val_steps": 0,
                    "max_epochs": -1,
                },
            )

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            """Those of Lightning; prediction writes nothing yet, but keeps its name."""
            return LightningCLI.subcommands()

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            """Check ``data.env`` like any class, but build it in the workers only."""

            def recipe(cls: type, *args: Any, **init_args: Any) -> EnvConfig:
                return EnvConfig(f"{cls.__module__}.{cls.__qualname__}", plain_init_args(init_args))

            parser.add_instantiator(recipe, VectorEnv, subclasses=True)

        def _parse_ckpt_path(self) -> None:
            # Lightning lets a checkpoint's hyper-parameters silently override the command line; only where no
            # training follows is that what one wants.
            if self.config.get("subcommand") != "fit":
                super()._parse_ckpt_path()

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            """Add shipped callbacks of which the configuration has none of the kind."""
            trainer = super().instantiate_trainer(**kwargs)
            wanted: list[Callable[[], Any]] = [callbacks.OrderlyStop, callbacks.RunCheckpoint]
            wanted.append(callbacks.OptionDiagnostics)
            if trainer.progress_bar_callback is not None:
                wanted.append(callbacks.TrainingProgress)
                trainer.callbacks = [
                    c for c in trainer.callbacks if type(c).__module__.startswith("callbacks") or not is_bar(c)
                ]
            for cls in wanted:
                if not any(type(c) is cls for c in trainer.callbacks):
                    trainer.callbacks.append(cls())
            # Saving is RunCheckpoint's; Lightning's default counts optimiser steps and would save at epochs.
            trainer.callbacks = [c for c in trainer.callbacks if type(c).__name__ != "ModelCheckpoint" or c.monitor]
            return trainer

    def is_bar(callback: Any) -> bool:
        from lightning.pytorch.callbacks import ProgressBar

        return isinstance(callback, ProgressBar)

    return ClawCLI


def silence_noise() -> None:
    """Hide messages that no user of this command can act on."""
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*The `srun` command is available.*")
    warnings.filterwarnings("ignore", message=".*jsonargparse.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*is deprecated.*", module="lightning.*")
    warnings.filterwarnings("ignore", message=".*no `predict_dataloader`.*")


def report(error: BaseException) -> int:
    """One line on the screen, the traceback in a file; returns the exit status."""
    path = Path(os.environ.get("CLAW_ERROR_LOG", LOG_FILE))
    text = str(error).strip().splitlines() or [type(error).__name__]
    from claw_lightning.errors import ClawError
    from claw_lightning.rollout.envs.base import EnvError

    name = "" if isinstance(error, (ClawError, EnvError, FileNotFoundError)) else f"{type(error).__name__}: "
    try:
        with path.open("a") as file:
            traceback.print_exception(error, file=file)
        where = f" (traceback: {path})"
    except OSError:
        where = ""
    print(f"lightning: error: {name}{text[0]}{where}", file=sys.stderr)
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console commands; returns (or exits with) the status.

    0: done. 1: an error, told in one line. 2: the command line is wrong. 128 + n: ended orderly by signal n.
    """
    # Plug-ins beside the user's configuration are importable, as with ``python -m``.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    silence_noise()
    keep_freed_memory()
    received = None
    try:
        sys.argv[1:] = expand_configs(list(sys.argv[1:] if arguments is None else arguments))
        cli = make_cli_class()()
        received = next((c.received for c in cli.trainer.callbacks if type(c).__name__ == "OrderlyStop"), None)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error)
    return 0 if received is None else 128 + received


if __name__ == "__main__":
    sys.exit(main())
