"""The command: a checkpoint in, a file that has been played against its agent out."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from claw_lightning.checkpoints import find_checkpoint, read_checkpoint
from claw_lightning.configs import add_import_folder
from claw_lightning.errors import ClawError, ConfigError
from claw_lightning.export.check import LIMIT, Comparison, ExportError, compare
from claw_lightning.export.files import SUFFIXES, describe, format_of, write
from claw_lightning.export.graph import PolicyGraph
from claw_lightning.files import sync
from claw_lightning.module import OptionCritic


@dataclass(frozen=True)
class Exported:
    """A file that was written: where, what it says of itself, and how near it is to the agent."""

    path: Path
    metadata: dict[str, Any]
    comparison: Comparison


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    student: bool = False,
    kind: str | None = None,
    force: bool = False,
) -> Exported:
    """Write the policy of a checkpoint as a file, and play it against the agent before it gets its name.

    Args:
        checkpoint: a file, or the folder of a run, which means its ``last.ckpt``.
        output: the file, ``.onnx`` or ``.pt2``.
        student: the flat student in place of the options.
        kind: ``onnx`` or ``torch``; None: by the suffix.
        force: replace a file that is there.

    Raises:
        ConfigError: a name or the checkpoint cannot be used, or the networks cannot be exported.
        ExportError: the file does not do what the agent does. Nothing is left of it.
    """
    target = Path(output).expanduser()
    kind = format_of(target, kind)
    _check_target(target, force)
    module = load(os.fspath(checkpoint))
    graph = PolicyGraph(module.agent(student=student), module.spec)  # type: ignore[arg-type]  # load() has built it
    metadata = describe(graph, module, student)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            aside = Path(folder, f"policy{SUFFIXES[kind]}")
            write(graph, metadata, aside, kind)
            comparison = compare(aside, graph, module, metadata)
            sync(aside)
            if force:
                aside.replace(target)
            else:
                os.link(aside, target)  # refuses a file that has come meanwhile
    except ExportError as error:
        raise ExportError(f"{target} was not written: {error}") from error
    except FileExistsError as error:
        raise ConfigError(f"--output {target} exists; --force replaces it") from error
    except OSError as error:
        raise ConfigError(f"--output {target}: cannot be written ({error.strerror or error})") from error
    return Exported(target, metadata, comparison)


def _check_target(target: Path, force: bool) -> None:
    if target.is_dir():
        raise ConfigError(f"--output {target} is a folder; give a file")
    if target.exists() and not force:
        raise ConfigError(f"--output {target} exists; --force replaces it")
    if not target.parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}")


def load(checkpoint: str) -> OptionCritic:
    """The module of a checkpoint, on the CPU.

    Modules of the user's that its networks need are found as the run found them.

    Raises:
        ConfigError: no checkpoint of this product, damaged, or of networks that cannot be built; one line.
    """
    try:
        path = find_checkpoint(checkpoint, [Path("runs")])
        assert path is not None
        read_checkpoint(path)
    except ConfigError as error:  # which speaks of the option of the command `lightning`
        said = re.sub(r",? or leave (it|ckpt_path) out[^;]*", "", str(error))  # here it cannot be
        raise ConfigError(said.replace("ckpt_path", "CHECKPOINT")) from error
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    config = Path(path).resolve().parents[1] / "config.yaml"
    if config.is_file():
        add_import_folder(config)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OptionCritic.load_from_checkpoint(path, map_location="cpu", weights_only=True).eval()
    except ConfigError as error:
        raise ConfigError(f"CHECKPOINT: {path}: {str(error).removeprefix('ckpt_path: ')}") from error
    except Exception as error:  # networks that do not fit their numbers raise whatever they do
        what = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"CHECKPOINT: {path} cannot be loaded ({type(error).__name__}: {what}): damaged, or of another version"
        ) from error


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"export: error: {' '.join(message.split())}\n")


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    """Arguments of the command."""
    parser = _Parser(
        prog="export",
        description="Export a trained policy to a file that runs without this package (docs/export.md). Raw "
        "observations go in, actions in the simulator's units come out. The file is played against the agent first.",
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a run's folder (its last.ckpt)")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="policy.onnx or policy.pt2")
    parser.add_argument("--format", choices=sorted(SUFFIXES), help="onnx, or torch for .pt2; default: by the suffix")
    parser.add_argument("--student", action="store_true", help="the flat student, without options")
    parser.add_argument("--force", action="store_true", help="replace a file that exists")
    return parser.parse_args(given)


def report(exported: Exported) -> str:
    """What was compared, in two lines."""
    found = exported.comparison
    kinds = "flat student" if exported.metadata["student"] else f"K = {exported.metadata['num_options']}"
    actions = (
        "all actions equal"
        if exported.metadata["num_actions"]
        else f"largest difference of an action {found.difference:.1e} of its range (limit {LIMIT:g})"
    )
    options = (
        f"; options equal, {found.switches:,} switches, their probabilities within {found.probabilities:.1e}"
        if exported.metadata["num_options"] > 1
        else ""
    )
    left_out = f" ({found.ties:,} within rounding of a tie left out)" if found.ties else ""
    return (
        f"{exported.path}: {exported.metadata['task']}, {kinds}, {exported.path.stat().st_size:,} bytes\n"
        f"checked in a process without claw_lightning on {found.observations:,} observations{left_out}: "
        f"{actions}{options}"
    )


def main(given: list[str] | None = None) -> int:
    """Entry point; exit status 0, 1 (refused, or the file differs) or 2 (arguments)."""
    arguments = parse_args(given)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # As Ctrl-C: what was begun is taken away, and the process that plays the file is ended.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        exported = export_checkpoint(
            arguments.checkpoint, arguments.output, arguments.student, arguments.format, arguments.force
        )
    except ClawError as error:
        print(f"export: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    with contextlib.suppress(BrokenPipeError):
        print(report(exported))
    return 0
