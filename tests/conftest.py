"""What holds for all tests."""

import signal
import sys

import pytest

from claw_lightning import configs

# Started in the background of a script, a process ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def import_folders():
    """What a command adds to the import path of this process is for that command."""
    before, folders = list(sys.path), list(configs.IMPORT_FOLDERS)
    yield
    sys.path[:], configs.IMPORT_FOLDERS[:] = before, folders
