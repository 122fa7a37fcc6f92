"""RunCheckpoint: the last and the best state of a run, each written aside, renamed and vouched for by a marker."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO

from claw_lightning import slurm
from claw_lightning.checkpoints import FOLDER, MARKER
from claw_lightning.checks import check_numbers, check_types
from claw_lightning.errors import ClawError, ConfigError
from claw_lightning.files import expand, sync
from claw_lightning.ranks import open_run_folder, ranks_of, run_folder
from claw_lightning.replay.storage import REPLAY_FOLDER

log = logging.getLogger(__name__)

ASIDE = re.compile(r"\..+\.ckpt(?:\.done)?\.(\d+)")  # .<name>.<process>
RETRY_SECONDS = 60.0  # after a mark that could not be written
CURE = "free space there, or set RunCheckpoint.dirpath to another disk"


class RunCheckpoint(Checkpoint):
    """Writes ``checkpoints/last.ckpt`` after each validation and at the end, ``best.ckpt`` when ``monitor`` improves.

    Lightning's ModelCheckpoint counts optimiser steps and epochs, which mean little here. A file is complete or absent:
    it is written under another name, flushed to disk and renamed; ``<name>.done`` then says how many bytes it has, by
    which a truncated copy is told. A save that fails during training (disk full) is reported and tried again at the
    next validation; the file from before stays. One that fails at the end of the run ends it with an error.

    Args:
        monitor: logged value that decides which is best.
        mode: max or min.
        dirpath: folder; None: ``checkpoints`` in the run's folder.
        replay: store the experience too, in the folder ``replay`` beside ``last.ckpt``: a run that goes on from there
            has it again. Only what is new is written each time; it takes ``data.capacity`` rows of disk in the end.
        at_minutes: also write ``minute-<m>.ckpt`` at these wall-clock minutes since the process was started.
    """

    def __init__(
        self,
        monitor: str = "val/return",
        mode: str = "max",
        dirpath: str | None = None,
        replay: bool = True,
        at_minutes: Sequence[float] = (),
    ) -> None:
        values = {"monitor": monitor, "mode": mode, "replay": replay, "at_minutes": at_minutes}
        check_types("RunCheckpoint", values, RunCheckpoint.__init__)
        if mode not in ("max", "min"):
            raise ConfigError(f"RunCheckpoint.mode is '{mode}'; use max or min")
        self.monitor, self.mode, self.dirpath, self.replay = monitor, mode, expand(dirpath), replay
        self.best: float | None = None
        for minute in at_minutes:
            check_numbers("RunCheckpoint", {"at_minutes": minute}, above=0.0)
        self._marks = sorted(at_minutes)
        self._retry_at = 0.0
        self._started = psutil.Process().create_time()
        self._aside: Path | None = None
        self._is_over = False
        self._folder: Path | None = None

    def folder(self, trainer: pl.Trainer) -> Path:
        """Where the files go: ``dirpath``, or ``checkpoints`` in the run's folder.

        ``checkpoints_1`` and so on where another run has written into that.
        """
        if self._folder is not None:
            return self._folder
        return Path(self.dirpath) if self.dirpath else run_folder(trainer) / FOLDER

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take a folder that is no other run's. On all ranks; not before it is known where the run goes on from.

        Raises:
            ConfigError: it cannot be made or written into, or ``dirpath`` holds the checkpoints of a run that this one
                does not go on from, which would be written over.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        base = Path(self.dirpath) if self.dirpath else open_run_folder(trainer) / FOLDER
        error, folder = "", self._folder or base
        if trainer.is_global_zero and self._folder is None:
            try:
                if self.dirpath and holds_others(base, trainer.ckpt_path):
                    raise ConfigError(
                        f"RunCheckpoint.dirpath: {base} holds the checkpoints of another run; give another folder, "
                        f"move them away, or go on from them with --ckpt_path {base}"
                    )
                folder = take_folder(base, trainer.ckpt_path, is_fixed=bool(self.dirpath))
            except OSError as caught:
                error = (
                    f"checkpoints cannot be written into {base} ({caught.strerror or caught}); set "
                    "RunCheckpoint.dirpath or save_dir of trainer.logger to a folder that can be written"
                )
            except ConfigError as caught:
                error = str(caught)
        error, self._folder = ranks_of(trainer).broadcast((error, folder))
        if error:
            raise ConfigError(error)
        if folder != base and trainer.is_global_zero:
            log.warning("%s holds the checkpoints of another run; those of this one go to %s", base, folder)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the newest, and the best by the monitored value."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None:
            score, before = float(value), self.best
            sign = 1.0 if self.mode == "max" else -1.0
            if math.isfinite(score) and (before is None or sign * score > sign * before):
                self.best = score  # before saving: it is part of what is saved
                if not self._try_save(trainer, "best.ckpt"):
                    self.best = before
        self._save_replay(trainer)
        self._try_save(trainer, "last.ckpt")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the state at the marks."""
        if self._marks:
            self._save_marks(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the state at the end, also of a run that was asked to stop.

        Raises:
            ClawError: it could not be written; one line with the file, the reason and the cure.
        """
        self._retry_at = 0.0
        self._save_marks(trainer)
        self._save_replay(trainer)
        try:
            self._save(trainer, "last.ckpt")
            if not any(getattr(callback, "received", None) for callback in getattr(trainer, "callbacks", ())):
                slurm.forget()
        except OSError as error:
            self._is_over = True  # `on_exception`, which follows, would only fail in the same way
            raise ClawError(self._failure(trainer, "last.ckpt", error)) from error

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Keep what was learned before an error, where a state exists and can be written.

        Each rank by itself: rank 0 the networks, which are those of all, and every one its own experience.
        """
        ranks_of(trainer).fail(exception, trainer)
        if trainer.state.fn == "fit" and trainer.global_step > 0 and not self._is_over:
            self._save_replay(trainer)
            self._try_save(trainer, "last.ckpt")

    def _is_best(self, path: Path) -> bool:
        """Whether a file holds the state whose value is the best so far."""
        try:
            content = torch.load(path, map_location="meta", weights_only=True)
            return bool(content["callbacks"][self.state_key]["best"] == self.best)
        except Exception:  # whatever a file that is none raises
            return False

    def abandon(self) -> None:
        """Remove what is being written, for a process that is about to end; safe in a signal handler."""
        if self._aside is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._aside)

    def _save_marks(self, trainer: pl.Trainer) -> None:
        while self._marks and ranks_of(trainer).anyone(
            time.time() - self._started >= 60.0 * self._marks[0] and time.time() >= self._retry_at
        ):
            if self._try_save(trainer, f"minute-{self._marks[0]:g}.ckpt"):
                self._marks.pop(0)
            else:
                self._retry_at = time.time() + RETRY_SECONDS

    def _save_replay(self, trainer: pl.Trainer) -> None:
        """Store the experience, before the checkpoint that belongs to it: more than it knows of does no harm.

        What cannot be stored is no reason to lose the checkpoint or the run: without it, a resumed run fills its memory
        anew.
        """
        save = getattr(getattr(trainer, "datamodule", None), "save_replay", None)
        is_idle = trainer.fast_dev_run or getattr(trainer.lightning_module, "diverged", False)  # type: ignore[attr-defined]
        if not self.replay or save is None or is_idle:
            return
        try:
            save(self.folder(trainer) / REPLAY_FOLDER)
        except OSError as error:
            log.error("%s: %s", error.filename, error.strerror or error)
        except ConfigError as error:
            log.error("the replay could not be saved: %s", error)

    def _try_save(self, trainer: pl.Trainer, name: str) -> bool:
        """Save, or say why not: a full disk must not end a run of days."""
        try:
            self._save(trainer, name)
        except OSError as error:
            if trainer.is_global_zero:
                log.error("%s", self._failure(trainer, name, error))
            return False
        return True

    def _failure(self, trainer: pl.Trainer, name: str, error: OSError) -> str:
        path = self.folder(trainer) / name
        kept = "; the one from before is kept" if path.is_file() else ""
        return f"{path} could not be written ({error.strerror or error}): {CURE}{kept}"

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        """Write one checkpoint and its marker; with several ranks all are to be called, and fail together.

        In this order a stop at any point leaves a checkpoint that can be read, and no marker of another one.

        Raises:
            OSError: whatever kept the file from being written; the file from before is as it was.
        """
        if trainer.fast_dev_run or getattr(trainer.lightning_module, "diverged", False):  # type: ignore[attr-defined]
            return
        folder = self.folder(trainer)
        ranks = ranks_of(trainer)
        if ranks.size == 1:
            self._write(trainer, folder, name)
            return
        error: OSError | None = None
        try:
            self._write(trainer, folder, name)
        except OSError as caught:
            error = caught
        told = ranks.broadcast(None if error is None else (error.errno, error.strerror or str(error)))
        if told is not None:
            raise error or OSError(*told)

    def _write(self, trainer: pl.Trainer, folder: Path, name: str) -> None:
        path, marker = folder / name, folder / (name + MARKER)
        aside = folder / f".{name}.{os.getpid()}"
        failed: OSError | None = None
        if trainer.is_global_zero:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                remove_left_over(folder)
            except OSError as error:
                if ranks_of(trainer).size == 1:
                    raise
                failed = error  # the other ranks have yet to be met
        self._aside = aside
        try:
            with os_errors(), direct_io(trainer) as held:
                trainer.save_checkpoint(aside)
            if not trainer.is_global_zero:
                return
            with os_errors():
                if failed or held.error:
                    raise failed or held.error  # type: ignore[misc]
            sync(aside)
            size = aside.stat().st_size
            if marker.exists():
                marker.unlink()
                sync(folder)  # else a power failure could leave the new file with the old marker
            aside.replace(path)
            sync(folder)
            self._mark(trainer, marker, size)
            if name == "last.ckpt":
                slurm.remember(path)
        finally:
            aside.unlink(missing_ok=True)
            self._aside = None

    def _mark(self, trainer: pl.Trainer, marker: Path, size: int) -> None:
        """Vouch for a complete checkpoint; where no marker can be written, the checkpoint is as good without."""
        module = trainer.lightning_module
        content = {
            "bytes": size,
            # Those of the checkpoint: the data module's go on meanwhile, as workers do.
            "env_steps": int(getattr(module, "env_steps", 0)),
            "updates": int(getattr(module, "updates", 0)),
        }
        self._aside = aside = marker.with_name(f".{marker.name}.{os.getpid()}")
        try:
            with aside.open("w") as file:
                json.dump(content, file)
            sync(aside)
            aside.replace(marker)
            sync(marker.parent)
        except OSError as error:
            log.warning("%s could not be written (%s); the checkpoint itself was", marker, error.strerror or error)
        finally:
            aside.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        """Best value so far, and of what."""
        return {"best": self.best, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; the best of another value is none of this one."""
        is_same = (state_dict.get("monitor", self.monitor), state_dict.get("mode", self.mode)) == (
            self.monitor, self.mode,
        )  # fmt: skip
        self.best = state_dict["best"] if is_same else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Have the best state of a resumed run in this run's folder too, which is then complete by itself."""
        before = Path(trainer.ckpt_path).resolve().parent if trainer.ckpt_path else None
        folder = self.folder(trainer)
        if before is None or self.best is None or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if not self._is_best(before / "best.ckpt"):  # resumed from an earlier state, of which it is no longer known
            return
        for name in (f"best.ckpt{MARKER}", "best.ckpt"):
            if not (before / name).is_file() or (folder / name).exists():
                continue
            try:
                folder.mkdir(parents=True, exist_ok=True)
                try:  # another name of the same file: files are replaced, never written into
                    os.link(before / name, folder / name)
                except OSError:
                    shutil.copyfile(before / name, folder / name)
            except OSError as error:
                log.warning("%s was not kept as this run's best (%s)", before / name, error.strerror or error)


def holds_others(folder: Path, ckpt_path: Any) -> bool:
    """Whether a folder holds checkpoints, and none of them is what this run goes on from."""
    if ckpt_path and Path(ckpt_path).resolve().parent == folder.resolve():
        return False
    return folder.is_dir() and any(folder.glob("*.ckpt"))


def take_folder(base: Path, ckpt_path: Any, is_fixed: bool) -> Path:
    """Make a folder that no other run has: ``base``, else the first of ``base_1``, ``base_2`` and so on.

    Raises:
        OSError: none can be made or written into; a full disk is not a reason, as it may be free before it is needed.
    """
    try:
        before = Path(ckpt_path).resolve().parent if ckpt_path else None
        if before is not None and before.name.startswith(base.name) and before.parent == base.parent.resolve():
            folder = base.with_name(before.name)  # the same run goes on
        elif is_fixed:
            base.mkdir(parents=True, exist_ok=True)
            folder = base
        else:
            base.parent.mkdir(parents=True, exist_ok=True)
            folder = _make_free(base)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return base
        raise


def _make_free(base: Path) -> Path:
    folder, number = base, 0
    while True:
        try:
            folder.mkdir()  # fails where another run has just taken it
            return folder
        except FileExistsError:
            if not folder.is_dir():
                raise
            number += 1
            folder = base.with_name(f"{base.name}_{number}")


class HeldIO(CheckpointIO):
    """Another plug-in whose failure to write waits in ``error``: all ranks meet once more when rank 0 has written."""

    def __init__(self, inner: CheckpointIO) -> None:
        self.inner = inner
        self.error: Exception | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write."""
        try:
            self.inner.save_checkpoint(checkpoint, path, storage_options)
        except (OSError, RuntimeError) as error:
            self.error = error

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the other."""
        return self.inner.load_checkpoint(*args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        """As the other."""
        self.inner.remove_checkpoint(path)


class DirectIO(TorchCheckpointIO):
    """Writes to the given path itself. Lightning's own way leads through a file in /tmp, which a SIGKILL leaves."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write; the reason of a failure is a plain OSError, as torch's own file writer hides it."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with open(path, "wb") as file:
            file.write(buffer.getbuffer())


@contextlib.contextmanager
def direct_io(trainer: pl.Trainer) -> Iterator[HeldIO]:
    """Save by :class:`DirectIO`, unless the user has chosen a plug-in for checkpoints; failures are held back."""
    strategy = getattr(trainer, "strategy", None)
    if strategy is None:
        yield HeldIO(DirectIO())
        return
    before = strategy.checkpoint_io
    held = HeldIO(DirectIO() if type(before) is TorchCheckpointIO else before)
    strategy.checkpoint_io = held
    try:
        yield held
    finally:
        strategy.checkpoint_io = before


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """What the system refused, also where a plug-in for checkpoints has wrapped it in an error of its own."""
    try:
        yield
    except OSError:
        raise
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from error
        if "inline_container" in str(error):  # torch's file writer: "unexpected pos", whatever the reason
            raise OSError(errno.EIO, "torch could not write the file; is the disk full?") from error
        raise


def remove_left_over(folder: Path) -> None:
    """Remove what processes that have died were writing when they did."""
    for path in folder.iterdir():
        match = ASIDE.fullmatch(path.name)
        if match and (int(match[1]) == os.getpid() or not psutil.pid_exists(int(match[1]))):
            with contextlib.suppress(OSError):
                path.unlink()
