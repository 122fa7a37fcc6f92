"""Log files: one per process, each line with time, process and level. Workers write their own (rollout/worker.py)."""

from __future__ import annotations

import contextlib
import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

FORMAT = "%(asctime)s {name} (%(process)d) %(levelname)s %(message)s"
MAX_HELD = 1000  # records before there is a file
MAX_BYTES = 64 << 20  # of a file, after which it is moved to <name>.1
#: Beginnings of Lightning's messages that no user of this command can act on.
NOISE = ("`weights_only` was not set", "💡 Tip", "TPU available", "GPU available: False")
_handlers: list[logging.Handler] = []


def log_folder(trainer: Any) -> Path:
    """Folder of a trainer's run: that of its first logger, else ``default_root_dir``. See also ``ranks.run_folder``.

    Trainer.log_dir knows TensorBoard and CSV; for other loggers it is the folder that all their runs share. Like that,
    this is to be called on all ranks: the first one's answer counts.
    """
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    logger = trainer.logger
    if logger is None or isinstance(logger, (CSVLogger, TensorBoardLogger)):
        return Path(trainer.log_dir or trainer.default_root_dir)
    version = logger.version  # later ranks may have none
    folder = Path(logger.save_dir or trainer.default_root_dir)
    if version is not None:
        folder = folder / str(logger.name) / (version if isinstance(version, str) else f"version_{version}")
    return Path(trainer.strategy.broadcast(str(folder)))


class NoiseFilter(logging.Filter):
    """Drops log records that begin like one of :data:`NOISE`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        return not record.getMessage().startswith(NOISE)


class _QuietFileHandler(RotatingFileHandler):
    """A full disk must not end a run, nor fill its screen; nor must a log fill the disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Drop the record."""


class _Holder(logging.Handler):
    """Keeps records until there is a file for them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it; a run that logs so much before it begins is not to fill the memory."""
        if len(self.records) < MAX_HELD:
            self.records.append(record)


def hold_log() -> None:
    """Keep what this process logs until :func:`log_to_file` is called: a run that is refused leaves no file."""
    stop_logging_to_file()
    _handlers.append(_Holder())
    logging.getLogger().addHandler(_handlers[0])


def log_to_file(path: Path, name: str = "learner") -> None:
    """Send what this process logs to a file as well, instead of the file of an earlier run; what was held too."""
    held = [record for handler in _handlers if isinstance(handler, _Holder) for record in handler.records]
    stop_logging_to_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _QuietFileHandler(path, maxBytes=MAX_BYTES, backupCount=1)
    except OSError as error:
        logging.getLogger(__name__).warning("%s: no log of the %s is kept (%s)", path, name, error.strerror)
        return
    handler.setFormatter(logging.Formatter(FORMAT.format(name=name)))
    handler.addFilter(NoiseFilter())
    logging.getLogger().addHandler(handler)
    _handlers.append(handler)
    for record in held:
        handler.handle(record)


def log_traceback(error: BaseException) -> None:
    """Keep an error's traceback in the file; the screen gets one line. A signal is no error."""
    if not isinstance(error, Exception):
        logging.getLogger(__name__).info(
            "the run was ended by %s", " ".join(str(error).split()) or type(error).__name__
        )
        return
    record = logging.makeLogRecord(
        {"name": __name__, "levelno": logging.ERROR, "levelname": "ERROR", "msg": "the run ended with an error",
         "exc_info": (type(error), error, error.__traceback__)}
    )  # fmt: skip
    for handler in _handlers:
        handler.handle(record)


def stop_logging_to_file() -> None:
    """Close the file. Idempotent."""
    while _handlers:
        handler = _handlers.pop()
        logging.getLogger().removeHandler(handler)
        with contextlib.suppress(OSError):  # what a full disk has not taken
            handler.close()
