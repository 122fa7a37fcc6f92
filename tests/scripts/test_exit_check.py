"""The check of ends: what it plans, what it notices, and one round of it."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.scripts.loading import ROOT, load_script

check = load_script("exit_check")


def test_the_plan_is_the_same_for_a_seed_and_interrupts_some_starts():
    kinds = list(check.KINDS)
    rounds = check.plan(kinds, 40, seed=3)
    assert rounds == check.plan(kinds, 40, seed=3) != check.plan(kinds, 40, seed=4)
    assert [each.kind for each in rounds[: len(kinds)]] == kinds
    for kind in kinds:
        early = sum(each.in_start_up for each in rounds if each.kind == kind)
        assert 3 <= early <= 20 if kind in check.SIGNALS else early == 0
    assert all(0 <= each.moment <= check.LAST_MOMENT for each in rounds if not each.in_start_up)


class Sleeper(check.Run):
    """A round whose run is a trivial process; ``script`` is what it does, in Python."""

    script = "time.sleep(600)"

    def start(self):
        (self.folder / "tmp").mkdir()
        self.checkpoints.mkdir()
        code = f"import os, signal, sys, time; from pathlib import Path\n{self.script}"
        env = {**os.environ, **check.environment(self.folder, self.mark)}
        with (self.folder / "output.txt").open("w") as output:
            process = subprocess.Popen([sys.executable, "-c", code], cwd=self.folder, env=env, stderr=output)
        process.returncode = 0  # the round waits for it
        self.pid = process.pid


def problems(monkeypatch, kind, script, limit=60.0):
    monkeypatch.setattr(check, "END_LIMIT", limit)
    monkeypatch.setattr(check, "Run", type("Fake", (Sleeper,), {"script": script}))
    args = argparse.Namespace(config=check.TINY, zygote=True, keep=None)
    round_ = check.play(check.Round(kind, 0), args)
    assert round_.seconds > 0
    return round_


def runs(pid):
    """Whether a process is there and no zombie; whose child it is by now is not known."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


LEARN = "Path('learning').touch()\n"
SAVE = f"import shutil; shutil.copy({{path!r}}, 'checkpoints/last.ckpt')\n{LEARN}"


@pytest.fixture
def save(tmp_path):
    """Code that leaves a checkpoint and begins to learn."""
    path = tmp_path / "a.ckpt"
    torch.save({"claw": {"updates": 3}}, path)
    return SAVE.format(path=str(path))


def test_a_run_that_keeps_its_promise_passes(monkeypatch, save):
    assert problems(monkeypatch, "normal", save).problems == []
    assert problems(monkeypatch, "exception", save + "sys.exit(1)").problems == []
    answer = "signal.signal(signal.SIGTERM, lambda n, f: os._exit(143))\n"
    assert problems(monkeypatch, "sigterm", answer + save + "time.sleep(600)").problems == []
    killed = problems(monkeypatch, "sigkill", LEARN + "time.sleep(600)")
    assert killed.problems == [] and killed.status == -signal.SIGKILL


@pytest.mark.parametrize(
    "script, said",
    [
        ("sys.exit(3)", "exit status 3, promised [0]"),
        ("Path('checkpoints/last.ckpt').write_text('half')", "last.ckpt cannot be read"),
        ("Path('checkpoints/last.ckpt').unlink()", "no last.ckpt"),
        ("Path('checkpoints/.last.ckpt.5').touch()", "parts of checkpoints left: ['.last.ckpt.5']"),
        ("Path('tmp/tmpabc').touch()", "temporary files left: ['tmpabc']"),
        ("print('Traceback (most', file=sys.stderr)", "a traceback on the screen"),
        ("os.fork() or time.sleep(600)", "processes left: ["),
        ("os.fork() or (os.setsid(), time.sleep(600))", "processes left: ["),
        ("Path(f'/dev/shm/exit_check_{os.getpid()}').touch()", "left in /dev/shm: ['exit_check_"),
    ],
)
def test_what_is_left_is_noticed(monkeypatch, save, script, said):
    try:
        found = problems(monkeypatch, "normal", save + script, limit=2.0)
        assert [problem for problem in found.problems if said in problem], found
    finally:
        for path in Path("/dev/shm").glob("exit_check_*"):
            path.unlink()
    left = [int(pid) for pid in re.findall(r"processes left: \[(\d+)", str(found.problems))]
    gone = check.wait_for(lambda: not [pid for pid in left if runs(pid)], 60.0)
    assert gone  # what was found has been ended


def test_a_run_that_does_not_end_is_noticed_and_ended(monkeypatch, save):
    found = problems(monkeypatch, "sigint", "signal.signal(2, signal.SIG_IGN)\n" + save + "time.sleep(600)", limit=2.0)
    assert "the learner did not end" in found.problems


def test_a_mapped_block_is_noticed():
    number = os.memfd_create("claw-test")
    try:
        os.ftruncate(number, 4096)
        import mmap

        before = check.blocks(Path("/proc/self"))
        with mmap.mmap(number, 4096):
            assert len(check.blocks(Path("/proc/self")) - before) == 1
        assert check.blocks(Path("/proc/self")) == before
    finally:
        os.close(number)


def test_statuses_that_are_promised(tmp_path):
    def promised(kind, zygote=True, **fields):
        return check.Run(
            check.Round(kind, 0, **fields), tmp_path, argparse.Namespace(config=check.TINY, zygote=zygote)
        ).promised()

    assert promised("sighup") == {129} == promised("sighup", in_start_up=True)
    assert promised("sighup", zygote=False, in_start_up=True) == {129, 1, -1}
    assert promised("sigint-twice") == {130, 1, -2}
    assert promised("disk-full") == {1}  # until it has space again


def test_a_kind_is_in_order_only_when_all_its_rounds_are(capsys):
    good, bad = check.Round("sigint", 0, status=130), check.Round("sigint", 1, status=1, problems=["left"])
    assert check.summarise("sigint", [good, good], 2)
    assert not check.summarise("sigint", [good, bad], 2)
    assert not check.summarise("sigint", [good], 2)
    assert not check.summarise("sigint", [], 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("sigint: 1 of 2 in order; 0 in start-up; exit status 1, 130;")


@pytest.mark.slow
def test_real_rounds(tmp_path):
    """A kind of which tests/test_exit.py has none."""
    command = [sys.executable, str(ROOT / "scripts/exit_check.py"), "--kinds", "normal"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "found.json")], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(each["kind"], each["status"]) for each in found["rounds"]] == [("normal", 0)]
