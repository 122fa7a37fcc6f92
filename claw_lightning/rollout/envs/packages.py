"""Optional packages of simulators: whether they are there, in which version, and what to say where they are not."""

from __future__ import annotations

import importlib
import os
import re
from typing import Any, Tuple

from claw_lightning.rollout.envs.base import EnvError

#: Variable of a worker's environment that holds ``data.worker_device``; unset where an adapter is built by hand.
ASKED_DEVICE = "CLAW_WORKER_DEVICE"
_MAX_QUOTED = 160  # characters of another package's text in an error message


def one_line(value: Any) -> str:
    """The text of ``value`` on one line, cut where it would drown the message around it."""
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


def load(module: str, adapter: str, what: str, cure: str) -> Any:
    """Import a module of a simulator.

    Args:
        module: dotted name.
        adapter: name of the adapter that needs it.
        what: the simulator's name and what it asks of the interpreter, for the message.
        cure: how to install it.

    Raises:
        EnvError: it cannot be imported; one line with the reason and the cure.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # simulators fail at import in ways of their own: missing libraries, drivers, versions
        raise EnvError(
            "data.env.class_path: %s needs %s; %s, or set data.worker_python to an interpreter that has it (%s: %s)"
            % (adapter, what, cure, type(error).__name__, one_line(error))
        ) from error


def load_extension(import_module: Any) -> None:
    """Import the user's module that registers further tasks, if there is one.

    Raises:
        EnvError: it cannot be imported.
    """
    if not import_module:
        return
    try:
        importlib.import_module(import_module)
    except ImportError as error:
        raise EnvError(
            "data.env.init_args.import_module: cannot import %s (%s)" % (import_module, one_line(error))
        ) from error


def package_version(package: str, module: Any = None) -> str:
    """Version of an installed package, else what its module says of itself, else an empty text."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return str(getattr(module, "__version__", ""))


def numbers(version: str) -> Tuple[int, ...]:
    """(2, 3, 1) of "2.3.1.post1"; () of a text without numbers."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def refuse_cpu(adapter: str, reason: str) -> None:
    """Refuse to simulate on the CPU in a worker that was given a GPU: thousands of lanes would crawl, unseen.

    Args:
        adapter: its name.
        reason: why no GPU can be used here, with the cure, for the message.

    Raises:
        EnvError: ``data.worker_device`` names a GPU.
    """
    device = os.environ.get(ASKED_DEVICE, "")
    if device.startswith("cuda"):
        raise EnvError(
            "data.worker_device: %s for %s, but %s; the CPU is chosen by data.worker_device: cpu"
            % (device, adapter, reason)
        )


def check_lanes(num_envs: int) -> None:
    """Refuse an empty simulator.

    Raises:
        EnvError: fewer than one environment.
    """
    if num_envs < 1:
        raise EnvError("data.envs_per_worker: must be at least 1, not %d" % num_envs)
