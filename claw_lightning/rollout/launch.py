"""What a worker's process does before torch is there: takes its settings, and lets the adapter import what comes first.

Some simulators must be imported before torch (Isaac Gym refuses to come later), others break what is imported after
them. Only the adapter knows. So its module is imported here, with numpy alone, and asked
(:meth:`VectorEnv.import_first`); then comes the worker, and torch with it. An adapter of your own that imports torch at
the top of its file has decided that torch comes first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict, Optional, Tuple


def take_standard_input() -> Any:
    """The learner's lines, in a file that nobody else knows.

    The simulator gets an empty standard input instead. Python's ``quit()``, with which some simulators end, closes
    ``sys.stdin``, and would wait for ever for the thread that reads from it.
    """
    lines = os.fdopen(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (for the life of the process)
    return lines


def take_settings() -> Tuple[Any, Dict[str, Any]]:
    """The learner's lines, and the settings that the first of them holds."""
    lines = take_standard_input()
    return lines, json.loads(lines.readline())


def import_first(settings: Dict[str, Any]) -> Optional[BaseException]:
    """Import the adapter and what it wants before torch; returns the failure, which the worker reports as any other."""
    try:
        from claw_lightning.rollout.envs.base import resolve_class

        env = settings["env"]
        resolve_class(env["class_path"]).import_first(env["init_args"])  # type: ignore[attr-defined]
    except BaseException as error:  # SystemExit too, see worker.py
        return error
    return None
