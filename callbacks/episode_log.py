"""EpisodeLog: every finished training episode as a line of a CSV file."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.files import expand
from claw_lightning.hooks import end_run
from claw_lightning.metrics import EpisodeStatistics
from claw_lightning.ranks import open_run_folder
from claw_lightning.rollout.collector import Episode

log = logging.getLogger(__name__)

HEADER = "episode,env_steps,return,length,success\n"
WRITE_SECONDS = 1.0


class EpisodeLog(pl.Callback):
    """Appends a line per finished training episode, in the order in which the workers reported them.

    Loggers get moving averages at logging steps; learning curves over episodes need each of them. Columns:

    * ``episode``: its number, from 1; a resumed run counts on.
    * ``env_steps``: environment steps of all lanes that the learner had counted when it heard of the episode's end;
      what the workers do meanwhile may make it a few vector steps late or early.
    * ``return``: undiscounted; ``nan`` or ``inf`` where a reward was.
    * ``length``: in steps.
    * ``success``: at the last step; empty where the task does not tell.

    With several ranks the lines are of the episodes of rank 0; ``env_steps`` and ``max_episodes`` count those of all.

    Lines are written about once per second and at the end, also after an error. A file that exists is continued: the
    numbers of a run that is resumed from a checkpoint go back to the checkpoint's.

    Args:
        path: the file; its folder is made if need be. None: ``episodes.csv`` in the run's folder.
        max_episodes: end the run after so many training episodes (a few more may finish meanwhile); 0: never. For
            protocols that count episodes.

    Raises:
        ConfigError: at the start of training, if the file cannot be written or is something else. If it cannot be
            written any more later on, the log ends with a warning and the training goes on.
    """

    def __init__(self, path: str | None = None, max_episodes: int = 0) -> None:
        check_types("EpisodeLog", {"max_episodes": max_episodes}, EpisodeLog.__init__)
        if max_episodes < 0:
            raise ConfigError(f"EpisodeLog.max_episodes is {max_episodes}; give 0 (no end) or more")
        self.path, self.max_episodes = expand(path), max_episodes
        self._file: Path | None = None  # None: nothing is logged
        self._lines: list[str] = []
        self._last_write = 0.0
        self._data: Any = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the log and listen."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        path = Path(self.path) if self.path else open_run_folder(trainer) / "episodes.csv"  # on every rank
        if not trainer.is_global_zero:
            return
        self._file = self._prepare(path)
        self._last_write = time.monotonic()
        self._data = trainer.datamodule  # type: ignore[attr-defined]
        self._data.episodes.listeners.append(self._add)

    @staticmethod
    def _prepare(file: Path) -> Path:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a+", encoding="utf-8") as stream:
                stream.seek(0)
                first = stream.readline(len(HEADER))
                if not first:
                    stream.write(HEADER)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise ConfigError(
                f"EpisodeLog.path: cannot write {file} ({reason}); name a file in a folder that can be written"
            ) from error
        if first and first != HEADER:
            raise ConfigError(f"EpisodeLog.path: {file} exists and is no log of episodes; name another file")
        return file

    def _add(self, episodes: Sequence[Episode]) -> None:
        statistics: EpisodeStatistics = self._data.episodes
        number, steps = statistics.total - len(episodes), self._data.env_steps
        for offset, episode in enumerate(episodes, start=1):
            success = "" if math.isnan(episode.success) else f"{episode.success:g}"
            self._lines.append(f"{number + offset},{steps},{episode.ret:.10g},{episode.length},{success}\n")
        self._write_if_due()  # no batches end while the replay fills or an evaluation waits

    def _write_if_due(self) -> None:
        if self._lines and time.monotonic() - self._last_write >= WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        if self._file is None or not self._lines:
            return
        try:
            # Whole lines in one go and no open file between: a run that is killed leaves no part of a line.
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write("".join(self._lines))
        except OSError as error:
            log.warning("EpisodeLog: %s cannot be written any more (%s); the log ends here", self._file, error.strerror)
            self._close()
        self._lines.clear()
        self._last_write = time.monotonic()

    def _close(self) -> None:
        if self._data is not None and self._add in self._data.episodes.listeners:
            self._data.episodes.listeners.remove(self._add)
        self._file = self._data = None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write what is waiting, where it is time; end the run where enough episodes have been played."""
        self._write_if_due()
        if 0 < self.max_episodes <= trainer.datamodule.episodes_finished:  # type: ignore[attr-defined]
            end_run(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what is waiting."""
        self._write()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write what the workers reported while they were closed, and listen no more."""
        self._write()
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As at the end; Lightning calls no ``teardown`` after an error."""
        self.teardown(trainer, pl_module, "")
