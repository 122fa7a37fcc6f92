"""How whole runs end: signals, death, a full disk, errors of plug-ins; nothing may be left behind. Real processes.

The runs are forked from one process that has imported the command, by which scripts/exit_check.py saves time too.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from tests.runs import ENDLESS, FAST, ROOT, alive, checkpoint, learning, wait_until

pytestmark = pytest.mark.slow
START, END = 120.0, 120.0  # seconds: only a run that hangs takes them
SERVER = """
import json, os, sys
sys.path[:0] = sys.argv[1:]
import exit_check
from pathlib import Path
exit_check.import_command()
for line in sys.stdin:
    job = json.loads(line)
    if "poll" in job:
        pid, status = os.waitpid(job["poll"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    folder = Path(job["folder"])
    if job["closed"]:
        reader, writer = os.pipe()
        os.close(reader)
        output = (writer, writer)
    else:
        output = [os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("out.txt", "err.txt")]
    print(exit_check.fork_command(folder, job["arguments"], output, "test"), flush=True)
    for number in set(output):
        os.close(number)
"""


class Command:
    """A forked run; as much of a Popen as is needed."""

    def __init__(self, server, folder, *arguments, closed=False):
        (folder / "tmp").mkdir(exist_ok=True)
        self.server, self.returncode, self.children = server, None, []
        self.pid = self._ask(folder=str(folder), arguments=list(arguments), closed=closed)

    def _ask(self, **job):
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def poll(self):
        if self.returncode is None:
            self.returncode = self._ask(poll=self.pid)
        return self.returncode

    def wait(self, seconds=END):
        wait_until(lambda: self.poll() is not None, seconds, "the run did not end")
        return self.returncode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def look(self):
        """Remember the processes that it has started."""
        self.children = psutil.Process(self.pid).children(recursive=True)
        return self.children

    def clean_up(self):
        with contextlib.suppress(psutil.NoSuchProcess):
            self.look()
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
            self.wait()
        for child in alive(self.children):
            child.kill()


@pytest.fixture(scope="module")
def server():
    """The process from which runs are forked; it has one thread."""
    env = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="80")
    env.update({f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")})
    command = [sys.executable, "-c", SERVER, str(ROOT / "scripts"), str(ROOT)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.stdin.close()
    process.wait(END)
    process.stdout.close()


@pytest.fixture
def launch(server, tmp_path):
    """Start the command; what is left of it after the test is ended."""
    started = []

    def start(*arguments, **settings):
        started.append(Command(server, tmp_path, *arguments, **settings))
        return started[-1]

    yield start
    for command in started:
        command.clean_up()


@pytest.fixture
def endless(launch, tmp_path):
    """Starts a run in the background and waits until it has saved; with its processes in ``children``."""

    def start(*arguments, **settings):
        command = launch(*ENDLESS, "--trainer.check_val_every_n_epoch=1", *arguments, **settings)
        wait_until(lambda: learning(tmp_path) or command.poll() is not None, START, "the run never began")
        assert command.poll() is None, error_text(tmp_path)
        assert len(command.look()) >= 2  # a worker and the evaluator
        return command

    return start


def error_text(folder):
    path = folder / "err.txt"
    return path.read_text() if path.is_file() else ""


def error_line(folder):
    """The last line on the screen; nothing on it may be a traceback."""
    err = error_text(folder)
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


def parts(folder):
    """What is left of checkpoints that were not finished, and of temporary files."""
    return [*folder.glob("runs/*/checkpoints/.*"), *(folder / "tmp").glob("tmp*")]


def test_sigterm_ends_a_run_with_a_checkpoint_from_which_it_resumes(endless, launch, tmp_path):
    command = endless()
    command.send_signal(signal.SIGTERM)
    command.send_signal(signal.SIGTERM)  # a scheduler repeats itself: still the same request
    assert command.wait() == 128 + signal.SIGTERM
    assert not alive(command.children)
    assert not parts(tmp_path)
    assert "Traceback" not in error_text(tmp_path)
    stored = checkpoint(tmp_path)
    assert stored["claw"]["updates"] > 0
    last = next(tmp_path.glob("runs/*/checkpoints/last.ckpt"))
    marker = json.loads((last.parent / "last.ckpt.done").read_text())
    assert marker["bytes"] == last.stat().st_size
    assert marker["env_steps"] == stored["claw"]["env_steps"]
    assert marker["updates"] == stored["claw"]["updates"]
    steps = stored["claw"]["env_steps"] + 300
    resume = launch(*FAST, f"--ckpt_path={last}", f"--data.max_env_steps={steps}")
    assert resume.wait() == 0, error_text(tmp_path)
    resumed = checkpoint(tmp_path)
    assert resumed["claw"]["env_steps"] == steps // 2 * 2
    assert resumed["claw"]["updates"] > stored["claw"]["updates"]
    assert resumed["global_step"] > stored["global_step"]


def test_a_closed_terminal_ends_a_run_orderly_although_nothing_can_be_said(endless, tmp_path):
    """Its streams raise at every write; also a progress bar's."""
    command = endless(closed=True)
    command.send_signal(signal.SIGHUP)
    assert command.wait() == 128 + signal.SIGHUP
    assert not alive(command.children)
    assert checkpoint(tmp_path)["claw"]["updates"] > 0
    assert not parts(tmp_path)


def test_a_second_interrupt_ends_at_once_even_while_a_checkpoint_is_written(endless, tmp_path):
    (tmp_path / "slow_disk.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "from claw_lightning.hooks import UpdateCallback\n"
        "sync = os.fsync\n"
        "class SlowDisk(UpdateCallback):\n"
        "    def setup(self, trainer, module, stage):\n"
        "        self.trainer, os.fsync = trainer, self.wait  # the signal may come behind the last update\n"
        "    def wait(self, number):\n"
        "        if not self.trainer.should_stop or not list(Path('runs').glob('*/checkpoints/.last.ckpt.*')):\n"
        "            return sync(number)  # the replay comes first\n"
        "        Path('writing').touch()\n"
        "        time.sleep(600)\n"
    )
    command = endless("--trainer.callbacks+=slow_disk.SlowDisk")
    before = set(os.listdir("/dev/shm"))
    command.send_signal(signal.SIGINT)
    wait_until(lambda: (tmp_path / "writing").exists() or command.poll() is not None, END, "it did not save")
    assert list(tmp_path.glob("runs/*/checkpoints/.last.ckpt.*"))
    command.send_signal(signal.SIGINT)
    assert command.wait() == 1
    wait_until(lambda: not alive(command.children), END, "workers outlived the learner")
    assert "second signal: ending now" in error_text(tmp_path)
    assert checkpoint(tmp_path)["claw"]["updates"] > 0
    assert not parts(tmp_path)
    assert set(os.listdir("/dev/shm")) <= before


def test_death_of_the_learner_leaves_no_process_and_no_shared_memory(endless, tmp_path):
    command = endless()
    before = set(os.listdir("/dev/shm"))
    command.send_signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    wait_until(lambda: not alive(command.children), END, "workers outlived the learner")
    assert set(os.listdir("/dev/shm")) <= before
    checkpoint(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_simulator_starts_ends_the_run_orderly(launch, tmp_path, number):
    (tmp_path / "slow_sim.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from claw_lightning.rollout.envs.base import VectorEnv\n"
        "class Sim(VectorEnv):\n"
        "    def __init__(self, task: str, num_envs: int = 1, seed: int = 0) -> None:\n"
        "        Path('starting').touch()\n"
        "        time.sleep(600)\n"
    )
    command = launch(*ENDLESS, "--data.env.class_path=slow_sim.Sim")
    wait_until(lambda: (tmp_path / "starting").exists() or command.poll() is not None, START, "it never started")
    children = command.look()
    assert children
    command.send_signal(number)
    assert command.wait() == 128 + number
    assert not alive(children)
    assert error_line(tmp_path) == f"lightning: {number.name} before the run began"


def test_an_error_in_a_plug_in_is_one_line_and_keeps_the_checkpoint(launch, tmp_path):
    (tmp_path / "plugin.py").write_text(
        "import json, os, psutil\n"
        "from claw_lightning.hooks import UpdateCallback\n"
        "class Broken(UpdateCallback):\n"
        "    def on_update_end(self, trainer, module):\n"
        "        if module.updates == 5:\n"
        "            children = [p.pid for p in psutil.Process().children(recursive=True)]\n"
        "            open('children.json', 'w').write(json.dumps(children))\n"
        "            raise RuntimeError('my plug-in broke')\n"
    )
    assert launch(*ENDLESS, "--trainer.callbacks+=plugin.Broken").wait() == 1
    assert error_line(tmp_path).startswith("lightning: error: RuntimeError: my plug-in broke (traceback: ")
    assert "plugin.py" in (tmp_path / "error.log").read_text()
    assert checkpoint(tmp_path)["claw"]["updates"] == 5
    children = json.loads((tmp_path / "children.json").read_text())
    assert children and not [pid for pid in children if psutil.pid_exists(pid)]
    assert not parts(tmp_path)


def test_a_simulator_that_cannot_be_imported_is_one_line(launch, tmp_path):
    (tmp_path / "broken_sim.py").write_text(
        "from claw_lightning.rollout.envs.base import VectorEnv\n"
        "class Sim(VectorEnv):\n"
        "    def __init__(self, task: str, num_envs: int = 1, seed: int = 0) -> None:\n"
        "        import no_such_simulator\n"
    )
    assert launch(*ENDLESS, "--data.env.class_path=broken_sim.Sim").wait() == 1
    line = error_line(tmp_path)
    assert line.startswith("lightning: error: ") and "no_such_simulator" in line and "describe.log" in line
    ours = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not alive(ours)
    assert (tmp_path / "error.log").is_file()


# -- a full disk ------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip("mounting a small disk needs root; tests/callbacks/test_checkpoints.py has the case without")
    except FileNotFoundError:
        pytest.skip("no mount here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(path):
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        for _ in range(4096):  # 16 MiB, more than the disk has: should it not be mounted any more
            file.write(bytes(4096))


def test_a_full_disk_ends_no_run_but_one_that_ends_says_so(launch, tmp_path, disk):
    last, ballast = disk / "last.ckpt", disk / "ballast"

    def updates():
        return torch.load(last, weights_only=True)["claw"]["updates"]

    def complaints():
        return error_text(tmp_path).count(f"{last} could not be written (No space left on device): free space")

    folder = ["--trainer.callbacks+=RunCheckpoint", f"--trainer.callbacks.dirpath={disk}"]
    command = launch(*ENDLESS, "--trainer.check_val_every_n_epoch=1", *folder)
    ended = lambda: command.poll() is not None  # noqa: E731
    wait_until(lambda: last.exists() or ended(), START, "no checkpoint")
    children = command.look()
    fill(ballast)
    wait_until(lambda: complaints() or ended(), START, "a full disk was not reported")
    before = updates()  # intact
    assert {path.name for path in disk.iterdir()} <= {
        "ballast", "best.ckpt", "best.ckpt.done", "last.ckpt", "last.ckpt.done", f".last.ckpt.{command.pid}",
        f".best.ckpt.{command.pid}", "replay",
    }  # fmt: skip
    ballast.unlink()
    wait_until(lambda: ended() or updates() > before, START, "no checkpoint although there was space again")
    assert command.poll() is None, error_text(tmp_path)
    seen = complaints()
    fill(ballast)
    wait_until(lambda: complaints() > seen or ended(), START, "a full disk was not reported")
    before = updates()
    command.send_signal(signal.SIGINT)
    assert command.wait() == 1
    line = error_line(tmp_path)
    assert line.startswith(f"lightning: error: {last} could not be written (No space left on device): free space")
    assert "the one from before is kept" in line
    assert updates() == before
    assert not alive(children)
    assert not [path.name for path in disk.iterdir() if path.name.startswith(".")]
