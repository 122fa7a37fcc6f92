"""End real runs in every way and look for what they leave behind.

    python scripts/exit_check.py --rounds 50 --json exits.json
    python scripts/exit_check.py --rounds 3 --kinds sigint sigterm sigkill --config conf/hand_reach_dense.yaml

Each round is a ``lightning fit`` with background workers in a folder of its own, ended at a random moment: by itself
(``normal``), by an ``exception`` in a callback, by a signal to the learner (``sigint``, ``sigint-twice``, ``sigterm``,
``sighup``, ``sigkill``; about every fourth of them while the run still starts), or asked to stop around a full disk
(``disk-full``, which needs the right to mount a tmpfs). It must have the promised exit status, and leave no
process, no mapped memory, no name in /dev/shm, no temporary file, no unreadable checkpoint and no half of one.
Exit status 1 where anything was otherwise.

Runs are forked from a process that has imported everything, which saves most of the time of a short run;
``--no-zygote`` starts the command itself.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "conf" / "debug" / "fast.yaml"
SIGNALS = {
    "sigint": signal.SIGINT, "sigint-twice": signal.SIGINT, "sigterm": signal.SIGTERM, "sighup": signal.SIGHUP,
    "sigkill": signal.SIGKILL,
}  # fmt: skip
KINDS = ("normal", "exception", *SIGNALS, "disk-full")
LAST_MOMENT = 1.5  # seconds after learning has begun; of start-up: START_UP
START_UP = (0.2, 5.0)
SHARE_OF_START_UP = 0.25
START_LIMIT = 180.0  # seconds until a run must have begun to learn
END_LIMIT = 20.0  # from the signal to the end of the last process
DISK_MIB = 2
MARK = "CLAW_EXIT_CHECK"  # variable by which the processes of a round are found, whoever their parent is by then
PROBE = '''
import time
from pathlib import Path
from claw_lightning.hooks import UpdateCallback


class ExitProbe(UpdateCallback):
    """Says when learning has begun, and can fail some seconds later."""

    def __init__(self, fail_after: float = -1.0) -> None:
        self.fail_after, self.began = fail_after, 0.0

    def on_update_end(self, trainer, module):
        if not self.began:
            self.began = time.monotonic()
            Path("learning").touch()
        if 0 <= self.fail_after <= time.monotonic() - self.began:
            raise RuntimeError("the probe broke")
'''


@dataclass
class Round:
    """One run and what was found; ``problems`` is empty where all was as promised."""

    kind: str
    seed: int
    in_start_up: bool = False
    moment: float = 0.0
    status: int | None = None
    seconds: float = 0.0  # of the whole round
    end_seconds: float = 0.0  # from the signal to the end of the last process
    problems: list[str] = field(default_factory=list)


# -- starting ---------------------------------------------------------------------------------------------------------


def fork_command(folder: Path, arguments: list[str], output: tuple[int, int], mark: str) -> int:
    """The command in a fork of this process, which has imported it; returns the process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        become_command(folder, arguments, output, mark)
    finally:
        os._exit(70)


def become_command(folder: Path, arguments: list[str], output: tuple[int, int], mark: str) -> NoReturn:
    """What the interpreter does around the command's ``main``; never returns into the checker."""
    os.setsid()
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for number, target in enumerate((nowhere, *output)):
        os.dup2(target, number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the check was started by nohup
    os.environ.update(environment(folder, mark))
    tempfile.tempdir = None
    sys.argv = ["lightning"]
    from claw_lightning import cli
    from claw_lightning.rollout.parent import follow_parent

    follow_parent()  # an endless run must not outlive a check that is killed
    status: Any = 70
    try:
        status = cli.main(arguments)
    except SystemExit as leave:
        status = leave.code
    except KeyboardInterrupt:
        status = 130
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def start_command(folder: Path, arguments: list[str], output: tuple[int, int], mark: str) -> int:
    """The command itself."""
    from compare_sb3 import lightning_command

    process = subprocess.Popen(
        [str(lightning_command()), *arguments], cwd=folder, env={**os.environ, **environment(folder, mark)},
        stdin=subprocess.DEVNULL, stdout=output[0], stderr=output[1], start_new_session=True,
    )  # fmt: skip
    process.returncode = 0  # this module waits for it
    return process.pid


def environment(folder: Path, mark: str) -> dict[str, str]:
    """What a round sets; temporary files get a folder that is looked into."""
    return {MARK: mark, "TMPDIR": str(folder / "tmp")}


def import_command() -> None:
    """All that a run imports. It must leave this process with a single thread, as it will be forked."""
    import torch.utils.tensorboard  # noqa: F401

    from claw_lightning import cli

    cli.make_cli_class()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.exit(f"exit_check: importing has started {threads - 1} threads; use --no-zygote")


# -- looking ----------------------------------------------------------------------------------------------------------


def processes() -> Iterator[Path]:
    """Folders in /proc."""
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def marked(mark: str) -> set[int]:
    """Processes that have inherited the variable of a round and still run."""
    found, wanted = set(), f"{MARK}={mark}".encode()
    for path in processes():
        with contextlib.suppress(OSError):
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
    return found


def blocks(path: Path) -> set[str]:
    """Shared blocks without a name that a process maps, by inode."""
    with contextlib.suppress(OSError):
        lines = (path / "maps").read_text(errors="replace").splitlines()
        return {line.split()[4] for line in lines if "/memfd:claw" in line}
    return set()


def left_in_shm(before: set[str], mark: str) -> set[str]:
    """New names in /dev/shm that no process outside the round maps: others may be at work on this machine."""
    new = set(os.listdir("/dev/shm")) - before
    if not new:
        return new
    own = marked(mark)
    for path in processes():
        if int(path.name) not in own:
            with contextlib.suppress(OSError):
                text = (path / "maps").read_text(errors="replace")
                new -= {name for name in new if f"/dev/shm/{name}" in text}
    return new & set(os.listdir("/dev/shm"))


def read_checkpoint(path: Path) -> tuple[int, str]:
    """Updates in a checkpoint, and what is wrong with it."""
    import torch

    try:
        return int(torch.load(path, weights_only=True)["claw"]["updates"]), ""
    except Exception as error:
        return 0, f"{path.name} cannot be read: {' '.join(str(error).split())[:100]}"


def wait_for(condition: Callable[[], Any], seconds: float) -> bool:
    """Poll until it holds; whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# -- a round ----------------------------------------------------------------------------------------------------------


class Run:
    """A run under way, in a temporary folder."""

    def __init__(self, round_: Round, folder: Path, args: argparse.Namespace) -> None:
        self.round, self.folder, self.config = round_, folder, args.config
        self.is_forked = args.zygote
        self.checkpoints = folder / "disk" if round_.kind == "disk-full" else folder / "checkpoints"
        self.rng = random.Random(round_.seed)
        self.mark = uuid.uuid4().hex
        self.blocks: set[str] = set()
        self.names_before = set(os.listdir("/dev/shm"))
        self.pid, self._reader = 0, -1
        self.status: int | None = None

    def arguments(self) -> list[str]:
        """The run's command line."""
        kind, is_tiny = self.round.kind, self.config == TINY
        found = ["fit", "--config", str(self.config), "--trainer.enable_progress_bar=false"]
        if is_tiny:
            steps = 400 if kind == "normal" else 0
            # Evaluations need a third process, which takes most of a short run's time: not in every round.
            epochs = 1 if kind == "disk-full" or self.rng.random() < 0.3 else 1_000_000
            found += [
                "--data.mode=overlapped", "--data.capacity=20000", f"--data.max_env_steps={steps}",
                f"--trainer.check_val_every_n_epoch={epochs}",
            ]  # fmt: skip
        elif kind == "normal":
            found.append("--trainer.max_steps=20")
        found += ["--trainer.callbacks+=exit_probe.ExitProbe"]
        if kind == "exception":
            found.append(f"--trainer.callbacks.fail_after={self.round.moment:.3f}")
        return [*found, "--trainer.callbacks+=RunCheckpoint", f"--trainer.callbacks.dirpath={self.checkpoints}"]

    def start(self) -> None:
        """Start it; every second hang-up closes its standard error as well, as a terminal does."""
        (self.folder / "exit_probe.py").write_text(PROBE)
        (self.folder / "tmp").mkdir()
        target = os.open(self.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if self.round.kind == "sighup" and self.rng.random() < 0.5:
            os.close(target)
            self._reader, target = os.pipe()
        start = fork_command if self.is_forked else start_command
        self.pid = start(self.folder, self.arguments(), (target, target), self.mark)
        os.close(target)

    def output(self) -> str:
        """What it has said so far."""
        path = self.folder / "output.txt"
        return path.read_text(errors="replace") if path.is_file() else ""

    def has_ended(self) -> bool:
        """Whether the learner has ended; its status is then known."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = self.round.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def is_learning(self) -> bool:
        """Whether the first update was made."""
        return (self.folder / "learning").exists()

    def signal(self, number: int) -> None:
        """Send a signal to the learner alone."""
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
        if not self.has_ended():
            os.kill(self.pid, number)

    def problem(self, text: str) -> None:
        """Note what is not as promised."""
        self.round.problems.append(text)

    def await_learning(self) -> None:
        """Wait for the first update, or for what the run was to do before."""
        if not wait_for(lambda: self.is_learning() or self.has_ended(), START_LIMIT):
            self.problem("the run did not begin to learn")
        elif self.has_ended() and not self.is_learning():
            self.problem(f"ended before it learned: {self.output()[-300:]!r}")
        self.blocks = blocks(Path(f"/proc/{self.pid}"))

    def end(self) -> None:
        """Bring about the end, at the round's moment."""
        kind, moment = self.round.kind, self.round.moment
        if self.round.in_start_up:
            wait_for(self.has_ended, moment)
            self.blocks = blocks(Path(f"/proc/{self.pid}"))
        else:
            self.await_learning()
        if kind == "disk-full":
            self.fill_disk()
        elif kind in SIGNALS:
            if not self.round.in_start_up:
                wait_for(self.has_ended, moment)
            self.blocks |= blocks(Path(f"/proc/{self.pid}"))
            self.signal(SIGNALS[kind])
            if kind == "sigint-twice":
                wait_for(self.has_ended, self.rng.uniform(0.0, 0.4))
                self.signal(signal.SIGINT)

    def fill_disk(self) -> None:
        """Fill the disk, wait for the complaint; then free it and await a checkpoint, or stop with the disk full."""
        last, ballast = self.checkpoints / "last.ckpt", self.checkpoints / "ballast"
        if not wait_for(lambda: last.exists() or self.has_ended(), START_LIMIT) or self.has_ended():
            return self.problem("no checkpoint to begin with")
        wait_for(self.has_ended, self.round.moment)
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            for _ in range(DISK_MIB * 256 + 1):  # no more than that: should it not be mounted any more
                file.write(bytes(4096))
        if not wait_for(lambda: "could not be written" in self.output() or self.has_ended(), START_LIMIT):
            self.problem("a full disk was not reported")
        if self.has_ended():
            return self.problem("a full disk ended the run")
        before, problem = read_checkpoint(last)
        if problem:
            self.problem(f"with the disk full, {problem}")
        if self.rng.random() < 0.5:
            ballast.unlink()
            self.is_full = False
            if not wait_for(lambda: read_checkpoint(last)[0] > before or self.has_ended(), START_LIMIT):
                self.problem("no new checkpoint after space was free again")
        self.signal(signal.SIGINT)
        return None

    is_full = True

    def promised(self) -> set[int]:
        """Exit statuses that the round's kind allows."""
        kind = self.round.kind
        if kind == "disk-full":
            return {1} if self.is_full else {130}
        if kind in ("normal", "exception"):
            return {0} if kind == "normal" else {1}
        number = SIGNALS[kind]
        statuses = {-number if kind == "sigkill" else 128 + number}
        if kind == "sigint-twice":
            statuses |= {1, -number}  # the second may also come when the run has ended and the interpreter ends
        if self.round.in_start_up and not self.is_forked:
            statuses |= {1, -number}  # before `main`, where nothing has been started, the interpreter's own way
        return statuses

    def check(self) -> None:
        """Look for what must not be there."""
        started, kind = time.monotonic(), self.round.kind
        if not wait_for(self.has_ended, START_LIMIT if kind in ("normal", "exception") else END_LIMIT):
            self.problem("the learner did not end")
        if kind in ("normal", "exception"):
            started = time.monotonic()
        if not wait_for(lambda: not marked(self.mark), END_LIMIT / 2):
            self.problem(f"processes left: {sorted(marked(self.mark))}")
        self.round.end_seconds = time.monotonic() - started
        if self.status not in self.promised():
            self.problem(f"exit status {self.status}, promised {sorted(self.promised())}: {self.output()[-300:]!r}")
        if "Traceback" in self.output():
            self.problem(f"a traceback on the screen: {self.output()[-300:]!r}")
        if not wait_for(lambda: not left_in_shm(self.names_before, self.mark), 2.0):
            self.problem(f"left in /dev/shm: {sorted(left_in_shm(self.names_before, self.mark))}")
        holders = [path.name for path in processes() if self.blocks & blocks(path)]
        if holders:
            self.problem(f"shared blocks still mapped by {holders}")
        # torch makes a folder for compiled code when it is imported: a cache, which is meant to stay.
        names = [path.name for path in (self.folder / "tmp").iterdir()]
        temporary = [name for name in names if not name.startswith("torchinductor_")]
        if temporary:
            self.problem(f"temporary files left: {temporary}")
        self.check_checkpoints()

    def check_checkpoints(self) -> None:
        """All can be read, none is missing, and no part of one is left."""
        kind = self.round.kind
        names = [path.name for path in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        for name in names:
            if name.endswith(".ckpt"):
                _, problem = read_checkpoint(self.checkpoints / name)
                if problem:
                    self.problem(problem)
        # What dies while it writes leaves a part; the next save there removes it.
        if kind not in ("sigkill", "sigint-twice") and (parts := [name for name in names if name.startswith(".")]):
            self.problem(f"parts of checkpoints left: {parts}")
        if kind not in ("sigkill", "sigint-twice") and not self.round.in_start_up and "last.ckpt" not in names:
            self.problem("no last.ckpt")

    def clean_up(self) -> None:
        """End what is left, whatever happened."""
        for pid in {*marked(self.mark), *([self.pid] if self.status is None and self.pid else [])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.pid and self.status is None:
            wait_for(self.has_ended, 10.0)


@contextlib.contextmanager
def scratch(kind: str, keep: Path | None) -> Iterator[Path]:
    """A folder for a round; of a failed one it is kept where that is wanted."""
    folder = Path(tempfile.mkdtemp(prefix=f"exit_{kind}_", dir=keep))
    disk = folder / "disk"
    try:
        if kind == "disk-full":
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)], check=True)
        yield folder
    finally:
        if disk.is_dir():
            subprocess.run(["umount", "-l", str(disk)], check=False, stderr=subprocess.DEVNULL)
        if keep is None or not (folder / "failed").exists():
            shutil.rmtree(folder, ignore_errors=True)


def can_mount() -> bool:
    """Whether this process may mount a small disk."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
        try:
            if subprocess.run(command, check=False, capture_output=True).returncode:
                return False
        except OSError:
            return False
        subprocess.run(["umount", "-l", folder], check=False)
        return True


def play(round_: Round, args: argparse.Namespace) -> Round:
    """One round from start to verdict."""
    started = time.monotonic()
    with scratch(round_.kind, args.keep) as folder:
        run = Run(round_, folder, args)
        try:
            run.start()
            run.end()
            run.check()
        except Exception as error:  # a fault of the check counts as one of the run: it must not pass
            run.problem(f"the check itself failed: {type(error).__name__}: {error}")
        finally:
            run.clean_up()
        if round_.problems:
            (folder / "failed").touch()
    round_.seconds = time.monotonic() - started
    return round_


# -- all rounds -------------------------------------------------------------------------------------------------------


def plan(kinds: list[str], rounds: int, seed: int) -> list[Round]:
    """All rounds, the kinds in turn, each with a moment of its own."""
    found = []
    for index in range(rounds):
        for kind in kinds:
            rng = random.Random(f"{seed} {kind} {index}")
            in_start_up = kind in SIGNALS and rng.random() < SHARE_OF_START_UP
            moment = rng.uniform(*START_UP) if in_start_up else rng.uniform(0.0, LAST_MOMENT)
            found.append(Round(kind, rng.randrange(1 << 30), in_start_up, moment))
    return found


def play_all(rounds: list[Round], args: argparse.Namespace) -> Iterator[Round]:
    """Play rounds in ``args.jobs`` processes; results as they come."""
    from claw_lightning.rollout.parent import follow_parent

    pids = []
    with selectors.DefaultSelector() as selector:
        for job in range(args.jobs):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                status = 1
                follow_parent()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                try:
                    os.close(reader)
                    for round_ in rounds[job :: args.jobs]:
                        os.write(writer, json.dumps(asdict(play(round_, args))).encode() + b"\n")
                    status = 0
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            os.close(writer)
            pids.append(pid)
            selector.register(os.fdopen(reader), selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if line:
                    yield Round(**json.loads(line))
                else:
                    selector.unregister(key.fileobj)
    for pid in pids:
        os.waitpid(pid, 0)


def summarise(kind: str, results: list[Round], wanted: int) -> bool:
    """One line about a kind; whether all its rounds were played and found in order."""
    failed = [result for result in results if result.problems]
    if not results:
        print(f"{kind}: no round was finished")
        return False
    seconds = [result.seconds for result in results]
    statuses = sorted({str(result.status) for result in results})
    print(
        f"{kind}: {len(results) - len(failed)} of {wanted} in order; {sum(r.in_start_up for r in results)} in "
        f"start-up; exit status {', '.join(statuses)}; {sum(seconds) / len(seconds):.1f} s a round; all gone at most "
        f"{max(result.end_seconds for result in results):.1f} s after"
    )
    return not failed and len(results) == wanted


def main() -> int:
    """All kinds, all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--config", type=Path, default=TINY, help="another configuration, such as the main job's")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zygote", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--keep", type=Path, help="existing folder in which those of failed rounds are kept")
    args = parser.parse_args()
    for name, path, exists in (
        ("--config", args.config, args.config.is_file()),
        ("--keep", args.keep, args.keep is None or args.keep.is_dir()),
        ("--json", args.json, args.json is None or args.json.absolute().parent.is_dir()),
    ):
        if not exists:
            parser.error(f"{name} {path}: no such file or folder")
    args.config = args.config.resolve()
    args.keep = args.keep.resolve() if args.keep else None
    kinds = list(dict.fromkeys(args.kinds))
    is_skipped = "disk-full" in kinds and not can_mount()
    if is_skipped:
        print("disk-full: skipped; it needs the right to mount a tmpfs (root)")
        kinds.remove("disk-full")
    for name in ("OMP", "MKL", "OPENBLAS"):
        os.environ[f"{name}_NUM_THREADS"] = "1"  # two runs at a time, and no thread in a process that will be forked
    if args.zygote:
        sys.path.insert(0, str(ROOT))
        import_command()
    results: dict[str, list[Round]] = {kind: [] for kind in kinds}
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: tell what there is
        for result in play_all(plan(kinds, args.rounds, args.seed), args):
            results[result.kind].append(result)
            for problem in result.problems:
                where = f"{result.moment:.2f} s into {'start-up' if result.in_start_up else 'learning'}"
                print(f"{result.kind} (seed {result.seed}, {where}): {problem}", flush=True)
    verdicts = [summarise(kind, results[kind], args.rounds) for kind in kinds]
    if args.json:
        rows = [asdict(result) for found in results.values() for result in found]
        args.json.write_text(json.dumps({"rounds": rows, "skipped": ["disk-full"] * is_skipped}, indent=1) + "\n")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
