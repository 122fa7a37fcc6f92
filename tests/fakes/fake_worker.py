"""Speaks a worker's protocol without torch: what the pool's supervision is tested with, in milliseconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from claw_lightning.rollout import control as phases
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.ring import LaneRing, RowLayout


def read_commands(message_fd: int) -> None:
    """Send every later line back; end with the learner."""
    for line in sys.stdin:
        os.write(message_fd, json.dumps({"kind": "echo", "line": json.loads(line)}).encode() + b"\n")
    os._exit(0)


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    print("log line of", os.getpid(), flush=True)
    fd, script = settings["message_fd"], settings.get("script", "")
    control = Control(settings["control_fd"])
    control.beat(phases.START)
    if script == "end":
        os._exit(0)
    if script == "error":
        os.write(fd, b'{"kind": "error", "message": "no such task", "user": true}\n')
        os._exit(1)
    time.sleep(settings.get("start_seconds", 0.0))
    os.write(fd, b'{"kind": "rea')  # messages may arrive in pieces
    os.write(fd, b'dy"}\n{"kind": "episodes", "episodes": []}\n')
    if script == "garbage":
        os.write(fd, b"\xff not json\n[1]\n")
    if script == "child":  # a simulator's own process, which holds the pipe open and outlives its parent
        child = subprocess.Popen(["sleep", "600"], pass_fds=(fd,), stdin=subprocess.DEVNULL)
        print("child", child.pid, flush=True)
        os._exit(3)
    if script == "die":
        os._exit(3)
    threading.Thread(target=read_commands, args=(fd,), daemon=True).start()
    ring = None
    if "ring_fd" in settings:
        ring = LaneRing(RowLayout(1, 1), settings["num_steps"], 1, settings["ring_fd"])
        control.version = settings["version"]
    while not control.stop or script == "deaf":
        control.beat(phases.WAIT)
        time.sleep(0.001)
        if ring is not None and script != "idle" and ring.head < control.steps_allowed:
            ring.publish()
            if script == "work and die":
                os._exit(3)


main()
