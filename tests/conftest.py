"""What holds for all tests."""

import logging
import signal
import sys

import pytest

from claw_lightning import configs

# Started in the background of a script or by nohup, a process ignores Ctrl-C or the terminal's end, and so would all
# that the tests start and send these signals.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def import_folders():
    """What a command adds to the import path of this process is for that command."""
    before, folders = list(sys.path), list(configs.IMPORT_FOLDERS)
    yield
    sys.path[:], configs.IMPORT_FOLDERS[:] = before, folders


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Runs and logs go to a folder of their own; the command's arguments and messages leave no trace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightning"])
    monkeypatch.setattr("sys.path", ["", *sys.path])
    for name in ("PL_GLOBAL_SEED", "SLURM_NTASKS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    level = logging.getLogger("claw_lightning").level
    yield
    logging.getLogger("claw_lightning").setLevel(level)
