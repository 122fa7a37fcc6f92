"""The command ``lightning {fit,validate,test,predict} --config FILE ... [--key value]``."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from claw_lightning import checkpoints, slurm
from claw_lightning.errors import ClawError, ConfigError, UsageError
from claw_lightning.limits import computes_bfloat16, keep_freed_memory
from claw_lightning.logs import NoiseFilter
from claw_lightning.signals import Interrupted, StartUpSignals
from claw_lightning.usage import (
    CONFIG_FLAGS,
    check_config,
    command_help,
    command_of,
    environment_settings,
    explain_class,
    explain_interpolation,
    main_help,
    replaced_callbacks,
    take_topic,
    with_environment,
)

log = logging.getLogger(__name__)

LOG_FILE = "error.log"
_help_topic: str | None = None  # what stood behind --help
MAX_LINE = 500  # characters of an error line; the whole text is in the log file


def expand_configs(arguments: list[str]) -> list[str]:
    """Replace names of shipped configurations behind ``--config`` by their paths.

    Plug-ins beside a configuration are importable from then on, here and in workers.

    Raises:
        FileNotFoundError: one line with the file's name and those that are shipped.
        UsageError: a file that cannot be a configuration (:func:`check_config`).
    """
    from claw_lightning.configs import add_import_folder, find_config

    expanded, paths, expects = [], list[Path](), False
    for argument in arguments:
        flag, has_value, value = argument.partition("=")
        if expects or (has_value and flag in CONFIG_FLAGS):
            path = find_config(argument if expects else value)
            check_config(path)
            add_import_folder(path)
            paths.append(path)
            argument = str(path) if expects else f"{flag}={path}"
            expects = False
        else:
            expects = argument in CONFIG_FLAGS
        expanded.append(argument)
    for line in replaced_callbacks(paths):
        log.warning("%s", line)
    return expanded


def make_cli_class() -> Any:
    """The LightningCLI of this project; a function, because importing Lightning takes seconds."""
    from jsonargparse import set_parsing_settings
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
    from omegaconf.errors import OmegaConfBaseException

    import callbacks
    from claw_lightning.configs import import_lines, list_configs
    from claw_lightning.data import EnvConfig, ReplayDataModule
    from claw_lightning.module import OptionCritic
    from claw_lightning.ranks import open_run_folder, run_folder
    from claw_lightning.rollout.envs import CodedEnv, EnvPoolEnv, FaultyEnv, FourRoomsEnv, GymnasiumEnv, VectorEnv
    from claw_lightning.rollout.envs.base import plain_init_args
    from claw_lightning.rollout.networks import NetworkBlock
    from claw_lightning.strategy import refuse, register
    from claw_lightning.trainer import shipped_callbacks

    shipped_adapters = (
        CodedEnv,
        EnvPoolEnv,
        FaultyEnv,
        FourRoomsEnv,
        GymnasiumEnv,
    )  # imported, so that their bare names are known
    assert all(issubclass(adapter, VectorEnv) for adapter in shipped_adapters)
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    register()

    class OneLineParser(LightningArgumentParser):
        """Raises what is wrong instead of printing pages of usage above it."""

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            """Parsers of nested values report to those around them; the outermost ends here."""
            if not self.exit_on_error:
                super().error(message, ex)
            line = explain_usage(message, known_keys(self))
            for key, (variable, _) in environment_settings(command_of(sys.argv[1:]), os.environ).items():
                if f"--{key}=" in line or f'"{key}"' in line:
                    line += f" (set by the environment variable {variable})"
            raise UsageError(line) from ex

        def format_help(self, formatter: Any = None) -> str:
            """Short for the commands; classes and the main parser have their own."""
            command = command_of(sys.argv[1:])
            if command is None and self._subcommands_action is not None:
                return main_help(list_configs())
            if command is None or "--model" not in self._option_string_actions:
                return str(super().format_help() if formatter is None else super().format_help(formatter))
            return command_help(self, command, _help_topic, list_configs())

    class SavedConfig(SaveConfigCallback):
        """The settings of the run, with everything that was typed, beside its logs; no file is ever replaced.

        ``fit`` writes ``config.yaml`` (into a folder that has another one: ``config_1.yaml`` and so on), the other
        commands ``validate.yaml`` and the like. Without a logger the folder is ``logs/``.
        """

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            """Nothing yet: what is refused leaves no folder."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """On the first rank; Lightning's own asks all of them."""
            folder = open_run_folder(trainer)  # on every rank: it may be broadcast
            if trainer.is_global_zero and not self.already_saved:
                save_config(
                    import_lines() + self.parser.dump(self.config, skip_none=False, skip_link_targets=False),
                    folder / "logs" if not trainer.loggers else folder,
                    "config" if trainer.state.fn == "fit" else str(trainer.state.fn.value),
                )
            self.already_saved = True

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            """As for a fit, where there is none."""
            if not self.already_saved:
                self.on_fit_start(trainer, pl_module)

        on_test_start = on_predict_start = on_validation_start

    class ClawCLI(LightningCLI):
        """OptionCritic and ReplayDataModule, with the callbacks that every run needs."""

        def __init__(self) -> None:
            super().__init__(
                OptionCritic,
                ReplayDataModule,
                subclass_mode_model=False,
                subclass_mode_data=False,
                save_config_callback=SavedConfig,
                auto_configure_optimizers=False,
                parser_class=OneLineParser,
                parser_kwargs={"parser_mode": "omegaconf+", "prog": "lightning"},
                trainer_defaults={
                    "logger": {
                        "class_path": "claw_lightning.loggers.RunLogger",
                        "init_args": {"save_dir": "runs", "name": None},
                    },
                    "num_sanity_val_steps": 0,
                    "max_epochs": -1,
                },
            )

        @staticmethod
        def subcommands() -> dict[str, set[str]]:
            """The command that was typed, or all: the parser of each takes as long to build as to use."""
            known, typed = LightningCLI.subcommands(), command_of(sys.argv[1:])
            return known if typed is None else {typed: known[typed]}

        def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
            """As Lightning, with a line about interpolations that cannot be resolved."""
            try:
                super().parse_arguments(parser, args)
            except OmegaConfBaseException as error:
                raise UsageError(explain_interpolation(error, known_keys(parser))) from error

        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            """Check ``data.env`` and ``model.network`` like any class, but leave building them to who needs them."""

            def recipe(cls: type, *args: Any, **init_args: Any) -> EnvConfig:
                return EnvConfig(f"{cls.__module__}.{cls.__qualname__}", plain_init_args(init_args))

            def block(cls: type, *args: Any, **init_args: Any) -> dict[str, Any]:
                return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": init_args}

            parser.add_instantiator(recipe, VectorEnv, subclasses=True)
            parser.add_instantiator(block, NetworkBlock, subclasses=True)
            parser.add_instantiator(construct, object, subclasses=True)  # of the kinds above the first one counts

        def _set_seed(self) -> None:
            """As Lightning, which names neither the key nor the cure."""
            try:
                super()._set_seed()
            except ValueError as error:
                seed = self._get(self.config, "seed_everything")
                raise ConfigError(f"seed_everything is {seed}; give a number from 0 to {2**32 - 1}") from error

        def _parse_ckpt_path(self) -> None:
            """Find and read the checkpoint, and keep its settings of the model where the user gave none.

            Lightning lets them win over the command line, without a word.
            """
            subcommand = self.config.get("subcommand")
            options = self.config.get(subcommand) or {}
            path = options.get("ckpt_path")
            requeued = slurm.last_checkpoint() if subcommand == "fit" else None
            if requeued is not None:  # whatever the first run of this job began with
                log.info("job %s was requeued: going on from %s", slurm.job_id(), requeued)
                path = str(requeued)
            if path in checkpoints.OTHERS:
                return
            own = checkpoints.own_folder(options.get("config") or [])
            roots = checkpoints.run_folders(options.get("trainer") or {}) if own is None else [own]
            path = checkpoints.find_checkpoint(path, roots)
            if path is None:
                return
            stored = checkpoints.read_checkpoint(path, training=subcommand == "fit")
            self.config[f"{subcommand}.ckpt_path"] = path
            typed = self.parser.parse_args(sys.argv[1:], defaults=False).as_dict().get(subcommand, {})
            kept = checkpoints.untyped(stored, options["model"].as_dict(), typed.get("model", {}))
            values: dict[str, Any] = {"model": kept}
            # The chance goes on as well. (A seed of true asks for any.)
            seed = stored.get("ReplayDataModule", {}).get("seed")
            if subcommand == "fit" and seed is not None and typed.get("seed_everything", True) is True:
                values["seed_everything"] = seed
            self.config = self.parser.parse_object({subcommand: values}, self.config)

        def after_fit(self) -> None:
            """Say what came out."""
            self._print_figures()
            if self.trainer.is_global_zero and not getattr(self.trainer, "fast_dev_run", False):
                say(f"run folder: {run_folder(self.trainer)}")

        def after_validate(self) -> None:
            """Say what came out."""
            self._print_figures()

        after_test = after_validate

        def predict(self, **kwargs: Any) -> None:
            """As Lightning; what is played goes to files, not through memory."""
            self.trainer.predict(**{**kwargs, "return_predictions": False})

        def after_predict(self) -> None:
            """Say where it is."""
            for each in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(each, callbacks.RolloutWriter) and self.trainer.is_global_zero:
                    say(f"rollouts: {each.file(self.trainer)}" + (f", {each.video}" if each.video else ""))

        def _print_figures(self) -> None:
            # Lightning's own table shows only what `self.log` also sends to loggers; the module sends it there itself.
            values = {name: float(value) for name, value in sorted(self.trainer.callback_metrics.items())}
            if values and self.trainer.is_global_zero:
                say("  ".join(f"{name} {value:.4g}" for name, value in values.items()))

        def instantiate_trainer(self, **kwargs: Any) -> Any:
            """Add shipped callbacks of which the configuration has none of the kind."""
            settings = self._get(self.config_init, "trainer", default={})
            if isinstance(settings.get("strategy"), str):
                refuse(settings["strategy"])
            chosen = settings.get("callbacks") or []
            chosen = list(chosen) if isinstance(chosen, (list, tuple)) else [chosen]
            saves, has_bar = (settings.get(f"enable_{name}") is not False for name in ("checkpointing", "progress_bar"))
            chosen = shipped_callbacks(chosen, str(self.subcommand), saves, has_bar)
            kwargs = {**kwargs, "callbacks": chosen}
            if settings.get("accelerator") == "cpu" and settings.get("precision") == "bf16-mixed":
                kwargs["precision"] = usable_precision("bf16-mixed")
            return super().instantiate_trainer(**kwargs)

    return ClawCLI


def construct(cls: type, *args: Any, **init_args: Any) -> Any:
    """An instance of a class that a configuration names.

    Raises:
        ConfigError: its constructor failed, or wanted to end the program; one line with the class and the reason.
    """
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        return cls(*args, **init_args)
    except ClawError:
        raise
    except SystemExit as error:
        raise ConfigError(f"{name}: its constructor ended the program (exit({exit_text(error)}))") from error
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        raise ConfigError(f"{name}: its constructor failed ({reason})") from error


def exit_text(error: SystemExit) -> str:
    """What was given to ``exit``."""
    return "" if error.code is None else " ".join(str(error.code).split())


def who_exited(error: SystemExit) -> str | None:
    """Where the program was ended by other code than a parser's (``--help``): file, line, function; None: nowhere."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in each.filename]
    if not frames or Path(frames[-1].filename).name == "argparse.py":
        return None
    return f"{frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name}"


def usable_precision(precision: str) -> str:
    """What ``trainer.precision`` becomes on this processor, with a warning where that is something else."""
    if computes_bfloat16():
        return precision
    log.warning(
        "trainer.precision: this processor has no units for bfloat16 and would be tens of times slower with %s; "
        "using 32-true",
        precision,
    )
    return "32-true"


def say(line: str) -> None:
    """Print a line; that nobody reads any more (a closed terminal or pipe) is no error of the run."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def known_keys(parser: Any) -> list[str]:
    """Dotted keys of all options of a parser and its sub-commands."""
    keys = []
    for action in parser._actions:
        if isinstance(getattr(action, "choices", None), dict):
            keys += [key for sub in action.choices.values() for key in known_keys(sub)]
        keys += [option.lstrip("-") for option in action.option_strings]
    return keys


def explain_usage(message: str, keys: Iterable[str]) -> str:
    """A parser's message on one line; for a key that does not exist, with the nearest that do."""
    line = " ".join(message.split())
    if "Union subtypes" in line:  # of all the alternatives' complaints, the one about what was written
        errors = line.partition(" Errors: - ")[2].partition(" Given value type: ")[0].split(" - ")
        telling = [error for error in errors if not error.startswith("Expected a <")]
        line = line.partition(": ")[0] + ": " + telling[0] if telling else line
    line = explain_class(line)
    if line.startswith("unrecognized arguments: "):
        line = "no such option: " + line.partition(": ")[2]
        unknown = line.partition("--")[2].split("=")[0].split(" ")[0]
    else:
        found = re.search(r"does not accept option '([^']+)'|Option '([^']+)' is not accepted", line)
        unknown = next((name for name in found.groups() if name), "") if found else ""
    close = difflib.get_close_matches(unknown, set(keys), n=1, cutoff=0.8) if unknown else []
    return f"{line} (did you mean {close[0]}?)" if close else line


def save_config(text: str, folder: Path, name: str) -> Path:
    """Write a configuration into a folder under a name that is free, unless it is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(10_000):
        path = folder / (f"{name}_{number}.yaml" if number else f"{name}.yaml")
        if not path.exists():
            path.write_text(text)
            return path
        if path.read_text() == text:
            return path
    raise ConfigError(f"{folder}: holds too many configurations; take another folder")


def set_up_messages() -> None:
    """One handler and one format for all messages, and none that no user of this command can act on."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        if not any(isinstance(f, NoiseFilter) for f in handler.filters):
            handler.addFilter(NoiseFilter())
    # Of several ranks of a machine one tells how the run goes; all have log files, and all tell what is wrong.
    logging.getLogger("claw_lightning").setLevel(logging.INFO)
    if rank_suffix():
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.WARNING)
    for text in (
        ".*does not have many workers.*",
        ".*The `srun` command is available.*",
        ".*no `predict_dataloader`.*",
        ".*Couldn't infer the batch indices.*",
        ".*Box (low|high)'s precision lowered.*",
    ):
        warnings.filterwarnings("ignore", message=text)
    warnings.filterwarnings("ignore", message=".*jsonargparse.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*is deprecated.*", module="lightning.*")


def unify_lightning_messages() -> None:
    """Take away the handlers that Lightning's loggers add beside the root's: every line appeared twice."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that led to it, each once: a stored exception that is raised again can close a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def report(error: BaseException) -> int:
    """One line on the screen, the traceback in a file; returns the exit status."""
    from claw_lightning.rollout.envs.base import EnvError

    path = Path(os.environ.get("CLAW_ERROR_LOG", LOG_FILE))
    plain = (ClawError, EnvError, FileNotFoundError)
    # What a constructor had to say comes wrapped in the parser's own error.
    causes = list(chain(error))
    shown = next((e for e in causes if isinstance(e, plain)), causes[-1] if "Union subtypes" in str(error) else error)
    is_plain = isinstance(shown, plain)
    text = " ".join(str(shown).split()) or type(shown).__name__
    line = text if is_plain or text == type(shown).__name__ else f"{type(shown).__name__}: {text}"
    if isinstance(shown, OSError) and shown.filename is not None and not is_plain:
        line = f"{shown.filename}: {shown.strerror}"
        if any(f"{os.sep}loggers{os.sep}" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
            line = f"trainer.logger cannot write {line}; set its save_dir to a folder that can be written"
    if len(line) > MAX_LINE:
        line = line[: MAX_LINE - 3] + "..."
    try:
        with path.open("a") as file:
            traceback.print_exception(error, file=file)
        where = f" (traceback: {path})"
    except OSError:
        where = ""
    with contextlib.suppress(OSError):  # the terminal may have gone
        print(f"lightning: error{rank_suffix()}: {line}{where}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, UsageError) else 1


def rank_suffix() -> str:
    """Which rank of this machine speaks, where it is not the one that was started by the user."""
    number = os.environ.get("LOCAL_RANK", "0")
    return f" (rank {number} of this machine)" if number not in ("", "0") else ""


def interrupted(number: int) -> int:
    """Say that a signal came before the run began; returns the exit status."""
    with contextlib.suppress(OSError):
        print(f"lightning: {signal.Signals(number).name} before the run began", file=sys.stderr, flush=True)
    return 128 + number


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the console commands; returns (or exits with) the status.

    0: done. 1: an error, told in one line, or ended at once by a second signal. 2: the command line is wrong.
    128 + n: ended orderly by signal n.
    """
    global _help_topic
    # Plug-ins in the user's working directory are importable, as with ``python -m``.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    set_up_messages()
    keep_freed_memory()
    with StartUpSignals() as signals:
        try:
            typed, _help_topic = take_topic(list(sys.argv[1:] if arguments is None else arguments))
            settings = environment_settings(command_of(typed), os.environ)
            sys.argv[1:] = expand_configs(with_environment(typed, settings))
            cli_class = make_cli_class()
            unify_lightning_messages()
            cli = cli_class()
            received = next((c.received for c in cli.trainer.callbacks if type(c).__name__ == "OrderlyStop"), None)
            signals.received = received if received is not None else signals.received
        except Interrupted as interruption:
            return interrupted(interruption.number)
        except KeyboardInterrupt:  # raised by a user's own code
            return 130
        except SystemExit as error:
            place = who_exited(error)
            if place is None:  # the help was shown, or the configuration printed
                raise
            return report(ConfigError(f"exit({exit_text(error)}) was called by {place}; raise an error instead"))
        except Exception as error:
            # A library may have swallowed the interruption of an import, and stumbled over what was missing then.
            return report(error) if signals.received is None else interrupted(signals.received)
    return 0 if signals.received is None else 128 + signals.received


if __name__ == "__main__":
    sys.exit(main())
