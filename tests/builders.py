"""Small builders that several tests share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from claw_lightning.pool import FailurePolicy, LocalWorker, WorkerCommand, WorkerPool
from claw_lightning.replay import ReplayBatch, ReplayMemory
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.collector import Collector, Episode
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.networks import Policy
from claw_lightning.rollout.ring import BORDER, FIRST, HAS_FINAL, TERMINATED, TRUNCATED, LaneRing, RowLayout

FAKES = Path(__file__).resolve().parent / "fakes"
PATIENCE = 180.0  # seconds after which a test about processes gives up; never part of what is judged


def policy_settings(**changes: Any) -> dict[str, Any]:
    """Plain settings of a small policy: 3 observations, 2 actions."""
    settings = {"obs_size": 3, "action_size": 2, "hidden_sizes": (16, 16), "option_hidden_sizes": (8,)}
    return {**settings, **changes}


# -- rings --------------------------------------------------------------------------------------------------------


def write_step(ring: LaneRing, obs: Any, flags: Any, finals: dict[int, Any] | None = None) -> None:
    """Publish one vector step: obs [N, O], flags [N]; ``finals`` maps lanes to their true final observations."""
    rows, view = ring.slot(), ring.layout.view
    rows[:] = 0.0
    view(rows, "obs")[:] = obs
    flags = np.array(flags, np.int32)
    if ring.layout.has_finals:
        index = view(rows, "final_index")
        index[:] = -1
        for lane, final in (finals or {}).items():
            index[lane] = ring.write_finals(np.array([final], np.float32))[0]
            flags[lane] |= HAS_FINAL
    view(rows, "flags")[:] = flags
    ring.publish()


def lane_rows(episodes: list[tuple[int, str]], same_step: bool = False) -> list[tuple[Any, int, Any]]:
    """Rows (obs, flags, final or None) of one lane that plays (length, end) episodes one after another.

    The observation is [episode, step]. ``end`` is ``terminated``, ``truncated`` or ``cut`` (the worker was restarted).
    """
    found = []
    for episode, (length, end) in enumerate(episodes):
        for step in range(length):
            flags, final = FIRST if step == 0 else 0, None
            if step == length - 1 and end != "cut":
                flags |= {"terminated": TERMINATED, "truncated": TRUNCATED}[end]
                final = [episode, length] if same_step else None
            found.append(([episode, step], flags, final))
        if end != "cut" and not same_step:
            found.append(([episode, length], BORDER, None))
    return found


def ring_of_lanes(lanes: list[list[tuple[Any, int, Any]]], same_step: bool = False, num_steps: int = 0) -> LaneRing:
    """Ring whose lane n holds ``lanes[n]`` (cut to the shortest), observations as :func:`lane_rows` writes them."""
    length = min(map(len, lanes))
    ring = LaneRing(RowLayout(2, 1, has_finals=same_step), num_steps or length + 2, len(lanes))
    for t in range(length):
        rows = [lane[t] for lane in lanes]
        finals = {n: row[2] for n, row in enumerate(rows) if row[2] is not None}
        write_step(ring, [row[0] for row in rows], [row[1] for row in rows], finals)
    return ring


# -- collectors ---------------------------------------------------------------------------------------------------


def collector_of(
    env: Any, num_steps: int = 64, codec: str = "none", **agent: Any
) -> tuple[Collector, LaneRing, list[Episode]]:
    """Collector of an environment with a small policy, its ring, and the list that finished episodes go to."""
    settings = policy_settings(obs_size=env.spec.obs_size, action_size=env.spec.action_size, **agent.pop("policy", {}))
    if env.spec.image_shape is not None:
        settings["image_shape"] = env.spec.image_shape
    option_agent = OptionAgent(settings, env.num_envs, 0, **agent)
    mailbox = Mailbox(option_agent.policy.flat_size)
    layout = RowLayout(
        env.spec.obs_size, env.spec.action_size, env.spec.states_size, env.spec.autoreset == "same_step",
        env.spec.image_shape, codec,
    )  # fmt: skip
    ring, episodes = LaneRing(layout, num_steps, env.num_envs), []
    return Collector(env, option_agent, ring, mailbox, Control(), episodes.extend, 7), ring, episodes


# -- processes ----------------------------------------------------------------------------------------------------


def sample_unless_overtaken(memory: ReplayMemory, *args: int) -> ReplayBatch | None:
    """A sample, or None: on a busy machine a writer may go round a short ring during each of the attempts."""
    try:
        return memory.sample(*args)
    except RuntimeError as error:
        if "overtake" not in str(error):
            raise
        return None


def start_writer(kind: str, fd: int, *numbers: int) -> subprocess.Popen[bytes]:
    """A writer process of ``fakes/writers.py`` on a shared block."""
    command = [sys.executable, str(FAKES / "writers.py"), kind, str(fd), *map(str, numbers)]
    return subprocess.Popen(command, pass_fds=(fd,))


def poll_until(pool: WorkerPool, condition: Callable[[], Any]) -> None:
    """Supervise until the condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "the condition never came to hold"
        pool.poll()
        pool.wait_for_message(0.01)


class Rig:
    """One worker process with everything it needs, and the learner's ends of it.

    ``mode`` is ``describe``, ``collect`` or ``evaluate``. The environment's class is looked up in ``tests/fakes``.
    """

    def __init__(self, tmp_path: Path, class_path: str, mode: str = "collect", **options: Any) -> None:
        num_envs = options.pop("num_envs", 2)
        sizes = options.pop("sizes", (3, 2))
        policy = policy_settings(obs_size=sizes[0], action_size=sizes[1], **options.pop("policy", {}))
        self.policy = Policy(**policy)
        self.mailbox = Mailbox(self.policy.flat_size)
        self.mailbox.publish(self.policy.flatten(), 1)
        layout = {"obs_size": sizes[0], "action_size": sizes[1], "states_size": 0, "has_finals": False}
        layout.update(options.pop("layout", {}))
        self.ring = LaneRing(RowLayout(**layout), 64, num_envs)
        settings = {
            "mode": mode,
            "worker": 0,
            "env": {"class_path": class_path, "init_args": options.pop("init_args", {})},
            "num_envs": num_envs,
            "num_threads": 1,
            "seed": 3,
            "pull_every": 1,
            "agent": {"policy": policy, "evaluate": mode == "evaluate"},
            "layout": layout,
            "num_steps": self.ring.num_steps,
            "ring_fd": self.ring.block.fd,
            "mailbox_fd": self.mailbox.block.fd,
        }
        self.log_path = tmp_path / "worker.log"
        command = WorkerCommand(options.pop("python", sys.executable), settings)
        fds = (self.ring.block.fd, self.mailbox.block.fd)
        self.worker = LocalWorker("worker 0", command, fds, self.log_path, self.ring if mode == "collect" else None)
        self.messages: list[dict[str, Any]] = []
        policy = FailurePolicy(**options.pop("failure", {}))
        self.pool = WorkerPool([self.worker], lambda worker, message: self.messages.append(message), policy, **options)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: Any) -> None:
        self.pool.close(grace=5.0)

    def until(self, condition: Callable[[], Any]) -> None:
        """Supervise until the condition holds."""
        poll_until(self.pool, condition)

    def field(self, name: str, step: int) -> np.ndarray:
        """A field of the rows of a step."""
        return self.ring.layout.view(self.ring.rows[step % self.ring.num_steps], name)


def without_successors(batch):
    """Rows of segments [M, L, W] float32 without the observation behind the last valid step, which is checked here.

    What is left of invalid steps must be zero.
    """
    rows = batch.rows.flatten(0, 1).clone().numpy()
    valid, next_obs = batch.valid.flatten(0, 1).numpy(), batch.next_obs.flatten(0, 1).numpy()
    count, length = valid.shape
    behind = valid.sum(1)
    short = np.flatnonzero(behind < length)
    start, stop = batch.layout.span("obs")
    successors = rows[short, behind[short], start:stop]
    np.testing.assert_array_equal(successors, next_obs[short, behind[short] - 1])
    rows[short, behind[short], start:stop] = 0.0
    return rows
