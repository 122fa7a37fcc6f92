"""What stands between a Python process and a running Isaac Gym task: import order, the GPU, the task's own files.

Every function here turns one known way to fail into one sentence with its cure. Facts about versions and GPUs, and
where they come from, are in ``docs/isaac_gym.md``.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import importlib.util
import logging
import os
import platform
import random
import re
import shutil
import stat
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import EnvError
from claw_lightning.rollout.envs.isaacgym_config import nearest

log = logging.getLogger(__name__)

GUIDE = "docs/isaac_gym.md"
SCRIPT = "scripts/setup_isaacgym.sh"
#: Names that numpy dropped (1.24 and 2.0), and that Isaac Gym and its tasks still use.
ALIASES: Dict[str, Any] = {
    "float": float, "int": int, "bool": bool, "object": object, "complex": complex, "str": str, "Inf": np.inf,
}  # fmt: skip
#: Tasks whose file names a function in place of a class: (module, class) by ``env.subtask``.
KUKA = "allegro_kuka.allegro_kuka_"
SUBTASKS: Dict[str, Dict[str, Tuple[str, str]]] = {
    "AllegroKuka": {
        "reorientation": (KUKA + "reorientation", "AllegroKukaReorientation"),
        "regrasping": (KUKA + "regrasping", "AllegroKukaRegrasping"),
        "throw": (KUKA + "throw", "AllegroKukaThrow"),
    },
    "AllegroKukaTwoArms": {
        "reorientation": (KUKA + "two_arms_reorientation", "AllegroKukaTwoArmsReorientation"),
        "regrasping": (KUKA + "two_arms_regrasping", "AllegroKukaTwoArmsRegrasping"),
    },
}
#: Tasks that return many named observations in place of one vector.
DICT_TASKS = ("AllegroHandADR", "AllegroHandManualDR", "AllegroHandDextremeADR", "AllegroHandDextremeManualDR")
#: Memory that a simulator takes on the GPU (GiB): a hand task's fixed blocks, and for 1024 environments. 8192 Shadow
#: hands were reported with 6.4 GB, 16384 LEAP hands not to fit into 10.
BASE_MEMORY, MEMORY_PER_1024 = 2.0, 0.5
HOPPER = 9  # major compute capability of the GPUs on which PhysX is known to crash


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, or its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


# -- imports ----------------------------------------------------------------------------------------------------------


def restore_numpy_names() -> None:
    """Give numpy back the names that Isaac Gym's own files use."""
    for name, value in ALIASES.items():
        if name not in vars(np):
            setattr(np, name, value)


def import_isaacgym() -> None:
    """Import Isaac Gym, before torch.

    Raises:
        EnvError: torch is there already, or Isaac Gym is missing or does not fit this interpreter.
    """
    restore_numpy_names()
    if "isaacgym" in sys.modules:
        return
    if "torch" in sys.modules:
        raise EnvError(
            "IsaacGymEnv: torch was imported before Isaac Gym in this process, which Isaac Gym refuses; it runs in a "
            "worker only (data.mode overlapped, not lockstep), and the adapter's file must not import torch at its top"
        )
    try:
        import isaacgym  # noqa: F401
    except Exception as error:
        sys.modules.pop("isaacgym", None)
        raise EnvError(_import_failure(error)) from error


def _import_failure(error: BaseException) -> str:
    """Why Isaac Gym cannot be imported, and what helps."""
    text, python = one_line(error), "%s (Python %s)" % (sys.executable, platform.python_version())
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "isaacgym":
        if sys.version_info >= (3, 9):
            return (
                "data.worker_python: Isaac Gym runs under Python 3.8 at most, and the workers' interpreter is %s; "
                "build one with %s and name it there (%s)" % (python, SCRIPT, GUIDE)
            )
        return "data.worker_python: %s has no Isaac Gym; install it there from NVIDIA's download with %s (%s)" % (
            python,
            SCRIPT,
            GUIDE,
        )
    if "libpython" in text:
        return (
            "data.worker_python: Isaac Gym does not find the shared library of %s (%s); an interpreter that was built "
            "without --enable-shared has none: take one that has, or add its folder to LD_LIBRARY_PATH" % (python, text)
        )
    if "active version" in text or isinstance(error, RuntimeError):
        return "data.worker_python: Isaac Gym has no bindings for %s (%s); take Python 3.8, see %s" % (
            python,
            text,
            SCRIPT,
        )
    if "torch was imported before" in text.lower():
        return "IsaacGymEnv: torch was imported before Isaac Gym (%s); the adapter's file must not import torch" % text
    return "data.worker_python: Isaac Gym cannot be imported in %s: %s (%s)" % (python, text, GUIDE)


@contextlib.contextmanager
def building_alone() -> Iterator[None]:
    """Hold the folder of compiled extensions while one is built.

    torch guards a build by a file that outlives a killed builder; whoever comes next then waits for ever. Workers share
    the folder among themselves alone, so such a file found while nobody else holds the folder is of a dead process.
    """
    folder = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not folder:
        yield
        return
    import fcntl

    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "claw_lightning.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left in glob.glob(os.path.join(folder, "*", "lock")):
            log.warning("removing %s, left by a build that was killed", left)
            os.remove(left)
        yield


def import_gymtorch() -> None:
    """Import what joins Isaac Gym and torch; the first time it is compiled, half a minute.

    Raises:
        EnvError: it cannot be compiled, or torch cannot load it.
    """
    try:
        with building_alone():
            importlib.import_module("isaacgym.gymtorch")
    except Exception as error:
        raise EnvError(_build_failure(error)) from error


def has_compiler() -> bool:
    """Whether there is a C++ compiler where torch looks for one."""
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def _build_failure(error: BaseException) -> str:
    text = one_line(error)
    where = "gymtorch, which joins Isaac Gym and torch, cannot be compiled"
    if "ninja" in text.lower() and ("required" in text.lower() or "not found" in text.lower()):
        return "data.worker_python: %s: ninja is missing; run %s -m pip install ninja" % (where, sys.executable)
    if not has_compiler():
        return "%s: there is no C++ compiler (c++); install one (apt-get install g++) or name it in CXX" % where
    if "Python.h" in text:
        return "%s: Python.h is missing; install the interpreter's headers (apt-get install python3.8-dev)" % where
    return "%s: %.400s (the worker's log has the compiler's own words; %s)" % (where, text, GUIDE)


# -- the GPU ----------------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    """The GPU that this process sees. ``kernels`` as torch names them (``sm_86``, ``compute_86``)."""

    name: str
    capability: Tuple[int, int]
    kernels: List[str]
    free: int  # bytes
    total: int


def find_gpu() -> Optional[Gpu]:
    """The first visible GPU, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    capability = torch.cuda.get_device_capability(0)
    return Gpu(torch.cuda.get_device_name(0), capability, torch.cuda.get_arch_list(), free, total)


def why_no_gpu() -> str:
    """Why :func:`find_gpu` finds none, and what helps."""
    import torch

    if torch.version.cuda is None:
        return "torch %s of %s was built without CUDA; install one with it there (%s)" % (
            torch.__version__,
            sys.executable,
            GUIDE,
        )
    return "torch %s of %s (CUDA %s) sees no such GPU; compare number and driver in nvidia-smi (%s)" % (
        torch.__version__,
        sys.executable,
        torch.version.cuda,
        GUIDE,
    )


def _can_run(kernel: str, capability: Tuple[int, int]) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", kernel)
    if found is None:
        return False
    major, minor = int(found.group(2)), int(found.group(3))
    if found.group(1) == "compute":  # translated when it is loaded, for any later GPU
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def check_gpu(gpu: Gpu, num_envs: int, needed: Optional[float] = None) -> None:
    """Refuse a GPU on which the simulator would end in a crash.

    Args:
        needed: GiB that must be free; None: estimated from ``num_envs``; 0: not looked at.

    Raises:
        EnvError: torch has no kernels for it, or too little of its memory is free.
    """
    import torch

    if not any(_can_run(kernel, gpu.capability) for kernel in gpu.kernels):
        raise EnvError(
            "data.worker_python: torch %s has no kernels for %s (sm_%d%d; it has %s); install a torch built for this "
            "GPU there, or set data.worker_device to another one (%s)"
            % (torch.__version__, gpu.name, *gpu.capability, " ".join(gpu.kernels), GUIDE)
        )
    if gpu.capability[0] == HOPPER:
        log.warning(
            "%s is a Hopper GPU: all reports of Isaac Gym there end in a crash right behind 'Using GPU PhysX'; if this "
            "worker dies now, take a GPU of the Ampere or Ada generation (%s)", gpu.name, GUIDE,
        )  # fmt: skip
    gib = float(2**30)
    if needed is None:
        needed = BASE_MEMORY + MEMORY_PER_1024 * num_envs / 1024.0
    if gpu.free < needed * gib:
        raise EnvError(
            "%s has %.1f GiB free of %.1f; %d environments need about %.1f, and workers on one GPU add up: lower "
            "data.envs_per_worker or data.num_workers, or set data.env.init_args.gpu_memory (GiB, 0: no check)"
            % (gpu.name, gpu.free / gib, gpu.total / gib, num_envs, needed)
        )


def set_seed(seed: int) -> None:
    """Seed all that the tasks draw from; ``make`` of isaacgymenvs does not."""
    import torch

    seed = int(seed) % 2**32
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (what the tasks draw from)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


# -- files of the tasks -----------------------------------------------------------------------------------------------


def find_package(name: str, given: Optional[str] = None) -> Optional[str]:
    """Folder of a package that holds tasks, without running it; None: not installed.

    Raises:
        EnvError: ``given``, the user's ``<name>_path``, is no such folder.
    """
    if given is not None:
        given = os.path.expanduser(given)
        for folder in (given, os.path.join(given, name)):
            if os.path.isdir(os.path.join(folder, "tasks")) and os.path.isdir(os.path.join(folder, "cfg")):
                return os.path.abspath(folder)
        raise EnvError(
            "data.env.init_args.%s_path: %s is not the folder of %s; it must hold tasks/ and cfg/" % (name, given, name)
        )
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a stub of an earlier attempt
        return None
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return os.path.abspath(places[0]) if places else None


def known_tasks(folder: str) -> List[str]:
    """Names of the configurations in a folder."""
    return sorted(os.path.basename(path)[:-5] for path in glob.glob(os.path.join(folder, "*.yaml")))


def check_task(task: str, folders: List[str]) -> str:
    """The folder that has the task's configuration.

    Raises:
        EnvError: none has, or the task is of a kind that cannot be learnt from; names the nearest.
    """
    if task in DICT_TASKS:
        raise EnvError(
            "data.env.init_args.task: %s returns a dict of observations (use_dict_obs), which is not supported; take "
            "AllegroHand, or write an adapter that joins them into one vector" % task
        )
    for folder in folders:
        if task in known_tasks(folder):
            return folder
    known = [name for folder in folders for name in known_tasks(folder)]
    raise EnvError(
        "data.env.init_args.task: Isaac Gym has no task %s here%s (%d configurations in %s)"
        % (task, nearest(task, known), len(known), ", ".join(folders))
    )


def open_package(name: str, folder: str) -> None:
    """Make modules below a package importable without running its ``__init__`` files, which import everything.

    Those of isaacgymenvs register with hydra and load the dependencies of all tasks.
    """
    for dotted, path in ((name, folder), (name + ".tasks", os.path.join(folder, "tasks"))):
        present = sys.modules.get(dotted)
        if present is None or not getattr(present, "__path__", None):
            stub = types.ModuleType(dotted)
            stub.__path__ = [path]  # type: ignore[attr-defined]
            sys.modules[dotted] = stub


def _find_class(folder: str, name: str) -> Optional[str]:
    """Module below ``tasks`` that defines a class, dotted, found in its text."""
    root = os.path.join(folder, "tasks")
    pattern = re.compile(r"^class\s+%s\b" % re.escape(name), re.M)
    for path in sorted(glob.glob(os.path.join(root, "**", "*.py"), recursive=True)):
        with open(path, encoding="utf-8", errors="replace") as file:
            if pattern.search(file.read()):
                return os.path.relpath(path, root)[:-3].replace(os.sep, ".")
    return None


def load_task_class(package: str, folder: str, name: str, subtask: str = "") -> Callable[..., Any]:
    """Class of a task, imported with what its own file needs and nothing more.

    Args:
        package: ``isaacgymenvs`` or ``bidexhands``.
        folder: where it lies.
        name: as the configuration names it (``name``).
        subtask: of AllegroKuka (``env.subtask``).

    Raises:
        EnvError: no such class or subtask, or its file needs something that is missing.
    """
    if name in SUBTASKS:
        known = SUBTASKS[name]
        if subtask not in known:
            raise EnvError(
                "data.env.init_args.subtask: %s has no subtask '%s'%s (known: %s)"
                % (name, subtask, nearest(subtask, list(known)), ", ".join(known))
            )
        module, name = known[subtask]
    else:
        found = _find_class(folder, name)
        if found is None:
            raise EnvError("data.env.init_args.task: no file below %s/tasks defines a class %s" % (folder, name))
        module = found
    open_package(package, folder)
    dotted = "%s.tasks.%s" % (package, module)
    try:
        return getattr(importlib.import_module(dotted), name)  # type: ignore[no-any-return]
    except ImportError as error:
        missing = getattr(error, "name", None) or ""
        cure = "run %s -m pip install %s" % (sys.executable, missing.split(".")[0]) if missing else "see " + GUIDE
        raise EnvError(
            "data.worker_python: %s cannot be imported (%s); %s" % (dotted, one_line(error), cure)
        ) from error


# -- the log ----------------------------------------------------------------------------------------------------------


def last_printed(lines: int = 3, size: int = 4096) -> str:
    """The end of what this process has printed, as one line, where standard output is a file; else empty."""
    sys.stdout.flush()
    try:
        if not stat.S_ISREG(os.fstat(1).st_mode):
            return ""
        with open("/proc/self/fd/1", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join([line.strip() for line in text.split("\n") if line.strip()][-lines:])
