"""ReplayDataModule and ReplayStream: experience from background workers, as a stream of replay batches."""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from claw_lightning.checks import check_numbers, check_types
from claw_lightning.errors import ConfigError, WorkerError
from claw_lightning.events import FILE_NAME, EventLog, Playback
from claw_lightning.files import expand
from claw_lightning.limits import (
    USABLE,
    MemoryEstimate,
    available_memory,
    format_bytes,
    learner_bytes,
    process_bytes,
    refuse_oversized,
)
from claw_lightning.lockstep import LockStep
from claw_lightning.logs import hold_log, log_to_file, log_traceback, stop_logging_to_file
from claw_lightning.metrics import EpisodeStatistics
from claw_lightning.pool import DEADLINES, FailurePolicy, WorkerPool
from claw_lightning.process import SEED_STRIDE, LocalWorker, Worker, WorkerCommand
from claw_lightning.randomness import derived_seed, global_state, set_global_state
from claw_lightning.ranks import (
    RANK_STRIDE,
    SINGLE,
    Ranks,
    deal_state,
    env_steps_of,
    open_run_folder,
    ranks_of,
    run_folder,
)
from claw_lightning.rate import RateLimiter
from claw_lightning.remote.config import RayConfig
from claw_lightning.replay import Hindsight, Relabeller, ReplayBatch, ReplayMemory, Sampler
from claw_lightning.replay.episodes import EpisodeIndex
from claw_lightning.replay.memory import Draw
from claw_lightning.replay.minari import minari_rings
from claw_lightning.replay.prefetch import CLOSE_SECONDS, Prefetcher, Transfer
from claw_lightning.replay.resident import ResidentReplay, free_bytes
from claw_lightning.replay.samplers import Places, Uniform
from claw_lightning.replay.shards import ReplayShare, clear_others, find_shards, mark_complete, shard_folder
from claw_lightning.replay.storage import (
    DONE,
    REPLAY_FOLDER,
    StoredReplay,
    discard_replay,
    load_replay,
    save_replay,
    set_progress,
)
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.collector import Collector, Episode, evaluate
from claw_lightning.rollout.control import TIMERS, Control
from claw_lightning.rollout.envs.base import (
    SAME_STEP,
    ContractError,
    EnvError,
    EnvSpec,
    VectorEnv,
    make_env,
    resolve_class,
)
from claw_lightning.rollout.goals import GoalReward, goal_reward
from claw_lightning.rollout.images import CODECS, make_codec
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.networks import Policy
from claw_lightning.rollout.normalizer import merged_moments
from claw_lightning.rollout.recorder import Recorder
from claw_lightning.rollout.ring import LaneRing, RowLayout

if TYPE_CHECKING:
    from claw_lightning.remote.cluster import RayCluster

log = logging.getLogger(__name__)

POLL_SECONDS = 0.001
STOP_WITHOUT_SIGNAL = 1000  # above all numbers of signals
AHEAD_SECONDS = 0.05  # of waiting for the thread that draws ahead, between looks at the workers
MINARI = "minari:"
#: Arguments of the data module whose types are looked at where they are used; a path may be a ``Path``.
OTHER_TYPES = ("env", "deadlines", "worker_python", "replay_events", "replay_path", "initial_replay")


@dataclass
class EnvConfig:
    """Which simulator runs in the workers.

    Attributes:
        class_path: a VectorEnv: the bare name of a shipped adapter (EnvPoolEnv, GymnasiumEnv) or a dotted path that the
            worker's interpreter can import.
        init_args: its arguments; ``task`` is the simulator's own name of the task.
    """

    class_path: str = "EnvPoolEnv"
    init_args: dict[str, Any] = field(default_factory=dict)


@contextmanager
def simulator_errors() -> Iterator[None]:
    """What a simulator in this process (lock-step mode) does wrong, as an error of this package."""
    try:
        yield
    except EnvError as error:
        raise ConfigError(str(error)) from error
    except ContractError as error:
        raise WorkerError(str(error)) from error
    except SystemExit as error:  # some simulators call quit() when they cannot start
        raise WorkerError(f"the simulator called exit({error.code})") from error


class ReplayDataModule(pl.LightningDataModule):
    """Owns the workers, their rings and the rate limiter; hands out replay batches and plays evaluations.

    Public attributes for callbacks: :attr:`spec`, :attr:`memory`, :attr:`limiter`, :attr:`pool`, :attr:`episodes`,
    :attr:`env_steps`, :attr:`finished`, :attr:`learner_wait`; methods :meth:`publish`, :meth:`evaluate` and
    :meth:`configure_envs`.

    Args:
        env: simulator and task; an :class:`EnvConfig` (which is what the command makes of ``data.env``): the simulator
            itself is only ever built in the workers.
        num_workers: worker processes.
        envs_per_worker: lanes of each.
        worker_python: interpreter of the workers; None: this one.
        worker_device: ``cpu``, or ``cuda:<n>``: the GPU that the workers' simulators see; policies run on
            their CPU, or with adapters that deal in tensors (Isaac Gym) on that GPU.
        worker_threads: threads of each worker's torch; simulators have their own setting.
        learner_threads: threads of the learner's torch; None: the cores that the workers leave, at least one.
        capacity: environment steps kept, all workers together.
        batch_size: samples per update.
        updates_per_step: updates per ``training_step``; amortises Lightning's fixed cost per step.
        samples_per_insert: batch_size x updates / environment steps inserted; the replay ratio that compares across
            numbers of environments and batch sizes.
        rate_band: samples that workers may run ahead; None: twice the smallest that works.
        warmup_steps: environment steps with uniform actions before learning begins.
        max_env_steps: environment steps after which the run ends; 0: never.
        mode: ``overlapped`` (background processes) or ``lockstep`` (one process, fixed order, bit-exact for a seed).
        pull_every: vector steps between a worker's looks for a newer policy.
        eval_episodes: noise-free episodes per validation.
        eval_envs: lanes of the evaluator.
        eval_seed: seed of the evaluator's simulator.
        seed: of simulators, exploration and sampler; None: ``seed_everything``'s, else 0.
        on_worker_failure: what follows a worker's death, hang or error. ``restart``: a new process, and an error once
            the budget is spent. ``degrade``: a new process, and once the budget is spent the run goes on without the
            worker, as long as one is left. ``stop``: the run ends at once.
        restart_budget: restarts of one worker within ``restart_window``.
        restart_window: seconds in which the budget is counted.
        deadlines: seconds after which a worker counts as hung, by what it does, such as ``--data.deadlines.step 5``.
            Without a heartbeat: ``start`` (300), ``reset`` (120), ``step`` (60), ``pull`` (30), ``wait`` (30),
            ``evaluate`` (60). ``write`` (240, or twice ``step`` or ``reset``): without a step although it may take
            some. ``adopt`` (120): with an old policy.
        recycle_steps: environment steps of one worker process after which a fresh one takes its place, at no cost to
            the budget: simulators leak memory; 0: never.
        record_events: write ``events.jsonl`` into the run's folder (overlapped mode only).
        replay_events: such a file: that run is run again in this process, step by step the same; for debuggers. All
            other settings must be those of the recorded run; nothing is recorded.
        sampler: which stored rows are learned from; None: all alike (:class:`Uniform`).
        image_codec: compression of stored images, for tasks that have images: ``none``, ``zlib``, or ``lz4`` (several
            times as fast; ``pip install 'claw-lightning[images]'``). They are decoded when sampled.
        image_bytes: memory for each compressed image, on average; what does not fit displaces the oldest images, and
            their steps with them (``replay/steps`` tells). None: a quarter of its pixels. A run that is resumed fills
            its memory anew: compressed images are not stored with checkpoints.
        replay_path: folder for the rings, which then lie in files and not in memory: a replay larger than memory, at
            the speed of the disk. The files are gone when the run ends, however it ends; None: in memory.
        initial_replay: experience to start with, learned from beside the run's own throughout: a stored replay
            (such as ``runs/version_0/checkpoints/replay``) or ``minari:<data set>``.
        hindsight: give samples of goal-conditioned tasks goals that their episodes reached; None: do not.
        prefetch: draw the next batch in a thread while this one is learned from, as soon as the rate allows it. It is
            then drawn before this one's updates and priorities. None: where the learner runs on a GPU and workers in
            the background, except for runs that are recorded or run again.
        replay_device: ``cuda``, or ``cuda:<n>``: keep all rows in the learner's GPU as well and gather batches there,
            so that each step crosses the bus once; ``cpu``: batches are gathered on the host and copied.
        collector: ``local``: workers are processes of this machine; ``ray``: of the nodes of a Ray cluster
            (``pip install 'claw-lightning[ray]'``, docs/ray.md). Evaluations are played here.
        ray: which cluster, and what each worker takes of a node.
    """

    def __init__(
        self,
        env: VectorEnv,
        num_workers: int = 1,
        envs_per_worker: int = 16,
        worker_python: str | None = None,
        worker_device: str = "cpu",
        worker_threads: int = 1,
        learner_threads: int | None = None,
        capacity: int = 1_000_000,
        batch_size: int = 256,
        updates_per_step: int = 8,
        samples_per_insert: float = 64.0,
        rate_band: float | None = None,
        warmup_steps: int = 1_000,
        max_env_steps: int = 0,
        mode: Literal["overlapped", "lockstep"] = "overlapped",
        pull_every: int = 1,
        eval_episodes: int = 20,
        eval_envs: int = 10,
        eval_seed: int = 12345,
        seed: int | None = None,
        on_worker_failure: Literal["restart", "degrade", "stop"] = "restart",
        restart_budget: int = 5,
        restart_window: float = 600.0,
        deadlines: dict[str, float] | None = None,
        recycle_steps: int = 0,
        record_events: bool = False,
        replay_events: str | None = None,
        sampler: Sampler | None = None,
        hindsight: Hindsight | None = None,
        replay_path: str | None = None,
        initial_replay: str | None = None,
        image_codec: Literal["none", "zlib", "lz4"] = "none",
        image_bytes: int | None = None,
        prefetch: bool | None = None,
        replay_device: str = "cpu",
        collector: Literal["local", "ray"] = "local",
        ray: RayConfig | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(env, EnvConfig):
            raise ConfigError("data.env: give an EnvConfig; simulators are built in the workers")
        self.env = env
        self.num_workers, self.envs_per_worker = num_workers, envs_per_worker
        self.worker_python = expand(worker_python) or sys.executable
        self.worker_device, self.worker_threads, self.learner_threads = worker_device, worker_threads, learner_threads
        self.capacity, self.batch_size, self.updates_per_step = capacity, batch_size, updates_per_step
        self.samples_per_insert, self.rate_band = samples_per_insert, rate_band
        self.warmup_steps, self.max_env_steps, self.mode = warmup_steps, max_env_steps, mode
        self.pull_every, self.eval_episodes, self.eval_envs = pull_every, eval_episodes, eval_envs
        self.eval_seed, self._seed = eval_seed, seed
        self.on_worker_failure, self.restart_budget = on_worker_failure, restart_budget
        self.restart_window, self.deadlines = restart_window, dict(deadlines or {})
        self.recycle_steps, self.record_events, self.replay_events = recycle_steps, record_events, expand(replay_events)
        self.sampler, self.hindsight = sampler or Uniform(), hindsight
        self.image_codec, self.image_bytes = image_codec, image_bytes
        self.replay_path, self.initial_replay = expand(replay_path), expand(initial_replay)
        self.prefetch, self.replay_device = prefetch, replay_device
        self.collector, self.ray = collector, ray
        self._check()
        self.spec: EnvSpec | None = None
        self.versions: dict[str, str] = {}
        self.pool: WorkerPool | None = None
        self.memory: ReplayMemory | None = None
        #: The ranks of the run (:mod:`claw_lightning.ranks`); what follows is this rank's own, but for env_steps.
        self.ranks: Ranks = SINGLE
        self.limiter = self._new_limiter()
        self.episodes = EpisodeStatistics()
        self.learner_wait = 0.0
        self.handed_out = 0  # batches
        self._mark: tuple[float, float, dict[str, float]] = (0.0, 0.0, {})
        self._rank_mark = 0.0
        self.stop_requested: Callable[[], bool] = lambda: False
        #: Number of the signal that asked this rank to stop, 0 if none did; and what is told of another rank's.
        self.stop_number: Callable[[], int] = lambda: 0
        self.stopped_elsewhere: Callable[[int], None] = lambda number: None
        self._process_bytes = (0, 0)  # of a process with one lane, of each further lane
        self._mailbox: Mailbox | None = None
        self._published = 0
        self._evaluator: WorkerPool | None = None
        self._evaluator_draws = False  # whether images can be taken of its simulator
        #: Called as ``listener(event, worker, detail)`` where something happens to a process: texts; events are
        #: ``start``, ``ready``, ``death``, ``hang``, ``restart``, ``recycle``, ``give_up`` and ``stop``, workers are
        #: ``worker_<i>`` and ``evaluator``.
        self.worker_listeners: list[Callable[[str, str, str], None]] = []
        self._describer: WorkerPool | None = None
        self._cluster: RayCluster | None = None
        self._eval_result: dict[str, Any] | None = None
        self._eval_requests = 0
        self._restored_steps = 0
        self._resumed: dict[str, Any] | None = None  # what a checkpoint holds, until the workers are started
        self._start_seed: int | None = None  # of what is begun at a resume
        self._stored: ReplayShare | None = None
        self._global_steps = 0  # of all ranks, when they last met
        self._global_episodes = 0
        self._achieved = 0.0
        self._wants_end = self._ends = False
        self._run_id = uuid.uuid4().hex  # by which checkpoints and the replay beside them know each other
        self._is_resumed = False
        self._has_same_rings = False  # a restored replay lies step by step where it lay
        self._is_exact = False  # and ends where the checkpoint does
        self._is_rewound = False  # what was stored behind that is given up
        self._reward_env: VectorEnv | None = None
        self._closed = False
        self._is_open = False  # there is a folder of the run, and log files in it
        self._description: tempfile.TemporaryDirectory[str] | None = None
        self._segment_length = 1
        self._local: LockStep | None = None
        self._local_evaluator: Any = None
        self._events: EventLog | None = None
        self._playback: Playback | None = None
        self._prefetcher: Prefetcher[tuple[ReplayBatch, Any]] | None = None
        self._transfer: Transfer | None = None
        #: Held by draws, and by whoever else touches what they use: sampler and hindsight.
        self._drawing = threading.Lock()
        #: Settings of running simulators that were changed, by their mode.
        self._configured: dict[str, dict[str, Any]] = {"collect": {}, "evaluate": {}}

    # -- settings -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        plain = [name for name in inspect.signature(ReplayDataModule).parameters if name not in OTHER_TYPES]
        values = {name: self._seed if name == "seed" else getattr(self, name) for name in plain}
        check_types("data", values, ReplayDataModule.__init__)
        positive = (
            "num_workers", "envs_per_worker", "worker_threads", "capacity", "batch_size", "updates_per_step",
            "pull_every", "eval_episodes", "eval_envs",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                raise ConfigError(f"data.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("warmup_steps", "max_env_steps", "restart_budget", "recycle_steps", "eval_seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"data.{name} is {getattr(self, name)}; it cannot be negative")
        for name, value in (("learner_threads", self.learner_threads), ("seed", self._seed)):
            if value is not None and value < (1 if name == "learner_threads" else 0):
                raise ConfigError(f"data.{name} is {value}; give a larger number, or null")
        positive_numbers = ("samples_per_insert", "rate_band", "restart_window")
        check_numbers("data", {name: getattr(self, name) for name in positive_numbers}, above=0.0)
        self._check_supervision()
        self._check_images()
        self._check_prefetch()
        self._check_collector()
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.replay_device):
            raise ConfigError(f"data.replay_device is '{self.replay_device}'; use cpu, cuda or cuda:<number>")
        if self.samples_per_insert < 1e-6:
            raise ConfigError(f"data.samples_per_insert is {self.samples_per_insert}; it must be at least 1e-6")
        if self.batch_size > self.capacity:
            raise ConfigError(
                f"data.batch_size ({self.batch_size}) is larger than data.capacity ({self.capacity}); "
                "lower the one or raise the other"
            )
        if self.warmup_steps > self.capacity:
            raise ConfigError(
                f"data.warmup_steps ({self.warmup_steps}) is larger than data.capacity ({self.capacity}); "
                "learning would never begin"
            )
        if 0 < self.max_env_steps <= self.warmup_steps:
            raise ConfigError(
                f"data.max_env_steps ({self.max_env_steps}) is not above data.warmup_steps ({self.warmup_steps}); "
                "nothing would be learned"
            )
        if self.ring_steps < 8:
            raise ConfigError(
                f"data.capacity ({self.capacity}) leaves {self.ring_steps} vector steps for each of "
                f"{self.num_workers} x {self.envs_per_worker} environments; at least 8 are needed"
            )
        if not re.fullmatch(r"cpu|cuda:\d+", self.worker_device):
            raise ConfigError(f"data.worker_device is '{self.worker_device}'; use cpu or cuda:<number>")
        cores = len(os.sched_getaffinity(0))
        wanted = (self.learner_threads or 1) + self._local_workers * self.worker_threads
        if self.mode == "overlapped" and wanted > max(2, cores):
            log.warning(
                "data.num_workers x data.worker_threads + the learner's threads are %d on %d cores: every process "
                "will be slower than it need be",
                wanted,
                cores,
            )

    def _check_images(self) -> None:
        if self.image_codec not in CODECS:
            raise ConfigError(f"data.image_codec is '{self.image_codec}'; use one of {', '.join(CODECS)}")
        if self.image_bytes is None:
            return
        if self.image_bytes < 1:
            raise ConfigError(f"data.image_bytes is {self.image_bytes}; it must be at least 1 (null: a quarter)")
        if self.image_codec == "none":
            raise ConfigError(
                f"data.image_bytes ({self.image_bytes}) does nothing with data.image_codec 'none'; use zlib or lz4"
            )

    def _check_collector(self) -> None:
        if self.collector == "local":
            if self.ray is not None and self.ray != RayConfig():
                raise ConfigError("data.ray does nothing with data.collector local; set data.collector ray")
            return
        if self.mode == "lockstep":
            raise ConfigError("data.collector ray: lock-step mode is one process; set data.mode to overlapped")
        for name in ("record_events", "replay_events"):
            if getattr(self, name):
                raise ConfigError(
                    f"data.{name} is for runs on one machine: another one may round differently; set data.collector "
                    "local"
                )
        num_gpus = RayConfig().num_gpus if self.ray is None else self.ray.num_gpus
        if (num_gpus > 0) != self.worker_device.startswith("cuda"):
            raise ConfigError(
                f"data.worker_device {self.worker_device} and data.ray.num_gpus {num_gpus:g}: workers on a GPU must "
                "ask Ray for one, or a share of one, and others must not; set cuda:0 with num_gpus, or cpu with 0"
            )
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "data.collector ray needs the package ray: pip install 'claw-lightning[ray]'; or set data.collector "
                "local"
            )

    def _check_prefetch(self) -> None:
        if not self.prefetch:
            return
        others = {
            "data.mode lockstep": self.mode == "lockstep",
            "data.record_events": self.record_events,
            "data.replay_events": self.replay_events,
        }
        for name, is_set in others.items():
            if is_set:
                raise ConfigError(
                    f"data.prefetch does not go with {name}: such runs repeat by the order of draws and updates; set "
                    "data.prefetch false"
                )

    def _check_supervision(self) -> None:
        for name, seconds in self.deadlines.items():
            if name not in DEADLINES:
                raise ConfigError(f"data.deadlines: there is none for '{name}'; known are {', '.join(DEADLINES)}")
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
                raise ConfigError(f"data.deadlines.{name} is {seconds!r}; give a number of seconds")
        check_numbers("data.deadlines", self.deadlines, above=0.0)
        if self.on_worker_failure not in ("restart", "degrade", "stop"):
            raise ConfigError(f"data.on_worker_failure is '{self.on_worker_failure}'; use restart, degrade or stop")
        for name in ("record_events", "replay_events"):
            if getattr(self, name) and self.mode == "lockstep":
                raise ConfigError(f"data.{name}: a run in lock-step repeats by itself; set data.mode to overlapped")
        self._check_local()

    def _check_local(self) -> None:
        """Refuse what takes steps in this process, or is of use for that alone, where the simulator cannot."""
        reasons = {
            "mode lockstep": (self.mode == "lockstep", "set data.mode to overlapped"),
            "record_events": (self.record_events, "the run could never be played again; leave data.record_events out"),
            "replay_events": (self.replay_events, "leave data.replay_events out"),
        }
        for name, (is_set, cure) in reasons.items():
            if is_set and not self._may_run_in_lockstep():
                adapter = self.env.class_path.rpartition(".")[2]
                raise ConfigError(f"data.{name}: {adapter} cannot run in the learner's process; {cure}")

    def _may_run_in_lockstep(self) -> bool:
        try:
            cls: Any = resolve_class(self.env.class_path)
        except Exception:  # a user's own file may fail in any way; who builds it says how
            return True
        return bool(cls.may_run_in_lockstep)

    @property
    def lanes(self) -> int:
        """Environments of all workers."""
        return self.num_workers * self.envs_per_worker

    @property
    def _local_workers(self) -> int:
        """Workers that run on this machine, as far as that is known beforehand."""
        is_elsewhere = self.collector == "ray" and self.ray is not None and self.ray.address is not None
        return 0 if is_elsewhere else self.num_workers

    @property
    def ring_steps(self) -> int:
        """Vector steps that each worker's ring keeps."""
        return self.capacity // self.lanes

    @property
    def seed(self) -> int:
        """Base seed of this rank; workers add their index."""
        base = int(os.environ.get("PL_GLOBAL_SEED", 0)) if self._seed is None else self._seed
        return base + RANK_STRIDE * self.ranks.rank

    def _new_limiter(self) -> RateLimiter:
        step, size = self.envs_per_worker, self.ranks.size  # step: granularity in which workers insert
        try:
            limiter = RateLimiter(
                self.samples_per_insert,
                -(-self.warmup_steps // (step * size)) * step,
                self.batch_size * self.updates_per_step,
                self.lanes,
                self.rate_band,
                self.max_env_steps // (step * size) * step,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if limiter.finished:
            raise ConfigError(
                f"data.max_env_steps ({self.max_env_steps}) pays for less than one training step of "
                f"{self.updates_per_step} x {self.batch_size} samples "
                f"at data.samples_per_insert {self.samples_per_insert:g}"
            )
        return limiter

    @property
    def env_steps(self) -> int:
        """Environment steps inserted by all ranks since the beginning of the run (resumed runs included)."""
        return self.limiter.inserted if self.ranks.size == 1 else self._global_steps

    @property
    def episodes_finished(self) -> int:
        """Training episodes finished on all ranks."""
        return self.episodes.total if self.ranks.size == 1 else self._global_episodes

    def ask_to_stop(self) -> None:
        """End the run after the next training step, on all ranks and with a validation on the way out."""
        self._wants_end = True

    @property
    def finished(self) -> bool:
        """Whether ``max_env_steps`` have been collected and learned from."""
        return self._has_finished if self.ranks.size == 1 else self._ends

    @property
    def _has_finished(self) -> bool:
        return self.limiter.finished and self._samples_ahead == 0

    @property
    def _samples_ahead(self) -> int:
        """Samples that were drawn, and counted, but not handed out."""
        is_pending = self._prefetcher is not None and self._prefetcher.pending
        return self.limiter.request if is_pending else 0

    # -- Lightning hooks ----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Learn the task's sizes from a short-lived worker, and share out the cores."""
        self._join_ranks()
        if not self._is_open:
            hold_log()
            for logger in [] if self.trainer is None else self.trainer.loggers:
                if hasattr(logger, "command"):
                    logger.command = str(getattr(stage, "value", stage))
        if stage == "fit" and self.replay_device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"data.replay_device is '{self.replay_device}', but torch finds no GPU here; use cpu")
        if stage == "fit" and self.replay_events is not None and self._playback is None:
            self._playback = Playback(Path(self.replay_events))
        if self.spec is None:
            self.spec, self.versions = self.describe()
            versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
            log.info("task %s%s", self.spec.task, f": {versions}" if versions else "")
            self._check_memory(self.spec)
        if self.learner_threads is not None:
            torch.set_num_threads(self.learner_threads)
        else:
            workers = self._local_workers * self.worker_threads if self.mode == "overlapped" else 0
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // self.ranks.local_size - workers))

    def _join_ranks(self) -> None:
        """Take this rank's part of what all ranks do together."""
        if self.trainer is None:
            return
        if self.ranks is not SINGLE:
            self.ranks.begin()
            return
        self.ranks = ranks = ranks_of(self.trainer)
        if ranks.size == 1:
            return
        ranks.begin()
        for name in ("record_events", "replay_events"):
            if getattr(self, name):
                raise ConfigError(f"data.{name} is of one rank, this run has {ranks.size}; use trainer.devices 1")
        names = (
            "num_workers", "envs_per_worker", "capacity", "batch_size", "updates_per_step", "samples_per_insert",
            "rate_band", "warmup_steps", "max_env_steps", "mode", "eval_episodes", "eval_seed", "sampler", "hindsight",
            "collector",
        )  # fmt: skip
        settings = {f"data.{name}": getattr(self, name) for name in names}
        ranks.check_settings({**settings, "data.sampler": _plain(self.sampler), "data.env": asdict(self.env)})
        self.limiter = self._new_limiter()
        self._run_id = ranks.broadcast(self._run_id)
        cores = len(os.sched_getaffinity(0))
        wanted = ranks.local_size * ((self.learner_threads or 1) + self._local_workers * self.worker_threads)
        if self.mode == "overlapped" and wanted > cores and ranks.rank == 0:
            log.warning(
                "%d ranks with their workers need %d threads on %d cores: every process will be slower than it need be",
                ranks.local_size, wanted, cores,
            )  # fmt: skip

    def describe(self) -> tuple[EnvSpec, dict[str, str]]:
        """Sizes and versions of the task, found in the workers' interpreter.

        Raises:
            WorkerError: the simulator cannot be used; one line with the reason.
        """
        if self.mode == "lockstep":
            env = self._make_local_env(1, self.seed)
            env.close()
            return env.spec, env.spec.versions
        found: dict[str, Any] = {}
        settings = dict(self._settings("describe", 0), num_envs=1, measure=True)
        self._description = tempfile.TemporaryDirectory(prefix="claw-")
        log_file = Path(self._description.name) / "describe.log"
        worker = LocalWorker("the simulator", self._command(settings), (), log_file)
        self._describer = pool = WorkerPool([worker], policy=self._failure_policy())
        try:
            worker.start()
            while not found:
                pool.wait_for_message(0.2)
                messages, ended = worker.messages()
                found = next((m for m in messages if m["kind"] == "ready"), {})
                if found:
                    break
                if worker.error is not None:
                    worker.log_path = self._keep_description()
                    raise WorkerError(worker.error["message"] + f" (log: {worker.log_path})")
                if ended:
                    worker.wait(5.0)
                    worker.log_path = self._keep_description()
                    raise worker.failure(
                        f"did not start in data.worker_python {self.worker_python} ({worker.exit_text()} before it was "
                        "ready; name a Python itself there)"
                    )
                if worker.control.silence > pool.deadlines["start"]:
                    worker.log_path = self._keep_description()
                    raise worker.failure(
                        f"gave no sign of life for {pool.deadlines['start']:g} s (data.deadlines.start): raise that if "
                        f"it needs longer, or correct data.worker_python {self.worker_python}"
                    )
        finally:
            pool.close(grace=1.0)
            self._describer = None
        self._process_bytes = (found.get("memory", 0), found.get("lane_memory", 0))
        return EnvSpec.from_json(found["spec"]), found["versions"]

    def _keep_description(self) -> Path:
        """Move the log of the simulator's short start into the run's folder, which there may not have been before."""
        target = self.log_path("describe")
        if self._description is not None:
            source = Path(self._description.name) / "describe.log"
            with suppress(OSError):
                target.parent.mkdir(parents=True, exist_ok=True)
                with source.open("rb") as old, target.open("ab") as new:
                    shutil.copyfileobj(old, new)
            self._description.cleanup()
            self._description = None
        return target

    def open_logs(self) -> None:
        """The run has been accepted: from now on it has a folder, with log files. Idempotent; called by the module."""
        if self._is_open or self.trainer is None:
            return
        self._is_open = True
        open_run_folder(self.trainer)
        log_to_file(self.log_path("learner"))
        self._keep_description()

    def _check_memory(self, spec: EnvSpec) -> None:
        """Refuse what will not fit, before anything large is made."""
        layout = self.layout(spec)
        if layout.has_arena:
            with simulator_errors():
                make_codec(layout.image_codec, layout.image_size)  # here too, not only in the workers
            if self.replay_device != "cpu":
                raise ConfigError(
                    f"data.replay_device '{self.replay_device}' keeps images as they are, not by data.image_codec "
                    f"'{self.image_codec}'; set that to none, or data.replay_device to cpu"
                )
        replay = self.num_workers * LaneRing.bytes_needed(layout, self.ring_steps, self.envs_per_worker)
        index = 1 + self.sampler.bytes_per_row + (EpisodeIndex.bytes_per_row if self.hindsight is not None else 0)
        if self.replay_device != "cpu":
            index += 8 if layout.has_finals else 4  # flags of the mirrored rows
        if self.replay_path is not None:
            replay = 0  # the disk's, which is asked when the files are made
        replay += int(index * self.ring_steps * self.lanes)
        if self.initial_replay is not None and not self.initial_replay.startswith(MINARI):
            replay += self._initial().stored * layout.row_bytes
        pixels = layout.image_size * (2 if layout.has_arena else 1)  # besides those in the rows
        batch = self.updates_per_step * self.batch_size * (layout.row_bytes + 4 * layout.final_size + pixels)
        has_processes = self.mode == "overlapped"
        base, per_lane = self._process_bytes
        estimate = MemoryEstimate(
            replay,
            worker=process_bytes(base, self.envs_per_worker, per_lane),
            num_workers=self._local_workers if has_processes else 0,
            evaluator=process_bytes(base, min(self.eval_envs, self.eval_episodes), per_lane) if has_processes else 0,
            learner=learner_bytes(0, batch),
        )
        log.info("memory needed: %s", estimate.describe())
        # Every rank of this machine is about to need as much.
        refuse_oversized(estimate, available_memory() // self.ranks.local_size, self.capacity, layout.step_bytes)

    def layout(self, spec: EnvSpec) -> RowLayout:
        """Packed row of a task."""
        return RowLayout(
            spec.obs_size,
            spec.action_size,
            spec.states_size,
            spec.autoreset == SAME_STEP,
            spec.image_shape,
            self.image_codec,
            self.image_bytes or 0,
        )

    def train_dataloader(self) -> DataLoader[ReplayBatch]:
        """The stream itself; collection begins at its first iteration."""
        return DataLoader(ReplayStream(self), batch_size=None, num_workers=0, generator=torch.Generator())

    def val_dataloader(self) -> DataLoader[int]:
        """One item per evaluation: its seed. The module plays the episodes."""
        return self._seeds(self.eval_seed)

    def test_dataloader(self) -> DataLoader[int]:
        """As validation, with another seed."""
        return self._seeds(self.eval_seed + 1)

    @staticmethod
    def _seeds(*seeds: int) -> DataLoader[int]:
        # With a generator of its own: at each iteration a loader draws a number that nobody needs here, and how often
        # one is iterated must not decide about the training.
        return DataLoader(seeds, batch_size=None, num_workers=0, generator=torch.Generator())  # type: ignore[arg-type]

    def predict_dataloader(self) -> DataLoader[int]:
        """As validation: the same episodes, to be recorded."""
        return self.val_dataloader()

    def state_dict(self) -> dict[str, Any]:
        """Counters, episode statistics, what the sampler knows. Experience lies beside the checkpoint."""
        limiter = self.limiter.state_dict()
        # A resumed run does not have batches that were drawn ahead, here or by Lightning.
        module: Any = self.trainer.lightning_module if self.trainer is not None else None
        unused = max(0, self.handed_out - getattr(module, "batches_begun", self.handed_out))
        limiter["sampled"] -= self._samples_ahead + unused * self.limiter.request
        # A checkpoint is written all the same where a draw does not come to its end.
        is_held = self._drawing.acquire(timeout=CLOSE_SECONDS)
        try:
            sampler = self.sampler.state_dict()
            memory = None if self.memory is None else self.memory.state_dict()
        finally:
            if is_held:
                self._drawing.release()
        state = {
            "limiter": limiter,
            "episodes": self.episodes.state_dict(),
            "sampler": {type(self.sampler).__name__: sampler},
            "run": self._run_id,
            "env": json.dumps(asdict(self.env), sort_keys=True, default=str),
            "seed": self.seed,
            "random": global_state(),
            "memory": memory,
            "lockstep": None if self._local is None else self._local.state_dict(),
        }
        if self.ranks.size == 1:
            return state
        return {**state, "ranks": self.ranks.gather(state), "world": self.ranks.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Experience comes from the folder ``replay`` beside the checkpoint. Where there is none, or less than a
        warm-up's, the stream refills to the warm-up size before the first update.
        """
        self._is_resumed = True
        self._global_steps = env_steps_of(state)
        state = deal_state(state, self.ranks.rank, self.ranks.size)
        self._resumed = state
        self._run_id = state.get("run", self._run_id)
        self._stored = self._replay_beside_checkpoint()
        refill = max(0, self.limiter.warmup - (0 if self._stored is None else self._stored.stored))
        self.limiter.load_state_dict(state["limiter"])
        self._restored_steps = self.limiter.inserted
        # The steps that refill the memory are not owed to the learner: no burst of updates after a resume. A run that
        # was stopped while it filled its memory (negative error) does not wait for what it still lacked as well.
        if refill:
            self.limiter.warmup += refill + min(0, int(self.limiter.error / self.limiter.samples_per_insert))
        if self.finished and self.trainer is not None and self.trainer.state.fn == "fit":
            log.warning(
                "the checkpoint's run has taken and learned from all of its steps (data.max_env_steps %d); raise that "
                "to go on", self.max_env_steps,
            )  # fmt: skip
        self.episodes.load_state_dict(state["episodes"])
        # What the simulators play and what is drawn anew is not what was at the beginning of the run.
        self._start_seed = derived_seed(self.seed, self._restored_steps)

    def _replay_beside_checkpoint(self) -> ReplayShare | None:
        trainer = self.trainer
        if trainer is None or trainer.state.fn != "fit" or not trainer.ckpt_path:
            return None
        folder = Path(trainer.ckpt_path).parent / REPLAY_FOLDER
        try:
            shards = find_shards(folder)
        except ConfigError as error:
            cure = "" if "remove " in str(error) else f"; or remove {folder}, and the memory is filled anew"
            raise ConfigError(f"{error}{cure}") from error
        if not shards:
            log.info("no replay lies beside %s: the memory is filled anew before learning goes on", trainer.ckpt_path)
            return None
        stored = ReplayShare(folder, shards, self.ranks.rank, self.ranks.size)
        if stored.run != self._run_id:
            log.warning("%s is the replay of another run than %s: the memory is filled anew", folder, trainer.ckpt_path)
            return None
        return stored

    def teardown(self, stage: str) -> None:
        """Close the workers (normal end)."""
        self.ranks.finish()
        self.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close the workers (exception or signal; Lightning calls no teardown then)."""
        self.ranks.fail(exception, self.trainer)
        log_traceback(exception)
        if not self._is_open:
            stop_logging_to_file()  # of a run that was refused
        self.close()

    def kill(self) -> None:
        """Send SIGKILL to all processes; safe in a signal handler. Of use only before the end of this one."""
        for pool in (self.pool, self._evaluator, self._describer):
            if pool is not None:
                pool.kill()

    def close(self) -> None:
        """Stop all processes. Idempotent."""
        self._tell_of_the_end(self.pool, self._evaluator)
        for pool in (self.pool, self._evaluator):
            if pool is not None:
                pool.close()
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._prefetcher is not None:
            self.limiter.sampled -= self._samples_ahead
            self._prefetcher.close()
            self._prefetcher = None
        self._closed = self.memory is not None
        self._evaluator = None
        if self._events is not None:
            self._events.write("end")
            self._events.close()
            self._events = None
        if self._playback is not None:
            self._playback.close()
        if self._local is not None:
            self._local.close()
        if self._reward_env is not None:
            self._reward_env.close()
            self._reward_env = None
        if self._local_evaluator is not None:
            self._local_evaluator[0].close()
        self._local = self._local_evaluator = None

    # -- workers ------------------------------------------------------------------------------------------------

    @property
    def run_folder(self) -> Path:
        """Folder of the run."""
        return run_folder(self.trainer) if self.trainer is not None else Path.cwd()

    def log_path(self, name: str) -> Path:
        """Log file of a process: in ``logs/`` of the run's folder. Those of further ranks carry their number."""
        prefix = f"rank_{self.ranks.rank}_" if self.ranks.rank else ""
        return self.run_folder / "logs" / f"{prefix}{name}.log"

    def _settings(self, mode: str, worker: int) -> dict[str, Any]:
        return {
            "mode": mode,
            "worker": worker,
            "env": {"class_path": self.env.class_path, "init_args": self.env.init_args},
            "num_envs": self.envs_per_worker,
            "num_threads": self.worker_threads,
            # Lanes count upwards from here.
            "seed": (self._collection_seed if mode == "collect" else self.seed) + 10_007 * worker,
            "pull_every": self.pull_every,
            "configure": dict(self._configured.get(mode, {})),
        }

    def _command(self, settings: dict[str, Any]) -> WorkerCommand:
        return WorkerCommand(self.worker_python, settings, self.worker_device)

    def start_workers(self) -> None:
        """Make the rings and start collecting; does nothing when it already runs."""
        if self._closed:
            raise ConfigError("this ReplayDataModule has been closed at the end of a run; make a new one for the next")
        if self.memory is not None:
            return
        assert self.spec is not None
        assert self.trainer is not None
        layout = self.layout(self.spec)
        module: Any = self.trainer.lightning_module
        if self._playback is not None:
            self._playback.check(self._identity())
        # Lock-step: one ring of all lanes, filled by one collector in this process.
        count, lanes = (1, self.lanes) if self.mode == "lockstep" else (self.num_workers, self.envs_per_worker)
        self._check_sampler(module)
        rings = self._make_rings(layout, count, lanes)
        self._restore_replay(rings)
        past = self._open_past(layout)
        relabeller = self._relabeller([*rings, *past])
        device = self._mirror_device(module.device)
        self._check_device_memory(device, [*rings, *past])
        self.memory = ReplayMemory(
            rings,
            self.seed,
            self.sampler,
            relabeller,
            module.settings.num_options,
            past,
            self._is_resumed,
            device,
            module.sees_states,
        )
        if self._prefetches(module.device):
            self._prefetcher = Prefetcher(self._draw)
            self._transfer = Transfer(module.device) if module.device.type == "cuda" else None
        self._restored_steps -= self.memory.inserted  # those are counted by the rings again
        self.memory.steps_before = self._restored_steps
        mailbox = self.mailbox(module.policy)
        self._segment_length = module.segment_length
        # The noise scales are dealt to the lanes of all ranks.
        agent = dict(module.agent_settings(), worker=self.ranks.rank, num_workers=self.ranks.size)
        self._resume_memory(self.memory)
        if self.mode == "lockstep":
            local = LockStep(
                lambda seed, configured: self._make_local_env(lanes, seed, configured),
                lambda seed: OptionAgent(num_lanes=lanes, seed=seed, **agent),
                rings[0], mailbox, self.episodes.add, self.pull_every,
            )  # fmt: skip
            if not self._resume_lockstep(local):
                if module.updates > 0:  # what is collected now is not the work of version 0
                    self.publish(module.policy, module.updates)
                local.begin(self._collection_seed, self._configured["collect"])
            self._local = local
            self._resume_random()
            return
        if module.updates > 0:
            self.publish(module.policy, module.updates)
        self._resume_random()
        if self._playback is not None:
            log.info("running %s again: %d draws", self.replay_events, len(self._playback.draws))
            return
        workers: list[Worker] = []
        make_worker = self._worker_factory(mailbox)
        for index, ring in enumerate(rings):
            settings = dict(
                self._settings("collect", index),
                agent=dict(
                    agent,
                    worker=self.ranks.rank * self.num_workers + index,
                    num_workers=self.ranks.size * self.num_workers,
                ),
                layout=layout.settings(),
                num_steps=ring.num_steps,
                ring_fd=ring.block.fd,
                mailbox_fd=mailbox.block.fd,
            )
            fds = (ring.block.fd, mailbox.block.fd)
            path = self.log_path(f"worker_{index}")
            workers.append(make_worker(f"worker {index}", self._command(settings), fds, path, ring))
        if self.record_events:
            self._events = EventLog(self.run_folder / FILE_NAME)
            self._events.write("run", settings=self._identity())
            self._events.begin(self.memory.rings)
        self.pool = WorkerPool(
            workers, self._on_message, self._failure_policy(), lambda: self._published, self.pull_every, self._on_event
        )
        log.info("starting %d worker(s); logs: %s", len(workers), self.log_path("worker_*"))
        self.pool.start(wait=False)
        self.regulate()

    def _worker_factory(self, mailbox: Mailbox) -> Callable[..., Worker]:
        """What makes the workers: processes of this machine, or of a cluster, which is joined here."""
        if self.collector == "local":
            return LocalWorker
        from claw_lightning.remote.cluster import RayCluster

        config, ranks = self.ray or RayConfig(), self.ranks
        cluster = self._cluster = RayCluster(config, mailbox)
        is_shared = config.address is not None
        if not is_shared and ranks.local_size < ranks.size:
            raise ConfigError(
                "data.ray.address: ranks on several machines need a cluster that all can reach; start one with "
                "`ray start --head` and give its host:port"
            )
        address = None
        if is_shared or ranks.rank == 0:
            address = cluster.connect(self.num_workers * ranks.size)
        if not is_shared and ranks.size > 1:
            address = ranks.broadcast(address)
            if ranks.rank > 0:
                cluster.connect(self.num_workers * ranks.size, address)
        log.info("the workers run on the Ray cluster at %s", address)
        return cluster.worker

    @property
    def _collection_seed(self) -> int:
        """Seed of the training's simulators and exploration; workers add their index."""
        return self.seed if self._start_seed is None else self._start_seed

    @property
    def _has_same_seed(self) -> bool:
        """Whether a resumed run has the seed that its checkpoint was made with; else its chance is to be another."""
        return self._resumed is not None and self._resumed.get("seed") == self.seed

    def _resume_memory(self, memory: ReplayMemory) -> None:
        """Give sampler and memory what a checkpoint knows of them."""
        if self._resumed is None:
            return
        sampler = self._resumed.get("sampler", {}).get(type(self.sampler).__name__)  # another one begins anew
        if sampler is not None:
            self.sampler.load_state_dict(sampler)
        state = self._resumed.get("memory")
        if state is not None:
            memory.load_state_dict(state, self._has_same_seed, self._has_same_rings)

    def _resume_lockstep(self, local: LockStep) -> bool:
        """Take up simulator and agent where a checkpoint has them, if that can be."""
        if self._resumed is None:
            return False
        state = self._resumed.get("lockstep")
        if state is None:
            log.info("the run does not go on bit for bit: the checkpoint does not say where this simulator was")
            return False
        env = json.dumps(asdict(self.env), sort_keys=True, default=str)
        wanted = self._configured["collect"]
        known = set(state["configured"]).union(*(settings for _, settings in state["changes"]))
        is_same = self._is_exact and self._has_same_seed and self._resumed["env"] == env
        if not is_same or not known <= set(wanted):  # a setting that was changed cannot be given up
            log.info("the run does not go on bit for bit: its replay, data.env or seed are not those of the checkpoint")
            return False
        assert self._stored is not None
        assert self._stored.own is not None
        started = time.perf_counter()
        with simulator_errors():
            if not local.restore(state, self.seed, self._stored.own.rings[0].first):
                log.warning(
                    "the simulator of %s does not repeat itself: new episodes begin, and the run does not go on bit "
                    "for bit", self.spec.task if self.spec is not None else env,
                )  # fmt: skip
                return False
            if changed := {name: value for name, value in wanted.items() if local.configured.get(name) != value}:
                local.configure(**changed)
        self._published = int(state["policies"][-1][0])
        log.info("%d vector steps taken again in %.1f s", len(state["actions"]), time.perf_counter() - started)
        return True

    def _resume_random(self) -> None:
        """Put the generators that belong to nobody where they were: behind all that is only built at a start."""
        if self._resumed is not None and self._has_same_seed and "random" in self._resumed:
            set_global_state(self._resumed["random"])
        self._resumed = None

    def _mirror_device(self, learner: torch.device) -> torch.device | None:
        """Where the rows are kept once more; None: nowhere."""
        if self.replay_device == "cpu":
            return None
        device = learner if self.replay_device == "cuda" else torch.device(self.replay_device)
        if device != learner or device.type != "cuda":
            raise ConfigError(
                f"data.replay_device is '{self.replay_device}', but the learner runs on {learner}; set it to cuda (the "
                "learner's own) with trainer.accelerator gpu, or to cpu"
            )
        return device

    def _check_device_memory(self, device: torch.device | None, rings: list[LaneRing]) -> None:
        free, needed = None if device is None else free_bytes(device), ResidentReplay.bytes_needed(rings)
        if free is not None and needed > USABLE * free:
            raise ConfigError(
                f"data.capacity ({self.capacity:,} steps) needs {format_bytes(needed)} on data.replay_device {device}, "
                f"of which {format_bytes(free)} are free; lower it, or set data.replay_device cpu"
            )

    def _prefetches(self, learner: torch.device) -> bool:
        if self.prefetch is not None:
            return self.prefetch
        repeats = self.record_events or self.replay_events is not None
        return learner.type == "cuda" and self.mode == "overlapped" and not repeats

    def _make_rings(self, layout: RowLayout, count: int, lanes: int) -> list[LaneRing]:
        if self.replay_path is None:
            return [LaneRing(layout, self.ring_steps, lanes) for _ in range(count)]
        folder = Path(self.replay_path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            paths = [folder / f"ring_{os.getpid()}_{i}" for i in range(count)]
            return [LaneRing(layout, self.ring_steps, lanes, path=str(path)) for path in paths]
        except OSError as error:
            reason = str(error) if error.strerror is None or error.filename is None else error.strerror
            raise ConfigError(f"data.replay_path: no rings can be made in {folder} ({reason})") from error

    def _restore_replay(self, rings: list[LaneRing]) -> None:
        """Fill the rings with what was stored beside the checkpoint."""
        if self._stored is None:
            return
        started = time.perf_counter()
        try:
            self._has_same_rings = self._stored.fill(rings)
            if self._has_same_rings:
                self._rewind(rings)
        except ConfigError as error:
            raise ConfigError(f"{error}; or remove {self._stored.folder}, and the memory is filled anew") from error
        for ring in rings:  # a replay may be newer than the checkpoint, but its policies are not of the future
            versions = ring.layout.view(ring.rows, "version")
            np.minimum(versions, self._updates(), out=versions)
        log.info(
            "%d steps restored from %s in %.1f s", self._stored.stored, self._stored.folder,
            time.perf_counter() - started,
        )  # fmt: skip

    def _rewind(self, rings: list[LaneRing]) -> None:
        """In lock-step, put a replay that is newer than the checkpoint (``best.ckpt``) back to where that was.

        Possible as long as nothing was overwritten meanwhile.
        """
        state = None if self._resumed is None else self._resumed.get("lockstep")
        if state is None or self.mode != "lockstep":
            return
        assert self._stored is not None
        assert self._stored.own is not None
        [stored], [ring] = self._stored.own.rings, rings
        head, finals = state["head"], state["finals"]
        oldest = ring.readable(head)[0]  # that was drawn from
        keeps_finals = stored.finals_written == finals or stored.finals_written <= ring.num_finals
        if stored.first <= oldest and head <= stored.head <= oldest + ring.num_steps and keeps_finals:
            set_progress(ring, head, finals)
            self._is_exact, self._is_rewound = True, head < stored.head

    def _initial(self) -> StoredReplay:
        try:
            return load_replay(self.initial_replay or "")
        except ConfigError as error:
            inside = Path(self.initial_replay or "") / "checkpoints" / REPLAY_FOLDER
            cure = f"; did you mean {inside}?" if inside.is_dir() else ""
            raise ConfigError(f"data.initial_replay: {error}{cure}") from error

    def _open_past(self, layout: RowLayout) -> list[LaneRing]:
        """Rings of other runs' experience, or of a data set."""
        if self.initial_replay is None:
            return []
        assert self.spec is not None
        if self.initial_replay.startswith(MINARI):
            try:
                rings = minari_rings(self.initial_replay.removeprefix(MINARI), self.spec, layout)
            except ConfigError as error:
                raise ConfigError(f"data.initial_replay: {error}") from error
        else:
            stored = self._initial()
            stored.check_fits(layout)
            rings = stored.open_rings()
        for ring in rings:
            ring.layout.view(ring.rows, "version")[:] = 0  # other policies than this run's: as old as can be
        rows = sum(ring.head * ring.num_lanes for ring in rings)
        log.info("starting with %d steps of %s", rows, self.initial_replay)
        return rings

    def save_replay(self, folder: Path) -> None:
        """Store what the workers' rings hold; see :func:`claw_lightning.replay.storage.save_replay`.

        With several ranks each stores its own in a folder inside; all are to be called.
        Compressed images are not stored, nor is anything beside them.

        Raises:
            OSError: the disk is full, or nothing can be written there.
        """
        memory, ranks = self.memory, self.ranks
        if memory is None or memory.inserted == 0 or memory.layout.has_arena:
            return
        error: OSError | ConfigError | None = None
        try:
            if ranks.rank == 0:
                clear_others(folder, ranks.size, self._run_id)
        except (OSError, ConfigError) as caught:
            error = caught
        ranks.gather(None, self.supervise)  # no rank writes before
        own = shard_folder(folder, ranks.rank, ranks.size)
        try:
            if error is not None:
                raise error
            if (own / DONE).is_file() and (self._is_rewound or not self._is_ours(own, memory.written)):
                discard_replay(own)  # as this run's checkpoint takes the place of the other one
            self._is_rewound = False
            save_replay(memory.written, own, run=self._run_id, moment=int(getattr(self.trainer, "global_step", -1)))
        except (OSError, ConfigError) as caught:
            error = caught
        is_whole = all(ranks.gather(error is None, self.supervise))
        if is_whole and ranks.rank == 0 and (ranks.size == 1 or not ranks.is_over):  # a lost rank has saved nothing
            mark_complete(folder, ranks.size, self._run_id)
        if error is not None:
            raise error

    def _is_ours(self, folder: Path, rings: list[LaneRing]) -> bool:
        """Whether a folder holds an earlier save of these rings."""
        try:
            stored = load_replay(folder)
            stored.check_same(rings)
        except ConfigError:
            return False
        return stored.run == self._run_id

    def _check_sampler(self, module: Any) -> None:
        """Refuse a sampler that gives what is not used, or wants what nobody gives."""
        name = type(self.sampler).__name__
        if self.sampler.needs_segments and module.segment_length == 1:
            raise ConfigError(
                f"data.sampler {name} draws segments, and this model learns from single steps; set model.n_step or "
                "model.policy_gradient"
            )
        if self.sampler.wants_errors and module.policy_gradient is not None:
            raise ConfigError(
                f"data.sampler {name} draws by the critics' errors, of which model.policy_gradient has none; set it "
                "null, or choose another sampler"
            )

    def _relabeller(self, rings: list[LaneRing]) -> Relabeller | None:
        if self.hindsight is None:
            return None
        assert self.spec is not None
        return Relabeller(self.hindsight, self.spec, self._goal_reward(self.spec), rings)

    def _check_goal_reward(self, memory: ReplayMemory, relabeller: Relabeller) -> None:
        """Hold the goal reward against what is stored, where it must agree: not with rows of changed settings."""
        if not self._is_resumed and not self._configured["collect"]:
            relabeller.check_reward(memory.written, "the simulator")
            relabeller.check_reward(memory.rings[len(memory.written) :], "data.initial_replay")

    def _goal_reward(self, spec: EnvSpec) -> GoalReward:
        """The task's own reward: as its adapter describes it, else by a simulator in this process."""
        if spec.goal_reward is not None:
            with simulator_errors():
                return goal_reward(spec.goal_reward)
        if spec.achieved_goal is None:
            return lambda achieved, desired: achieved[..., 0]  # refused by whoever asked
        if self._reward_env is None:
            self._reward_env = self._make_local_env(1, self.seed, self._configured["collect"])
        env = self._reward_env
        with simulator_errors():
            goals = np.zeros((1, spec.achieved_goal[1] - spec.achieved_goal[0]), np.float32)
            env.compute_reward(goals, goals)
        return lambda achieved, desired: env.compute_reward(
            achieved.reshape(-1, achieved.shape[-1]), desired.reshape(-1, desired.shape[-1])
        ).reshape(achieved.shape[:-1])

    def update_priorities(self, places: Places, errors: torch.Tensor) -> None:
        """Tell the sampler absolute TD errors [U, B] of a batch's samples."""
        values = errors.detach().float().flatten().cpu().numpy()
        with self._drawing:
            self.sampler.update(places, values)

    def _failure_policy(self) -> FailurePolicy:
        return FailurePolicy(
            self.on_worker_failure,
            self.restart_budget,
            self.restart_window,
            self.deadlines,
            -(-self.recycle_steps // self.envs_per_worker),
        )

    def _identity(self) -> dict[str, Any]:
        """Settings on which it depends which steps are taken, drawn and learned from, by their keys."""
        names = (
            "num_workers", "envs_per_worker", "worker_threads", "capacity", "batch_size", "updates_per_step",
            "samples_per_insert", "warmup_steps", "seed", "image_codec", "image_bytes",
        )  # fmt: skip
        found = {f"data.{name}": getattr(self, name) for name in names} | {"data.env": asdict(self.env)}
        found["data.sampler"] = _plain(self.sampler)
        found["data.hindsight"] = self.hindsight and asdict(self.hindsight)
        found["data.initial_replay"] = self.initial_replay
        found["restored steps"] = 0 if self._stored is None else self._stored.stored
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        found |= {f"model.{name}": value for name, value in module.hparams.items()}
        found |= {"trainer.precision": str(self.trainer.precision), "updates": self._updates()}  # type: ignore[union-attr]
        return json.loads(json.dumps(found, default=str))  # as they come out of the log

    def _updates(self) -> int:
        module: Any = self.trainer.lightning_module if self.trainer is not None else None
        return module.updates if module is not None else 0

    def _on_event(self, kind: str, worker: Worker, **details: Any) -> None:
        index = worker.command.settings["worker"]
        self._tell(worker, kind, details)
        if self._events is not None:
            if kind == "start":
                details["configure"] = worker.command.settings["configure"]
            self._events.write(kind, worker=index, **details)

    def _tell(self, worker: Worker, kind: str, details: dict[str, Any]) -> None:
        """Tell listeners of an event of a pool, in their words."""
        what, pid = str(details.get("what", "")), details.get("pid")
        told = {
            "start": [("restart" if details.get("generation") else "start", f"pid {pid}")],
            "ready": [("ready", f"pid {pid}")],
            "failure": [(details.get("cause", "death"), what)],
            "recycle": [("recycle", f"after {details.get('head', 0)} vector steps")],
            "lost": [(details.get("cause", "death"), what), ("give_up", str(details.get("reason", "")))],
        }
        for event, detail in told.get(kind, []):
            self._tell_listeners(event, worker, detail)

    def _tell_listeners(self, event: str, worker: Worker, detail: str) -> None:
        settings = worker.command.settings
        name = "evaluator" if settings["mode"] == "evaluate" else f"worker_{settings['worker']}"
        for listener in self.worker_listeners:
            listener(event, name, detail)

    def _tell_of_the_end(self, *pools: WorkerPool | None) -> None:
        """Tell listeners that processes which still run are about to be stopped."""
        for pool in pools:
            for worker in pool.workers if pool is not None else ():
                if worker.pid is not None and not worker.has_exited():
                    self._tell_listeners("stop", worker, f"pid {worker.pid}")

    def supervise(self) -> None:
        """Notice dead and hung workers and replace them. To be called about once a second whatever the learner does.

        Raises:
            WorkerError: a worker has failed for good and ``on_worker_failure`` ends the run.
        """
        if self.pool is not None:
            self.pool.poll()

    def processes(self) -> dict[str, int]:
        """Numbers of the running processes: ``worker_<i>`` and ``evaluator``."""
        found = {}
        for pool, name in ((self.pool, "worker_{}"), (self._evaluator, "evaluator")):
            for index, worker in enumerate(pool.workers if pool is not None else ()):
                if worker.pid is not None and not worker.has_exited():
                    found[name.format(index)] = worker.pid
        return found

    def _recorded_collector(self, worker: int, generation: int) -> Collector:
        """What a worker's process of a recorded run was, in this process."""
        assert self.memory is not None
        assert self._mailbox is not None
        settings = self._settings("collect", worker)
        seed = settings["seed"] + SEED_STRIDE * generation
        module: Any = self.trainer.lightning_module  # type: ignore[union-attr]
        # What a process of its own draws from torch's generator must not be missing from the learner's.
        with simulator_errors(), torch.random.fork_rng(devices=[]):
            env = make_env(self.env.class_path, self.env.init_args, self.envs_per_worker, seed)
            agent = OptionAgent(
                num_lanes=env.num_envs, seed=seed, worker=worker, num_workers=self.num_workers,
                **module.agent_settings(),
            )  # fmt: skip
            ring = self.memory.rings[worker]
            return Collector(env, agent, ring, self._mailbox, Control(), self.episodes.add, seed)

    def _make_local_env(
        self, num_envs: int, seed: int, configured: dict[str, Any] | None = None, rendering: bool = False
    ) -> Any:
        with simulator_errors():
            env = make_env(self.env.class_path, self.env.init_args, num_envs, seed, rendering)
            if configured:
                env.configure(**configured)
            return env

    def configure_envs(self, *, evaluation: bool = False, **settings: float | str | bool) -> None:
        """Change settings of the running simulators: all workers', each between two of its vector steps.

        Which settings there are is the adapter's matter (:meth:`VectorEnv.configure`). They are kept for the rest of
        the run: a worker that is started or restarted later gets them before its first step. They are not part of
        checkpoints; who sets them sets them again in a resumed run. Rows collected before stay in the replay and are
        learned from as they are.

        Args:
            evaluation: change the evaluator's simulator too. Else evaluations stay those of the configured task, and
                comparable through the run.

        Raises:
            ConfigError: a value that is no finite number, text or switch; in lock-step also what the simulator
                refuses. A worker that refuses ends the run at the next supervision, as for any wrong setting.
        """
        for name, value in settings.items():
            is_plain = isinstance(value, (bool, int, float, str))
            if not is_plain or (isinstance(value, float) and not math.isfinite(value)):
                raise ConfigError(
                    f"configure_envs: {name} is {value!r}; settings of simulators are finite numbers, texts or switches"
                )
        if not settings:
            return
        self._change_goal_reward(settings)
        self._configure("collect", self._local, self.pool, settings)
        if evaluation:
            self._configure("evaluate", self._local_evaluator and self._local_evaluator[0], self._evaluator, settings)

    def _change_goal_reward(self, settings: dict[str, Any]) -> None:
        """Relabelled rewards are those of the changed task from now on."""
        if self._reward_env is not None:
            with simulator_errors():
                self._reward_env.configure(**settings)
        if self.hindsight is None or self.spec is None or self.spec.goal_reward is None:
            return
        reward = dict(self.spec.goal_reward)
        names = {
            "distance_threshold": ("threshold", "position_threshold"),
            "rotation_threshold": ("rotation_threshold",),
        }
        for name, value in settings.items():
            reward.update({key: value for key in names.get(name, ()) if key in reward})
        if "reward_type" in settings and "sparse" in reward:
            reward["sparse"] = settings["reward_type"] == "sparse"
        if reward != self.spec.goal_reward:
            self.spec = replace(self.spec, goal_reward=reward)
            if self.memory is not None and self.memory.relabeller is not None:
                function = self._goal_reward(self.spec)
                with self._drawing:
                    self.memory.relabeller.reward = function

    def _configure(
        self, mode: str, env: VectorEnv | LockStep | None, pool: WorkerPool | None, settings: dict[str, Any]
    ) -> None:
        if env is not None:
            with simulator_errors():
                env.configure(**settings)
        self._configured[mode].update(settings)
        for worker in pool.workers if pool is not None else ():
            # For the next process, whose first line is its settings; the present one may be dead already.
            worker.command.settings["configure"] = dict(self._configured[mode])
            worker.send({"configure": settings})

    def mailbox(self, policy: Policy) -> Mailbox:
        """The mailbox, with the policy's current parameters in it."""
        if self._mailbox is None:
            self._mailbox = Mailbox(policy.flat_size)
            self._mailbox.publish(policy.flatten(), 0)
            if self._playback is not None:
                self._playback.publish(policy.flatten(), 0)
        return self._mailbox

    def publish(self, policy: Policy, version: int) -> None:
        """Make parameters and normaliser statistics available to all workers, with their version (updates)."""
        self.mailbox(policy).publish_from(policy.flatten, version)
        self._published = version
        if self._playback is not None:
            self._playback.publish(policy.flatten(), version)

    def regulate(self) -> None:
        """Read what was inserted and tell every worker how far it may go."""
        assert self.memory is not None
        self.limiter.inserted = self._restored_steps + self.memory.inserted
        if self.pool is None:
            return
        remaining = self.limiter.inserts_allowed - self.limiter.inserted
        working = [worker for worker in self.pool.workers if worker.is_placed and not self.pool.is_lost(worker)]
        if not working:  # closed already, or none has a place yet
            return
        share, rest = divmod(max(0, remaining) // self.envs_per_worker, len(working))
        # What is left over goes to the workers that are behind, so that also the last few steps are inserted.
        working.sort(key=lambda worker: worker.head)
        for place, worker in enumerate(working):
            worker.control.steps_allowed = worker.head + share + (place < rest)

    def _on_message(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["kind"] == "episodes":
            self.episodes.add([Episode(*episode) for episode in message["episodes"]])
        elif message["kind"] == "configured" and self._events is not None and self.pool is not None:
            index = self.pool.workers.index(worker)
            self._events.write("configured", worker=index, step=message["step"], settings=message["settings"])

    def next_batch(self) -> ReplayBatch | None:
        """The next replay batch as soon as the rate allows it; None when the run has inserted and learned all.

        With several ranks each draws from its own replay, and none goes on before all have drawn: they agree here on
        counts, statistics of observations, and whether to go on.
        """
        assert self.memory is not None
        if self._playback is not None:
            return self._recorded_batch(self.memory, self._playback)
        batch = self._own_batch()
        if self.ranks.size > 1:
            batch = self._agreed(batch)
        if batch is None:
            assert self.trainer is not None
            self.trainer.should_stop = True
        return batch

    def _agreed(self, batch: ReplayBatch | None) -> ReplayBatch | None:
        assert self.memory is not None
        limiter, size = self.limiter, self.memory.seen_size
        count, mean, squares = (0.0, np.zeros(size), np.zeros(size)) if batch is None else batch.moments
        stops = 0 if batch is not None else self.stop_number() or STOP_WITHOUT_SIGNAL
        ends = self._wants_end or self._has_finished
        counts = [stops, ends, limiter.inserted, limiter.sampled, limiter.warmup, self.episodes.total, count]
        found = self.ranks.gather_numbers(np.concatenate((counts, mean, squares)), self.supervise)
        self._global_steps, sampled, warmup, self._global_episodes = (int(n) for n in found[:, 2:6].sum(0))
        self._achieved = sampled / max(1, self._global_steps - warmup) if self._global_steps > warmup else 0.0
        self._ends = bool(found[:, 1].any())
        if found[:, 0].any():
            if batch is not None:
                limiter.sampled -= limiter.request  # nobody learns from it
                self.stopped_elsewhere(int(found[:, 0].max()))
            self._ends = True
            return None
        assert batch is not None
        batch.env_steps = self._global_steps
        batch.moments = merged_moments([(row[6], row[7 : 7 + size], row[7 + size :]) for row in found], size)
        return batch

    def _own_batch(self) -> ReplayBatch | None:
        assert self.memory is not None
        started = time.perf_counter()
        drawn: tuple[ReplayBatch, Any] | None = None
        while True:
            self.regulate()
            if self._has_finished or self.stop_requested():
                return None
            if self._prefetcher is not None and self._prefetcher.pending:
                drawn = self._prefetcher.take(AHEAD_SECONDS)
                if drawn is not None:
                    break
                self.supervise()
                continue
            if self.limiter.can_sample and self.memory.stored > 0:
                break
            if self._local is not None:
                with simulator_errors():
                    self._local.step()
            else:
                assert self.pool is not None
                self.pool.poll()
                time.sleep(POLL_SECONDS)
        self.learner_wait += time.perf_counter() - started
        if self.pool is not None:
            self.pool.poll()
        batch = self._sample(self.memory) if drawn is None else self._received(drawn)
        if self._events is not None:
            assert self.memory.last_draw is not None
            self._events.draw(self.memory.rings, self.memory.last_draw, self._updates())
        self.regulate()
        if self._prefetcher is not None and self.limiter.can_sample:
            self.memory.updates = self._updates()
            self._prefetcher.request()
            self.limiter.sampled += self.limiter.request
            self.regulate()
        return batch

    def _sample(self, memory: ReplayMemory, script: Draw | None = None) -> ReplayBatch:
        if memory.relabeller is not None and memory.last_draw is None:
            self._check_goal_reward(memory, memory.relabeller)
        memory.updates = self._updates()
        batch = self._received(self._draw(script))
        self.limiter.sampled += self.limiter.request
        return batch

    def _draw(self, script: Draw | None = None) -> tuple[ReplayBatch, Any]:
        """A batch and, where it is on its way to a GPU, the event that ends that. In whichever thread."""
        memory = self.memory
        assert memory is not None
        with self._drawing:
            if self._transfer is None:
                return memory.sample(self.updates_per_step, self.batch_size, self._segment_length, script), None
            return self._transfer.send(
                lambda: memory.sample(self.updates_per_step, self.batch_size, self._segment_length, script)
            )

    def _received(self, drawn: tuple[ReplayBatch, Any]) -> ReplayBatch:
        batch = drawn[0] if self._transfer is None else self._transfer.receive(*drawn)
        batch.env_steps += self._restored_steps
        self.limiter.inserted = batch.env_steps
        return batch

    def _recorded_batch(self, memory: ReplayMemory, playback: Playback) -> ReplayBatch | None:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.worker_threads)  # as in the worker: sums come out in the same order
        try:
            with simulator_errors():
                draw = playback.advance(memory.rings, self._recorded_collector)
        finally:
            torch.set_num_threads(threads)
        if draw is None or self.stop_requested():
            assert self.trainer is not None
            self.trainer.should_stop = True
            return None
        return self._sample(memory, draw)

    @property
    def collection_version(self) -> int | None:
        """Oldest policy version (updates) with which a running worker acts; None before any has adopted one."""
        workers = self.pool.workers if self.pool is not None else ()
        versions = [w.control.version for w in workers if w.ready and not self.pool.is_lost(w)]  # type: ignore[union-attr]
        return min(versions) if versions and min(versions) > 0 else None

    def log_metrics(self) -> dict[str, float]:
        """What a logging step reports of episodes, rate, replay and workers; shares are since the last call."""
        metrics = self.episodes.compute()
        metrics["rate/samples_per_insert"] = self.limiter.achieved if self.ranks.size == 1 else self._achieved
        if self.memory is not None:
            metrics["replay/steps"] = float(self.memory.stored)
            with self._drawing:
                metrics.update(self.sampler.metrics())
        metrics["replay/quarantined"] = float(self.quarantined)
        now, timers = time.perf_counter(), self.timers()
        then, waited, before = self._mark
        self._mark = (now, self.learner_wait, timers)
        rank_wait, self._rank_mark = self.ranks.waited - self._rank_mark, self.ranks.waited
        busy = sum(timers.values()) - sum(before.values())
        if then > 0 and now > then:
            metrics["rate/learner_wait"] = (self.learner_wait - waited) / (now - then)
            if self.ranks.size > 1:
                metrics["rate/rank_wait"] = rank_wait / (now - then)
        if busy > 0:
            metrics["rate/worker_wait"] = (timers["wait"] - before.get("wait", 0.0)) / busy
            metrics.update({f"phase/{name}": (timers[name] - before.get(name, 0.0)) / busy for name in timers})
        if self.pool is not None:
            metrics["worker/alive"] = float(self.pool.alive)
            metrics["worker/restarts"] = float(self.pool.restarts)
            metrics["worker/recycled"] = float(self.pool.recycled)
        return metrics

    def timers(self) -> dict[str, float]:
        """Seconds per activity, summed over workers."""
        if self._local is not None:
            controls = [self._local.control]
        else:
            controls = [worker.control for worker in self.pool.workers] if self.pool else []
        return {name: float(sum(c.timers[i] for c in controls)) for i, name in enumerate(TIMERS)}

    @property
    def quarantined(self) -> int:
        """Rows set aside because they held a number that is not finite."""
        if self._local is not None:
            return self._local.control.quarantined
        return sum(worker.control.quarantined for worker in self.pool.workers) if self.pool else 0

    # -- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(
        self,
        policy: Policy,
        agent: dict[str, Any],
        episodes: int,
        seed: int,
        student: bool = False,
        record: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Play noise-free episodes with a policy in a process of its own; None if a stop was requested meanwhile.

        With ``student`` the policy's flat student plays in place of its options. ``record`` are arguments of a
        :class:`Recorder` (:meth:`record` is the way to call it).

        Returns:
            ``return``, ``length``, ``success`` (one number per episode) and ``option`` (share of steps per option).
        """
        agent = dict(agent, evaluate=True, exploration=None)
        lanes = min(self.eval_envs, max(episodes, self.eval_episodes))  # for later evaluations too
        shows_frames = bool(record and record["frames"])
        if shows_frames and not self._evaluator_draws:  # one that can draw takes the place of the one that cannot
            self._close_evaluator()
            self._evaluator_draws = True
        if self.mode == "lockstep":
            if self._local_evaluator is None:
                # Evaluations take nothing from the generators of the training.
                with torch.random.fork_rng(devices=[]):
                    env = self._make_local_env(lanes, seed, self._configured["evaluate"], self._evaluator_draws)
                    self._local_evaluator = (env, OptionAgent(num_lanes=lanes, seed=seed, **agent))
            env, option_agent = self._local_evaluator
            option_agent.load(policy.flatten(), 0)
            with simulator_errors():
                recorder = None if record is None else Recorder(env, **record)
                return evaluate(env, option_agent, episodes, seed, Control(), student, recorder)
        if self._evaluator is None:
            self._eval_mailbox = Mailbox(policy.flat_size)
            settings = dict(
                self._settings("evaluate", 0),
                num_envs=lanes,
                seed=seed,
                agent=agent,
                mailbox_fd=self._eval_mailbox.block.fd,
                rendering=self._evaluator_draws,
            )
            fds = (self._eval_mailbox.block.fd,)
            evaluator = LocalWorker("the evaluator", self._command(settings), fds, self.log_path("evaluator"))
            self._evaluator = WorkerPool(
                [evaluator], self._on_evaluated, self._failure_policy(),
                on_event=lambda kind, worker, **details: self._tell(worker, kind, details),
            )  # fmt: skip
            self._evaluator.start(wait=False)
        self._eval_mailbox.publish(policy.flatten(), 0)
        self._eval_requests += 1
        self._eval_result = None
        worker = self._evaluator.workers[0]
        generation = -1
        while self._eval_result is None:
            if self.stop_requested():
                return None
            if generation != worker.generation:  # also after a restart: the request died with the process
                if generation >= 0 and record is not None and record.get("film"):
                    raise WorkerError("the evaluator ended while it took images (its log is evaluator.log)")
                generation = worker.generation
                request: dict[str, Any] = {
                    "request": self._eval_requests,
                    "episodes": episodes,
                    "seed": seed,
                    "student": student,
                }
                if record is not None:
                    request["record"] = record
                worker.send(request)
            try:
                self._evaluator.poll()
            except WorkerError as error:
                is_setting = worker.error is not None and worker.error.get("user", False)
                is_training = self.trainer is not None and self.trainer.state.fn == "fit"
                if self.on_worker_failure != "degrade" or is_setting or not is_training or shows_frames:
                    raise
                log.error("%s; this evaluation is left out", error)
                self._close_evaluator()
                return None
            self.supervise()
            self._evaluator.wait_for_message(0.05)
        return self._eval_result

    def _close_evaluator(self) -> None:
        """End the evaluator; the next evaluation makes a new one."""
        if self._evaluator is not None:
            self._tell_of_the_end(self._evaluator)
            self._evaluator.close(grace=0.0)
        if self._local_evaluator is not None:
            self._local_evaluator[0].close()
        self._evaluator = self._local_evaluator = None
        self._evaluator_draws = False

    def record(
        self, policy: Policy, agent: dict[str, Any], episodes: int, seed: int, frames: int = 0,
        film: dict[str, int] | None = None, draws_options: bool = False,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Play as :meth:`evaluate` and return every step; None if a stop was requested meanwhile.

        Args:
            policy: what plays.
            agent: settings of the agent, as :meth:`OptionCritic.agent_settings` gives them.
            episodes: how many.
            seed: of the simulators.
            frames: images are taken of the first so many episodes.
            film: ``most`` and ``height`` of a :class:`Film`: a few small images in place of all.
            draws_options: options end and are chosen by chance as in training, whatever ``greedy_options`` says.

        Returns:
            Arrays with an entry per step (see :class:`callbacks.RolloutWriter`) and, with ``frames``, the images of the
            first so many episodes, each [T, H, W, 3] uint8 and read from the disk as they are looked at. With ``film``
            the arrays of :meth:`Film.arrays` instead, and ``frame_error``: why there are no images, or None.

        Raises:
            WorkerError, ConfigError: the evaluator failed for good. One that was to take images, or to play for a film,
                is then closed, and the next evaluation has a new one that takes none.
        """
        self.run_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.run_folder, prefix="rollouts-") as folder:
            path = Path(folder).resolve() / "steps.npz"
            record = {"path": str(path), "frames": frames, "draws_options": draws_options}
            if film is not None:
                record["film"] = film
            try:
                result = self.evaluate(policy, agent, episodes, seed, record=record)
            except (WorkerError, ConfigError):
                if frames or film is not None:  # the next one draws nothing: perhaps that was what it died of
                    self._close_evaluator()
                raise
            if result is None:
                return None
            with np.load(path) as file:
                steps: dict[str, Any] = dict(file)
            if film is not None:
                steps["frame_error"] = result["frame_error"]
            elif frames:
                parts = (f"{path}.{episode}.raw" for episode in range(min(frames, episodes)))
                shape = (-1, *result["frame_shape"])
                # The files may go: they live on as long as they are mapped.
                steps["frames"] = [np.memmap(part, np.uint8, "r").reshape(shape) for part in parts]
            return steps

    def _on_evaluated(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["kind"] == "evaluated":
            worker.has_answered = True
            if message["request"] == self._eval_requests:
                self._eval_result = message["result"]


def _plain(sampler: Any) -> Any:
    """Settings of a sampler, and of those inside it, by name."""
    if isinstance(sampler, (list, tuple)):
        return [_plain(each) for each in sampler]
    if not isinstance(sampler, Sampler):
        return sampler
    public = {
        name: _plain(value)
        for name, value in vars(sampler).items()
        if not name.startswith("_") and not hasattr(Sampler, name)
    }
    kept = {name: value for name, value in public.items() if isinstance(value, (bool, int, float, str, list, dict))}
    return {type(sampler).__name__: kept}


class ReplayStream(IterableDataset):
    """Endless stream of :class:`ReplayBatch`. A new iteration (virtual epoch) never restarts the workers."""

    def __init__(self, data: ReplayDataModule) -> None:
        super().__init__()
        self.data = data

    def __iter__(self) -> Iterator[ReplayBatch]:
        """Start the workers if they do not run yet, then yield batches as the rate allows."""
        self.data.start_workers()
        while (batch := self.data.next_batch()) is not None:
            self.data.handed_out += 1
            yield batch
