"""The learner's log file: every line with time, process and level; tracebacks; never in the way."""

import logging
import os
import re

import pytest

from claw_lightning import logs


@pytest.fixture(autouse=True)
def no_file_left():
    yield
    logs.stop_logging_to_file()


def test_lines_have_time_process_and_level(tmp_path):
    logs.log_to_file(tmp_path / "logs" / "learner.log")
    logging.getLogger("claw_lightning.pool").warning("worker 0 was killed")
    line = (tmp_path / "logs" / "learner.log").read_text()
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d [\d:,]+ learner \({os.getpid()}\) WARNING worker 0 was killed\n", line)


def test_what_is_said_before_the_run_is_accepted_is_held_and_of_a_refused_one_nothing_is_left(tmp_path):
    for name in ("refused", "accepted"):
        logs.hold_log()
        logging.getLogger("claw_lightning.data").warning("task %s", name)
    assert not list(tmp_path.iterdir())
    logs.log_to_file(tmp_path / "logs" / "learner.log")
    logging.getLogger("x").error("later")
    lines = (tmp_path / "logs" / "learner.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["accepted", "later"]


def test_the_next_run_has_a_file_of_its_own(tmp_path):
    handlers = list(logging.getLogger().handlers)
    for name in ("a", "b"):
        logs.log_to_file(tmp_path / name)
        logging.getLogger("x").error(name)
    logs.stop_logging_to_file()
    logs.stop_logging_to_file()
    assert (tmp_path / "a").read_text().endswith("a\n") and (tmp_path / "b").read_text().count("\n") == 1
    assert logging.getLogger().handlers == handlers


def test_a_traceback_goes_to_the_file_alone(tmp_path, caplog):
    logs.log_to_file(tmp_path / "log")
    try:
        raise KeyError("my plug-in")
    except KeyError as error:
        logs.log_traceback(error)
    assert "Traceback" in (tmp_path / "log").read_text() and "my plug-in" in (tmp_path / "log").read_text()
    assert caplog.text == ""


def test_a_folder_that_cannot_be_made_costs_the_file_only(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    logs.log_to_file(tmp_path / "logs" / "learner.log")
    assert "no log of the learner is kept" in caplog.text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_silent(tmp_path, capsys):
    (tmp_path / "log").symlink_to("/dev/full")
    logs.log_to_file(tmp_path / "log")
    logging.getLogger("x").error("lost")
    logs.stop_logging_to_file()
    assert "Logging error" not in capsys.readouterr().err
