"""Arms of benchmark.py in processes of their own: started, asked in turn, ended. The protocol: peers/serve.py."""

from __future__ import annotations

import gc
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from measuring import Bench, one_line
from peer_environments import missing, python_of

ROOT = Path(__file__).resolve().parents[1]
ARMS = ROOT / "scripts" / "peers"
#: Owners of arms that run in this interpreter.
OWN = ("claw", "bare")
#: Places of all cores that this process may use.
ALL_CORES = tuple(range(len(os.sched_getaffinity(0))))
#: Seconds for imports, building and compiling; and beyond those that were asked for.
BUILD_DEADLINE, ANSWER_DEADLINE = 600.0, 120.0


class ServedError(Exception):
    """An arm failed, ended or hangs; one line."""


class Figure(NamedTuple):
    """What an arm did: how much, in how long (s), computing for how long (s)."""

    done: float
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        """Per second."""
        return self.done / self.seconds


class Arm(NamedTuple):
    """What is to be served.

    Attributes:
        owner: ``claw`` or ``bare`` (this interpreter), else one of peer_environments.RECIPES.
        name: in the owner's arms file.
        settings: plain data.
        cores: that its process may use, as places among those that this one may use.
        threads: of its torch.
    """

    owner: str
    name: str
    settings: Mapping[str, Any]
    cores: Sequence[int] = (0,)
    threads: int = 1

    @property
    def file(self) -> Path:
        """Its arms file."""
        return ARMS / f"{self.owner.replace('-', '_')}.py"


class Server:
    """A started arm. Ends with the block that :func:`serving` opens, in whatever way that is left.

    Args:
        arm: what it is.
        python: interpreter.
        log: file for whatever it prints.

    Raises:
        ServedError: it could not be built; one line that names the log.
    """

    def __init__(self, arm: Arm, python: str | Path, log: Path, deadline: float = BUILD_DEADLINE) -> None:
        self.arm, self.log, self._rest = arm, log, b""
        scratch = log.parent / "tmp"
        scratch.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PYTHONPATH"] = str(ROOT)  # workers and simulators of this product, for all arms alike
        environment["TMPDIR"] = str(scratch)
        environment.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(arm.threads)))
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [str(python), str(ARMS / "serve.py"), str(arm.file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=file, env=environment, start_new_session=True,
            )  # fmt: skip
        try:
            first = {"arm": arm.name, "settings": arm.settings, "affinity": list(arm.cores), "threads": arm.threads}
            self.about = self._ask(first, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of its process."""
        return self.process.pid

    def run(self, seconds: float | None = None, count: float | None = None, deadline: float | None = None) -> Figure:
        """Have it work for so long, or for so much.

        Raises:
            ServedError: it failed, ended, or gave no answer in time.
        """
        if deadline is None:
            deadline = ANSWER_DEADLINE + 10.0 * (seconds or 0.0)
        asked: dict[str, Any] = {"do": "run", **({"seconds": seconds} if count is None else {"count": count})}
        answer = self._ask(asked, deadline)
        return Figure(answer["count"], answer["seconds"], answer["cpu"])

    def ask(self, deadline: float = ANSWER_DEADLINE, **request: Any) -> dict[str, Any]:
        """Any other request that the arm knows."""
        return self._ask(request, deadline)

    def close(self) -> None:
        """End its whole process group."""
        with suppress(OSError):
            self._pipe(self.process.stdin).close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._pipe(self.process.stdout).close()

    def _ask(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        try:
            pipe = self._pipe(self.process.stdin)
            pipe.write((json.dumps(request) + "\n").encode())
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._line(deadline)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise self._error(f"answered what is no JSON: {line[:80]!r}") from None
        if "error" in answer:
            raise self._error(str(answer["error"]))
        return answer

    def _line(self, deadline: float) -> bytes:
        pipe, until = self._pipe(self.process.stdout), time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise self._error(f"gave no answer in {deadline:g} s")
                piece = os.read(pipe.fileno(), 65536)
                if not piece:
                    raise self._ended()
                self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self) -> ServedError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        status = self.process.returncode
        how = "closed its output" if status is None else f"ended with status {status}"
        return self._error(f"{how}: {last_line(self.log)}")

    def _error(self, text: str) -> ServedError:
        return ServedError(f"{self.arm.owner} {self.arm.name}: {text} (log: {self.log})")

    @staticmethod
    def _pipe(pipe: Any) -> Any:
        assert pipe is not None
        return pipe


def last_line(log: Path) -> str:
    """Of what an arm printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def interpreter(bench: Bench, owner: str) -> tuple[Path, str | None]:
    """Python of an arm's owner, and why there is none."""
    if owner in OWN:
        return Path(sys.executable), None
    if owner not in bench.args.against:
        return Path(), f"{owner} is left out (--against)"
    folder = bench.args.peers_folder
    return python_of(folder, owner), missing(folder, owner)


@contextmanager
def serving(bench: Bench, arms: Mapping[str, Arm]) -> Iterator[dict[str, Server]]:
    """Start a group's arms one after the other; those that cannot be had are noted with the reason.

    Args:
        bench: of the suite.
        arms: by their names in the suite's rows.
    """
    servers: dict[str, Server] = {}
    is_fine = False
    folder = Path(tempfile.mkdtemp(prefix="claw-benchmark-"))
    try:
        for name, arm in arms.items():
            python, reason = interpreter(bench, arm.owner)
            if reason is None:
                print(f"  building {name}", file=sys.stderr, flush=True)
                try:
                    servers[name] = server = Server(arm, python, folder / f"{name.replace('/', '-')}.log")
                    bench.describe_arm(name, {**server.about, "pid": None, "settings": dict(arm.settings)})
                except ServedError as error:
                    reason = str(error)
                    if arm.owner in OWN:
                        bench.results.failed[name] = reason
            if reason is not None:
                bench.absent(name, reason)
        yield servers
        is_fine = all(bench.reason(name) is None for name in servers) and set(servers) == set(arms)
    finally:
        for server in servers.values():
            server.close()
        # The logs of arms that failed are named in what is told of them.
        shutil.rmtree(folder if is_fine or not servers else folder / "tmp", ignore_errors=True)


def take_turns(
    bench: Bench, servers: dict[str, Server], rounds: int, counts: Mapping[str, float] | None = None
) -> dict[str, list[Figure]]:
    """Figures of each arm in each round; a first round warms up. An arm that fails is noted and left out.

    Args:
        bench: of the suite.
        servers: who takes turns.
        rounds: that count.
        counts: whole runs of so much work each, by arm, in place of ``bench.args.seconds``.
    """
    figures: dict[str, list[Figure]] = {name: [] for name in servers}
    for number in range(rounds + (1 if counts is None else 0)):  # whole runs have warmed up by themselves
        gc.collect()
        for name in [name for name in servers if name in figures]:
            try:
                if counts is None:
                    found = servers[name].run(bench.args.seconds)
                else:
                    found = servers[name].run(count=counts[name], deadline=3600.0)
            except ServedError as error:
                bench.absent(name, one_line(error))
                if servers[name].arm.owner in OWN:
                    bench.results.failed[name] = one_line(error)
                del figures[name]
                continue
            if number > 0 or counts is not None:
                figures[name].append(found)
    return figures


def measure_served(
    bench: Bench, group: str, arms: Mapping[str, Arm], unit: str, count: Mapping[str, float] | None = None,
    rounds: int | None = None,
) -> dict[str, list[Figure]]:  # fmt: skip
    """Serve a group's arms, have them take turns and keep their rates; rows are formed by ``bench.add_group``."""
    print(f"{group}: {', '.join(arms)}", file=sys.stderr, flush=True)
    with serving(bench, arms) as servers:
        figures = take_turns(bench, servers, rounds or bench.args.rounds, count)
    for name, found in figures.items():
        bench.keep_rate(group, name, [figure.rate for figure in found], unit)
        bench.results.cpu_share[f"{group}/{name}"] = round(median(f.cpu / f.seconds for f in found), 3)
    return figures


def rates(figures: Mapping[str, Sequence[Figure]]) -> dict[str, list[float]]:
    """Rates of each arm, round by round."""
    return {name: [figure.rate for figure in found] for name, found in figures.items()}
