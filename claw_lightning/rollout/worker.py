"""Worker process, started through ``bootstrap.py``, which lets the adapter import what must come before torch.

Protocol, the same for every simulator and interpreter:

* standard input: JSON lines from the learner. The first holds the settings; later ones are commands: ``configure``
  with settings of the simulator, which takes effect between two steps, and the requests of an evaluator.
  Its end of file means that the learner has gone: the worker then ends at once, whatever it is doing.
* message descriptor (given in the settings): JSON lines to the learner (``ready``, ``episodes``, ``evaluated``,
  ``error``). Its end of file tells the learner that the worker has gone.
* standard output and error belong to the simulator and go to the log file; they carry no protocol.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import queue
import resource
import sys
import threading
import time
import traceback
from typing import Any, Dict, List, NoReturn, Optional

import numpy as np
import torch

from claw_lightning.rollout import control as phases
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.collector import Collector, Episode, Puller, evaluate
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.envs.base import EnvError, VectorEnv, make_env
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.recorder import Recorder
from claw_lightning.rollout.ring import LaneRing, RowLayout

log = logging.getLogger("worker")

WAIT_SECONDS = 0.0005  # between looks at steps_allowed: far below a vector step, and idle otherwise
MORE_LANES = 4  # with which a simulator is built to see what a lane costs
MAX_PENDING = 1 << 20  # bytes of unsent episode messages after which new ones are dropped


class MessagePipe:
    """JSON lines to the learner. Episodes never block the simulator; ``ready`` and ``error`` are always delivered."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)
        self._pending = b""

    def send(self, kind: str, must: bool = False, **content: Any) -> None:
        """Queue one message; with ``must``, wait up to 5 s until it is in the pipe."""
        if must or len(self._pending) < MAX_PENDING:
            self._pending += json.dumps(dict(content, kind=kind)).encode() + b"\n"
        deadline = time.monotonic() + (5.0 if must else 0.0)
        while self._pending:
            try:
                self._pending = self._pending[os.write(self.fd, self._pending) :]
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return
                time.sleep(0.005)
            except BrokenPipeError:
                os._exit(0)  # the learner has gone


def end_with_the_learner(commands: queue.Queue, lines: Any) -> None:
    """Read commands until standard input ends, then leave without clean-up: the process may hang in a simulator."""
    for line in lines:
        if line.strip():
            commands.put(json.loads(line))
    os._exit(0)


def private_memory() -> int:
    """Bytes of this process that no other one shares (Linux; 0 elsewhere)."""
    try:
        with open("/proc/self/statm") as file:
            resident, shared = (int(word) for word in file.read().split()[1:3])
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


def measure_memory(env: VectorEnv, settings: Dict[str, Any]) -> Dict[str, int]:
    """Private bytes of a process with one lane, and of each further lane where a second simulator may be built."""
    if not env.may_be_built_twice:
        return {"memory": private_memory(), "lane_memory": 0}
    config, found = settings["env"], []
    larger = make_env(config["class_path"], config["init_args"], MORE_LANES, settings["seed"])
    for each in (env, larger):
        each.reset()
        for _ in range(3):  # simulators allocate at their first steps
            each.step(np.zeros((each.num_envs, each.spec.action_size), np.float32))
        found.append(private_memory())
    larger.close()
    return {"memory": found[0], "lane_memory": max(0, found[1] - found[0]) // MORE_LANES}


def describe_versions(env: VectorEnv) -> Dict[str, str]:
    """Interpreter, libraries and simulator, for the head of the log."""
    found = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    found.update(env.spec.versions)
    return found


def run(settings: Dict[str, Any], pipe: MessagePipe, commands: queue.Queue) -> None:
    """Build the simulator and serve until told to stop."""
    control = Control(settings["control_fd"])
    control.beat(phases.START)
    torch.set_num_threads(settings["num_threads"])
    env = make_env(
        settings["env"]["class_path"],
        settings["env"]["init_args"],
        settings["num_envs"],
        settings["seed"],
        settings.get("rendering", False),
    )
    try:
        versions = describe_versions(env)
        log.info("%s worker %d, %d lanes of %s", settings["mode"], settings["worker"], env.num_envs, env.spec.task)
        log.info(", ".join("%s %s" % item for item in versions.items()))
        if settings["mode"] == "describe":
            sizes = measure_memory(env, settings) if settings.get("measure") else {}
            pipe.send("ready", must=True, spec=env.spec.to_json(), versions=versions, **sizes)
            return
        configure(env, settings.get("configure"))  # what was changed before this process was started
        agent = OptionAgent(
            num_lanes=env.num_envs, seed=settings["seed"], device=env.device or "cpu", **settings["agent"]
        )
        mailbox = Mailbox(agent.policy.flat_size, settings["mailbox_fd"])
        control.beat(phases.WAIT)  # first: the learner gives a process that is ready less time than one that starts
        pipe.send("ready", must=True, spec=env.spec.to_json(), versions=versions)
        serve = serve_evaluations if settings["mode"] == "evaluate" else collect
        serve(settings, env, agent, mailbox, control, pipe, commands)
    finally:
        env.close()


def configure(env: VectorEnv, settings: Optional[Dict[str, Any]]) -> None:
    """Change settings of the running simulator, if there are any to change."""
    if settings:
        env.configure(**settings)
        log.info("configured: %s", ", ".join("%s %s" % item for item in sorted(settings.items())))


def follow_commands(env: VectorEnv, commands: queue.Queue, step: int, pipe: MessagePipe) -> None:
    """Carry out what the learner has sent, before the given vector step; never waits."""
    while not commands.empty():  # this thread alone takes from it
        settings = commands.get()["configure"]
        configure(env, settings)
        pipe.send("configured", step=step, settings=settings)


def collect(
    settings: Dict[str, Any], env: VectorEnv, agent: OptionAgent, mailbox: Mailbox, control: Control,
    pipe: MessagePipe, commands: queue.Queue,
) -> None:  # fmt: skip
    """Write steps as far as the learner allows."""
    layout = RowLayout(**settings["layout"])
    ring = LaneRing(layout, settings["num_steps"], env.num_envs, settings["ring_fd"])

    def report(episodes: List[Episode]) -> None:
        pipe.send("episodes", episodes=episodes)

    collector = Collector(env, agent, ring, mailbox, control, report, settings["seed"], settings["pull_every"])
    while not control.stop:
        follow_commands(env, commands, ring.head, pipe)
        if ring.head < control.steps_allowed:
            collector.step()
            continue
        started = time.perf_counter()
        while ring.head >= control.steps_allowed and not control.stop:
            control.beat(phases.WAIT)
            follow_commands(env, commands, ring.head, pipe)
            time.sleep(WAIT_SECONDS)
        control.timers[phases.TIMERS.index("wait")] += time.perf_counter() - started


def serve_evaluations(
    settings: Dict[str, Any], env: VectorEnv, agent: OptionAgent, mailbox: Mailbox, control: Control,
    pipe: MessagePipe, commands: queue.Queue,
) -> None:  # fmt: skip
    """Play episodes on request."""
    puller = Puller(mailbox, agent, control)
    while not control.stop:
        control.beat(phases.WAIT)
        try:
            command = commands.get(timeout=0.2)
        except queue.Empty:
            continue
        if "configure" in command:
            configure(env, command["configure"])
            continue
        puller.pull()
        student = command.get("student", False)
        recorder = Recorder(env, **command["record"]) if "record" in command else None
        result = evaluate(env, agent, command["episodes"], command["seed"], control, student, recorder)
        pipe.send("evaluated", must=True, request=command["request"], result=result)


def main(lines: Any, settings: Dict[str, Any], failure: Optional[BaseException] = None) -> int:
    """Entry point. Exit status 0: asked to stop; 1: an error, which the learner has been told.

    Args:
        lines: the learner's, without the first.
        settings: which that one held.
        failure: what went wrong before torch was imported.
    """
    name = settings.get("name", settings["mode"]).replace("%", "")
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s " + name + " (%(process)d) %(levelname)s %(message)s"
    )
    logging.getLogger().setLevel(settings.get("log_level", "INFO"))
    for key in ("message_fd", "control_fd", "ring_fd", "mailbox_fd"):
        if key in settings:  # nothing that a simulator starts may hold the learner's blocks and pipe
            os.set_inheritable(settings[key], False)
    pipe = MessagePipe(settings["message_fd"])
    commands: queue.Queue = queue.Queue()
    threading.Thread(target=end_with_the_learner, args=(commands, lines), daemon=True).start()
    try:
        if failure is not None:
            raise failure
        run(settings, pipe, commands)
    except EnvError as error:
        log.error("%s", error)
        pipe.send("error", must=True, message=str(error), user=True)
        return 1
    except BaseException as error:  # SystemExit too: some simulators call quit() when they cannot start
        log.error("%s", traceback.format_exc())
        pipe.send("error", must=True, message="%s: %s" % (type(error).__name__, error), user=False)
        return 1
    return 0


def run_and_exit(lines: Any, settings: Dict[str, Any], failure: Optional[BaseException] = None) -> NoReturn:
    """Run and leave without destructors: simulators hang in theirs more often than one would like."""
    status = main(lines, settings, failure)
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
