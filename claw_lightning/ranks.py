"""Ranks: what the learners of one run do together, each with its own workers and replay. See docs/devices.md.

Two kinds of collective calls. Gradients and other tensors of the learning device go through the process group that
Lightning made (gloo or nccl); all ranks come to them at the same time, as they are in the same update. What ranks may
have to wait for (a slow simulator, an evaluation, a disk) goes through a gloo group of its own whose time-out does not
end an honest wait: it is looked at between short sleeps, so that signals and the failure of another rank are heard.

A rank that fails says so in the run's key-value store, where every rank also counts its heartbeats.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from claw_lightning.errors import ConfigError, RankError
from claw_lightning.logs import log_folder

log = logging.getLogger(__name__)

#: Between the seeds of ranks, so that no simulator, sampler or noise is that of another rank.
RANK_STRIDE = 1_000_003
#: The longest that one rank may wait for another that is alive.
PATIENCE = timedelta(days=7)
#: Seconds between heartbeats, and without one of a rank until it counts as lost (a process that is gone is noticed by
#: its connection at once; this is for stopped ones, broken networks, and waits inside nccl).
BEAT_SECONDS, LOST_SECONDS = 1.0, 20.0
#: Seconds that a rank has to end by itself once another one is lost, before it is ended.
GRACE_SECONDS = 8.0
#: Seconds that the reason of a broken connection is waited for.
REASON_SECONDS = 3.0


class Ranks:
    """This process among the ranks of a run. With one rank every method returns what it was given, at no cost.

    All ranks must come to the same calls in the same order; none may depend on what only one rank has seen.

    Attributes:
        rank: number of this one, from 0.
        size: of the world.
        local_size: ranks on this machine.
        waited: seconds spent waiting for other ranks so far.
        is_over: whether this rank calls no other one any more, because it has failed or finished.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_size: int = 1) -> None:
        self.rank, self.size, self.local_size = rank, size, local_size
        self.waited = 0.0
        self.is_over = size == 1
        self._has_failed = False
        self._control: Any = None
        self._watch: Watch | None = None

    def connect(self) -> None:
        """Make the group for waits, and begin to watch over the others."""
        with self._telling():
            self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._watch = Watch(self, 0)

    def begin(self) -> None:
        """Another run of the same trainer: watch again, where the one before has ended well."""
        if self.is_over and self._watch is not None and not self._has_failed:
            self.is_over = False
            self._watch = Watch(self, self._watch.number + 1)

    # -- tensors on the learning device, in the course of an update -----------------------------------------------

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their mean over ranks, in one call.

        A parameter that has a gradient on some ranks alone gets the mean with zeros for the others; one that has none
        anywhere stays without.
        """
        if self.size == 1:
            return
        params = list(parameters)
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in params]
        # Behind the gradients: who has one. Read only where this rank has none, so that a GPU need not be waited for.
        parts.append(torch.tensor([float(p.grad is not None) for p in params], device=params[0].device))
        flat = torch.cat([part.float() for part in parts])
        self._all_reduce(flat)
        flat /= self.size
        start, present = 0, flat[-len(params) :]
        for index, p in enumerate(params):
            mean = flat[start : start + p.numel()].view_as(p)
            start += p.numel()
            if p.grad is not None or float(present[index]) > 0:
                p.grad = mean.to(p.dtype)

    @torch.no_grad()
    def mean(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Means over ranks of a few small tensors, in one call."""
        if self.size == 1:
            return tensors
        flat = torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])
        self._all_reduce(flat)
        pieces = (flat / self.size).split([tensor.numel() for tensor in tensors])
        return tuple(piece.view_as(t).to(t.dtype) for piece, t in zip(pieces, tensors, strict=True))

    @torch.no_grad()
    def share(self, *weights: Tensor | None) -> tuple[Tensor | float, ...]:
        """Of each weighting, this rank's sum of weights over the ranks' mean of it; 1 where there are no weights.

        A weighted mean of this rank's rows times its share is, averaged over ranks, the weighted mean of all rows.
        """
        if self.size == 1 or all(weight is None for weight in weights):
            return (1.0,) * len(weights)
        given = [weight.detach().float().sum() for weight in weights if weight is not None]
        means = self.mean(*given)
        shares = iter([own / torch.where(m == 0, torch.ones_like(m), m) for own, m in zip(given, means, strict=True)])
        return tuple(1.0 if weight is None else next(shares) for weight in weights)

    @torch.no_grad()
    def broadcast_module(self, module: nn.Module) -> None:
        """Parameters and buffers of rank 0 for all."""
        if self.size > 1:
            with self._telling():
                for tensor in [*module.parameters(), *module.buffers()]:
                    dist.broadcast(tensor.data, src=0)

    def _all_reduce(self, tensor: Tensor) -> None:
        with self._telling():
            dist.all_reduce(tensor)

    # -- numbers and objects, for which ranks may have to wait ------------------------------------------------------

    def gather_numbers(self, numbers: Sequence[float] | np.ndarray, meanwhile: Callable[[], Any] | None = None) -> Any:
        """Numbers of all ranks, float64 [n] -> [size, n], in the order of ranks.

        Args:
            numbers: of this rank.
            meanwhile: called now and then while others are waited for.
        """
        own = torch.as_tensor(np.asarray(numbers, np.float64))
        if self.size == 1:
            return own.numpy()[None]
        found = [torch.empty_like(own) for _ in range(self.size)]
        started = time.perf_counter()
        with self._telling():
            self._await(dist.all_gather(found, own, group=self._control, async_op=True), meanwhile)
        self.waited += time.perf_counter() - started
        return torch.stack(found).numpy()

    def everyone(self, flag: bool) -> bool:
        """Whether it holds on every rank."""
        return flag if self.size == 1 else bool(self.gather_numbers([float(flag)]).all())

    def anyone(self, flag: bool) -> bool:
        """Whether it holds on some rank."""
        return flag if self.size == 1 else bool(self.gather_numbers([float(flag)]).any())

    def gather(self, value: Any, meanwhile: Callable[[], Any] | None = None) -> list[Any]:
        """Objects of all ranks, in their order; that of this rank alone once it :attr:`is_over`."""
        if self.is_over:
            return [value]
        self.gather_numbers([0.0], meanwhile)
        found: list[Any] = [None] * self.size
        with self._telling():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def broadcast(self, value: Any, meanwhile: Callable[[], Any] | None = None) -> Any:
        """The object of rank 0."""
        if self.is_over:
            return value
        self.gather_numbers([0.0], meanwhile)
        held = [value]
        with self._telling():
            dist.broadcast_object_list(held, src=0, group=self._control)
        return held[0]

    def _await(self, work: Any, meanwhile: Callable[[], Any] | None) -> None:
        pause, called = 5e-5, time.monotonic()
        while not work.is_completed():
            if self._watch is not None:
                self._watch.check()
            time.sleep(pause)
            pause = min(2.0 * pause, 2e-3)
            if meanwhile is not None and time.monotonic() - called > 0.2:
                called = time.monotonic()
                meanwhile()
        work.wait()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """A broken connection, as an error that says which rank has gone and why, as far as that can be found out."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:160]
            deadline = time.monotonic() + REASON_SECONDS
            while self._watch is not None and time.monotonic() < deadline:
                self._watch.check(error)
                time.sleep(0.05)
            raise RankError(f"the connection between the ranks broke on rank {self.rank}: {reason}") from error

    # -- agreement ------------------------------------------------------------------------------------------------

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Refuse to run where ranks were started with different settings.

        Raises:
            ConfigError: one line with the first key that differs and both values.
        """
        if self.size == 1:
            return
        plain = json.loads(json.dumps(settings, default=str))
        others = self.gather(plain)
        for rank, theirs in enumerate(others):
            for key in sorted({*others[0], *theirs}):
                if theirs.get(key) != others[0].get(key):
                    raise ConfigError(
                        f"{key} is {theirs.get(key)} on rank {rank} and {others[0].get(key)} on rank 0; start all "
                        "ranks with the same configuration"
                    )

    @torch.no_grad()
    def check_equal(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Compare tensors between ranks by the sums of their bits, which are exact in any order.

        Raises:
            RankError: one line with the first tensor that differs.
        """
        if self.size == 1:
            return
        named = list(tensors)
        sums = torch.stack([bit_sum(tensor) for _, tensor in named]).cpu()
        halves = torch.stack((sums >> 32, sums & 0xFFFFFFFF)).double().numpy()  # whole numbers that float64 holds
        found = self.gather_numbers(halves.reshape(-1)).reshape(self.size, 2, -1)
        differs = (found != found[0]).any((0, 1))
        if differs.any():
            index = int(differs.argmax())
            rank = int((found[:, :, index] != found[0, :, index]).any(1).argmax())
            raise RankError(
                f"{named[index][0]} differs between rank 0 and rank {rank}: something changes it by what one rank "
                "alone has seen, such as a callback (docs/devices.md); the run ends, the last checkpoint is from before"
            )

    # -- the end --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The run has ended well: whatever the others do from now on is no failure."""
        if self.size == 1:
            return
        self.is_over = True
        if self._watch is not None:
            self._watch.close("")

    def fail(self, error: BaseException, trainer: Any = None) -> None:
        """Tell the others, and call no other rank any more: what this one still does at its end, it does alone."""
        if self.size == 1 or (self.is_over and self._watch is not None and self._watch.is_closed):
            return
        self.is_over = self._has_failed = True
        strategy = getattr(trainer, "strategy", None)
        if strategy is not None:
            strategy.barrier = lambda *args, **kwargs: None
            strategy.broadcast = lambda obj, src=0: obj
        if self._watch is not None:
            is_second_hand = isinstance(error, RankError)
            text = " ".join(str(error).split()) or type(error).__name__
            self._watch.close("" if is_second_hand else f"rank {self.rank} failed: {text[:300]}")


class Watch:
    """A thread that beats for this rank, looks for the others' beats and last words, and ends what cannot end itself.

    It has a connection of its own to the store, which rank 0 holds: that this breaks means that rank 0 is gone.
    """

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks, self.number = ranks, number
        self.lost: str | None = None
        self.is_closed = False
        self._seen: dict[int, tuple[str, float]] = {}
        self._beats = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=LOST_SECONDS),
                                    wait_for_workers=False)  # fmt: skip
        self._prefix = f"claw/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{number}"
        self._beat()
        threading.Thread(target=self._run, name="ranks", daemon=True).start()

    def check(self, cause: BaseException | None = None) -> None:
        """Raise :class:`RankError` if another rank is known to be lost."""
        lost = self.lost or family_loss()
        if lost is not None:
            raise RankError(lost) from cause

    def close(self, last_words: str) -> None:
        """Beat no more. ``last_words`` are for the others; none: this rank has nothing to say."""
        if self.is_closed:
            return
        self.is_closed = True
        self._closing.set()
        with contextlib.suppress(Exception), self._lock:
            self._store.set(f"{self._prefix}/last/{self.ranks.rank}", last_words or "-")

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"{self._prefix}/beat/{self.ranks.rank}", str(self._beats))

    def _look(self) -> str | None:
        """What is wrong with another rank; None: nothing."""
        now = time.monotonic()
        for rank in range(self.ranks.size):
            if rank == self.ranks.rank:
                continue
            words = self._read(f"last/{rank}")
            if words is not None:
                if words != "-":
                    return words
                self._seen[rank] = ("-", now)
                continue
            beat = self._read(f"beat/{rank}") or ""
            if beat != self._seen.get(rank, (None, 0.0))[0]:
                self._seen[rank] = (beat, now)
            elif now - self._seen[rank][1] > LOST_SECONDS:
                return f"rank {rank} has not been heard of for {LOST_SECONDS:g} s: it hangs, or its network does"
        return None

    def _read(self, key: str) -> str | None:
        name = f"{self._prefix}/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None

    def _run(self) -> None:
        while not self._closing.wait(BEAT_SECONDS):
            try:
                with self._lock:
                    self._beat()
                    self.lost = self._look()
            except Exception:  # whatever the store's connection raises: its holder is gone
                if not self._closing.wait(1.0):  # or about to end well, as this rank is
                    self.lost = family_loss() or "rank 0 has gone"
            if self.lost is not None:
                end_unless_over(self.lost)
                return


# -- processes of one machine -----------------------------------------------------------------------------------------

#: Ranks that this process has started (subprocess.Popen by rank), and the process that has started this rank.
children: dict[int, Any] = {}
_parent: tuple[int, int] | None = None
_connected: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()
_folders: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()
_opened: WeakSet[Any] = WeakSet()
PARENT_VARIABLE = "CLAW_LEADING_PROCESS"
#: Exit statuses of a rank that was told to end.
INTERRUPTED = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def family_loss() -> str | None:
    """Which process among those that started each other has ended; None: none that should not have."""
    for rank, process in children.items():
        code = process.poll()
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            return f"rank {rank} (process {process.pid}) {how}"
    if _parent is not None and os.getppid() != _parent[1]:
        return f"rank {_parent[0]} (process {_parent[1]}), which started this one, has ended"
    return None


def watch_family(rank: int) -> None:
    """Watch over the processes of this machine's ranks from now on, also before they have met.

    Args:
        rank: of the process that starts the others of this machine.
    """
    global _parent
    leader = os.environ.get(PARENT_VARIABLE)
    if leader == str(os.getppid()):
        _parent = (rank, int(leader))
    if _parent is not None or children:
        threading.Thread(target=_guard, name="ranks-family", daemon=True).start()


def _guard() -> None:
    while True:
        time.sleep(0.5)
        if any(ranks.is_over for ranks in list(_connected.values())):
            return
        lost = family_loss()
        if lost is not None:
            end_unless_over(lost)
            return


def end_unless_over(reason: str) -> None:
    """End this process, unless it begins to end by itself: it may be waiting where nothing wakes it (rendezvous, nccl).

    Its workers end with it, by the kernel and the end of their standard input.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline:
        if any(ranks.is_over for ranks in list(_connected.values())):
            return
        time.sleep(0.1)
    with contextlib.suppress(OSError):
        print(f"lightning: error: {reason}; ending this rank", file=sys.stderr, flush=True)
    codes = [process.poll() or 0 for process in children.values()]
    for process in children.values():
        with contextlib.suppress(OSError):
            process.kill()
    # A signal that came to all of them before the run began is no failure of one.
    os._exit(next((code for code in codes if code in INTERRUPTED), 1))


# -- of a trainer -----------------------------------------------------------------------------------------------------

SINGLE = Ranks()


def ranks_of(trainer: Any) -> Ranks:
    """The ranks of a trainer's run. All ranks must come to the first call, which connects them: ``setup`` does.

    Plug-ins that change parameters by what a rank has seen use it to agree with the others.
    """
    if trainer is None or getattr(trainer, "world_size", 1) == 1:
        return SINGLE
    found = _connected.get(trainer)
    if found is None:
        local = int(getattr(trainer.strategy, "num_processes", 1))
        found = Ranks(trainer.global_rank, trainer.world_size, local)
        found.connect()
        _connected[trainer] = found
    return found


def has_met(trainer: Any) -> bool:
    """Whether the ranks of a trainer's run are connected, and hear of each other."""
    return trainer is not None and trainer in _connected


def run_folder(trainer: Any) -> Path:
    """Folder of a run. Asked from all ranks the first time; Lightning's own property calls all ranks every time."""
    if getattr(trainer, "world_size", 1) == 1:
        return log_folder(trainer)
    if trainer not in _folders:
        _folders[trainer] = log_folder(trainer)
    return _folders[trainer]


def open_run_folder(trainer: Any) -> Path:
    """Folder of a run that has been accepted: made, and taken so that no other run gets it. On all ranks at once.

    Before, :func:`run_folder` names the folder as it would be now, and nothing is to be written into it: a run that is
    refused leaves none. Idempotent for each trainer.

    Raises:
        ConfigError: the folder cannot be made; one line with the cure.
    """
    if trainer in _opened:
        return run_folder(trainer)
    if trainer.is_global_zero:
        try:
            for logger in getattr(trainer, "loggers", ()):
                if hasattr(logger, "claim"):
                    logger.claim()
            if getattr(trainer, "world_size", 1) == 1:
                run_folder(trainer).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            folder = error.filename or trainer.default_root_dir
            raise ConfigError(
                f"the run's folder {folder} cannot be made ({error.strerror or error}); set save_dir of trainer.logger "
                "(or trainer.default_root_dir) to a folder that can be written"
            ) from error
    _folders.pop(trainer, None)
    _opened.add(trainer)
    return run_folder(trainer)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def times(part: Tensor | float, loss: Tensor) -> Tensor:
    """A loss times a share of :meth:`Ranks.share`; the loss itself, and no node in its graph, on one rank."""
    return loss if isinstance(part, float) else part * loss


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's words as integers, int64 []."""
    words = tensor.detach().contiguous().reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return words.view(kinds[words.element_size()]).long().sum()


#: Logged figures that are sums over ranks, and those of which the extreme counts; the others are means.
SUMS = ("replay/steps", "replay/quarantined", "worker/alive", "worker/restarts", "worker/recycled", "rollout/episodes")
MAXIMA = ("staleness/max", "staleness/collection")
#: Logged for each rank as well.
PER_RANK = ("rate/learner_wait", "rate/worker_wait", "rate/rank_wait")


def merge_metrics(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Figures of one logging step, of all ranks -> of the run. A figure that only some ranks have is theirs alone."""
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in found for name in metrics):
        values = [float(metrics[name]) for metrics in found if name in metrics]
        if name in SUMS:
            merged[name] = sum(values)
        elif name in MAXIMA or name.startswith("memory/") and name != "memory/free_gb":
            merged[name] = max(values)
        elif name == "memory/free_gb":
            merged[name] = min(values)
        else:
            merged[name] = sum(values) / len(values)
        if name in PER_RANK:
            merged.update({f"{name}_{rank}": float(m[name]) for rank, m in enumerate(found) if name in m})
    return merged


#: Of the rate limiter's state, what is counted by each rank on its own.
COUNTERS = ("inserted", "sampled", "warmup")


def part_of(total: int, rank: int, size: int) -> int:
    """This rank's part of a number that is dealt as evenly as it goes."""
    return total * (rank + 1) // size - total * rank // size


def deal_state(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """This rank's state of the data module, of a checkpoint of as many ranks or of another number.

    Of another number, counters are dealt so that their sums stay; what else is one rank's own begins anew.
    """
    states = state.get("ranks") or [{name: value for name, value in state.items() if name not in ("ranks", "world")}]
    world = int(state.get("world", len(states)))  # more than states, where a rank was lost before the save
    if world == size and (rank < len(states) or size == 1):
        return dict(states[min(rank, len(states) - 1)])
    mine = states[rank % len(states)]
    kept = {name: mine[name] for name in ("episodes", "sampler", "run") if name in mine}
    totals = {name: total_of(states, world, name) for name in COUNTERS}
    kept["limiter"] = {**mine["limiter"], **{name: part_of(total, rank, size) for name, total in totals.items()}}
    episodes = sum(each["episodes"]["total"] for each in states) * world // len(states)
    kept["episodes"] = {**mine["episodes"], "total": part_of(episodes, rank, size)}
    return kept


def total_of(states: Sequence[dict[str, Any]], world: int, name: str) -> int:
    """Sum over ranks of one of the rate limiter's counters."""
    return int(sum(each["limiter"][name] for each in states)) * world // len(states)


def env_steps_of(state: dict[str, Any]) -> int:
    """Environment steps of all ranks in a data module's state."""
    states = state.get("ranks") or [state]
    return total_of(states, int(state.get("world", len(states))), "inserted")
