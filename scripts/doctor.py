"""Look at this machine and say in plain words what of claw-lightning will run here, and what to do about the rest.

    python scripts/doctor.py
    python scripts/doctor.py --worker-python /opt/py38/bin/python --json doctor.json

Each line is ``ok``, ``limited`` (runs, but slower or not everything) or ``missing``, and a cure where there is one.
Exit status 0 where the default, a hand simulated by EnvPool, would train; 1 where it would not. Nothing is installed or
changed, and nothing that is missing ends it. Python 3.8 can read this too: its users are told what they need.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parents[1]
OK, LIMITED, MISSING = "ok", "limited", "missing"
#: Seconds that a program which is asked may take; longer where a busy machine must not be mistaken for a broken one.
PATIENCE, LONG_PATIENCE = 8.0, 60.0
GIB = 2**30
#: What the command itself imports.
PACKAGES = ("torch", "lightning", "jsonargparse", "omegaconf", "torchmetrics", "tensorboard", "psutil", "gymnasium")
#: Simulators: name, module, the packages whose versions matter, whether a GPU is needed, and how to get it.
SIMULATORS = (
    ("EnvPool", "envpool", ("envpool",), False, "pip install envpool (Python 3.11 or newer)"),
    (
        "Gymnasium-Robotics",
        "gymnasium_robotics",
        ("gymnasium-robotics", "mujoco"),
        False,
        "pip install 'claw-lightning[robotics]'",
    ),
    ("Isaac Gym", "isaacgym", ("isaacgym",), True, "scripts/setup_isaacgym.sh builds it (docs/isaac_gym.md)"),
    (
        "Playground",
        "mujoco_playground",
        ("playground", "jax"),
        False,
        "pip install 'playground==0.2.0' 'jax<0.10', into its own Python",
    ),
    ("mjlab", "mjlab", ("mjlab", "mujoco"), True, "pip install 'mjlab>=1.6,<1.7', into a Python of its own"),
    (
        "Isaac Lab",
        "isaaclab",
        ("isaaclab", "isaacsim"),
        True,
        "pip install isaaclab beside Isaac Sim, into a Python of its own",
    ),
)

#: Runs in every interpreter that is found, however old: what it is, and what could be imported (nothing is).
PROBE = r"""
import json, os, sys, sysconfig
found = {"version": list(sys.version_info[:3]), "modules": [], "versions": {}}
variables = sysconfig.get_config_vars()
shared = bool(variables.get("Py_ENABLE_SHARED"))
library = os.path.join(variables.get("LIBDIR") or "", variables.get("INSTSONAME") or "")
found["libpython"] = library if shared and os.path.isfile(library) else ""
names = json.loads(sys.argv[1])
import importlib.util
for name in names["modules"]:
    try:
        if importlib.util.find_spec(name) is not None:
            found["modules"].append(name)
    except Exception:
        pass
try:
    from importlib.metadata import version
except ImportError:
    version = None
for name in names["packages"]:
    try:
        found["versions"][name] = version(name)
    except Exception:
        pass
print("\n" + json.dumps(found))
"""

#: What the default run needs, for real: one step of a hand.
STEP_PROBE = r"""
import json, numpy, envpool
from claw_lightning.rollout.envs import EnvPoolEnv
env = EnvPoolEnv("HandReachDense-v3", num_envs=2)
env.reset()
result = env.step(numpy.zeros((2, env.spec.action_size), numpy.float32))
print("\n" + json.dumps({"version": envpool.__version__, "finite": bool(numpy.isfinite(result.obs).all())}))
"""

TORCH_PROBE = r"""
import json, torch
flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else ""
print("\n" + json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "archs": (flags or "").split(),
                         "sees_gpu": torch.cuda.is_available()}))
"""

#: Draws nothing: a context is all that can fail.
DRAW_PROBE = r"""
import json, mujoco
context = mujoco.GLContext(32, 32)
context.make_current()
print("\n" + json.dumps({"version": mujoco.__version__}))
"""


@dataclass
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: ``ok``, ``limited`` or ``missing``.
        text: what was found.
        cure: what to do; empty where there is nothing to do.
        needed: without it the default run would not train.
    """

    name: str
    status: str
    text: str
    cure: str = ""
    needed: bool = False


class Answer(NamedTuple):
    """What a program that was asked said: its JSON (empty: none), and why there is none."""

    found: Dict[str, Any]
    problem: str = ""


class Gpu(NamedTuple):
    """One NVIDIA GPU: its name, compute capability (major, minor), driver and MiB of memory."""

    name: str
    capability: Tuple[int, int]
    driver: str
    memory: int


@dataclass
class Interpreter:
    """A Python that may run workers.

    Attributes:
        path: of the executable.
        version: (major, minor, micro); empty where it did not start.
        libpython: path of its shared library, which Isaac Gym's binding loads; empty where it was built without.
        modules: names that could be imported.
        versions: of packages.
        problem: why it did not start.
    """

    path: str
    version: Tuple[int, ...] = ()
    libpython: str = ""
    modules: List[str] = field(default_factory=list)
    versions: Dict[str, str] = field(default_factory=dict)
    problem: str = ""


# -- probes -----------------------------------------------------------------------------------------------------------


def run_whole(command: List[str], patience: float, **settings: Any) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end; one that takes too long is ended with all that it has started (a shell's child)."""
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        universal_newlines=True,
        start_new_session=True,
        **settings,
    )
    try:
        out, err = program.communicate(timeout=patience)
    except BaseException:  # Ctrl-C too: a session of its own does not hear it
        with contextlib.suppress(OSError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        raise
    return subprocess.CompletedProcess(command, program.returncode, out, err)


def ask(command: List[str], patience: float = PATIENCE, **environment: str) -> Answer:
    """Run a program that prints one line of JSON at its end; whatever goes wrong becomes the problem of the answer."""
    try:
        run = run_whole(command, patience, stderr=subprocess.PIPE, cwd=str(ROOT), env={**os.environ, **environment})
    except subprocess.TimeoutExpired:
        return Answer({}, "no answer within %g s" % patience)
    except (OSError, ValueError) as error:
        return Answer({}, str(error))
    try:
        found = json.loads(run.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        found = None
    if run.returncode == 0 and isinstance(found, dict):
        return Answer(found)
    lines = [line for line in run.stderr.strip().splitlines() if line.strip()]
    ended = "signal %d" % -run.returncode if run.returncode < 0 else "status %d" % run.returncode
    return Answer({}, lines[-1].strip()[:200] if lines else "ended with " + ended)


def ask_python(python: str, code: str, patience: float = PATIENCE, **environment: str) -> Answer:
    """The answer of code that runs in an interpreter, with this checkout on its path."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return ask([python, "-c", code], patience, PYTHONPATH=os.pathsep.join(filter(None, paths)), **environment)


def look_at_python(path: str) -> Interpreter:
    """What an interpreter is and could import."""
    names = {
        "modules": ["torch", "numpy", "isaacgymenvs", *(simulator[1] for simulator in SIMULATORS)],
        "packages": ["torch", "numpy", *(name for simulator in SIMULATORS for name in simulator[2])],
    }
    answer = ask([path, "-c", PROBE, json.dumps(names)])
    if answer.problem:
        return Interpreter(path, problem=answer.problem)
    found = answer.found
    try:
        version = tuple(int(number) for number in found["version"])
        return Interpreter(path, version, found["libpython"], list(found["modules"]), dict(found["versions"]))
    except (KeyError, TypeError, ValueError):
        return Interpreter(path, problem="answers as no Python does: %s" % json.dumps(found)[:120])


def pythons_38() -> List[str]:
    """Interpreters of version 3.8 where they are usually found, those of the scripts first."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    candidates = [
        cache + "/claw-lightning/isaacgym/bin/python",  # of scripts/setup_isaacgym.sh
        os.path.join(os.environ.get("CLAW_PYTHON38_VENV") or cache + "/claw-lightning/py38", "bin", "python"),
        os.environ.get("CLAW_PYTHON38") or "",
        *sorted(glob.glob(pyenv + "/versions/3.8.*/bin/python3.8")),
        shutil.which("python3.8") or "",
    ]
    return [path for path in candidates if os.access(path, os.X_OK)]


def look_at_gpus() -> Tuple[List[Gpu], str]:
    """The machine's NVIDIA GPUs, and why there are none."""
    try:
        run = run_whole(
            ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader,nounits"],
            PATIENCE,
            stderr=subprocess.STDOUT,
        )
    except FileNotFoundError:
        return [], "no nvidia-smi"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    gpus = [gpu for gpu in map(parse_gpu, run.stdout.splitlines()) if gpu is not None]
    return gpus, "" if gpus else run.stdout.strip().splitlines()[0][:160] if run.stdout.strip() else "none listed"


def parse_gpu(line: str) -> Optional[Gpu]:
    """A line of nvidia-smi's table; None where it is none."""
    parts = [part.strip() for part in line.split(",")]
    capability = re.match(r"(\d+)\.(\d+)$", parts[1]) if len(parts) == 4 else None
    if capability is None:
        return None
    memory = int(parts[3]) if parts[3].isdigit() else 0
    return Gpu(parts[0], (int(capability.group(1)), int(capability.group(2))), parts[2], memory)


# -- judgements -------------------------------------------------------------------------------------------------------


def dotted(version: Iterable[int]) -> str:
    """3.11.7 of its three numbers."""
    return ".".join(map(str, version))


def judge_this_python(version: Tuple[int, ...], installed: Callable[[str], Optional[str]]) -> Iterator[Finding]:
    """The learner's interpreter and packages; ``installed`` gives a package's version or None."""
    text = "%s (%s)" % (dotted(version), sys.executable)
    if version[:2] < (3, 11):
        cure = "install Python 3.11 or newer and run this with it: python3.11 scripts/doctor.py"
        yield Finding("learner's Python", MISSING, text + ": 3.11 or newer is needed", cure, needed=True)
    else:
        yield Finding("learner's Python", OK, text, needed=True)
    lacking = [name for name in PACKAGES if installed(name) is None]
    if lacking:
        yield Finding("packages", MISSING, ", ".join(lacking) + " not installed", "pip install -e .", needed=True)
    else:
        shown = ("torch", "lightning", "gymnasium")
        yield Finding("packages", OK, ", ".join("%s %s" % (name, installed(name)) for name in shown), needed=True)


def judge_default(answer: Answer) -> Finding:
    """Whether a hand of EnvPool made a step in this interpreter."""
    if answer.problem or not answer.found.get("finite"):
        text = "EnvPool did not step HandReachDense-v3: %s" % (answer.problem or "numbers that are not finite")
        return Finding("default simulator", MISSING, text, "pip install 'envpool>=1.2.5' into this Python", needed=True)
    text = "EnvPool %s stepped HandReachDense-v3" % answer.found.get("version", "")
    return Finding("default simulator", OK, text, needed=True)


def judge_interpreter(python: Interpreter, has_gpu: bool) -> Iterator[Finding]:
    """What a worker interpreter offers: the base, then each simulator that is there."""
    name = "worker Python " + python.path
    if not python.version:
        yield Finding(name, MISSING, python.problem, "name an executable Python: --worker-python /path/to/bin/python")
        return
    version = dotted(python.version)
    lacking = [module for module in ("numpy", "torch") if module not in python.modules]
    if python.version[:2] < (3, 8):
        yield Finding(name, MISSING, version + ": workers need 3.8 or newer", "take a Python of version 3.8")
        return
    if lacking:
        cure = "%s -m pip install %s" % (python.path, " ".join(lacking))
        yield Finding(name, LIMITED, "%s, no %s: no worker starts here" % (version, " and ".join(lacking)), cure)
    else:
        parts = ["%s %s" % (package, python.versions.get(package, "")) for package in ("numpy", "torch")]
        yield Finding(name, OK, ", ".join([version, *parts]))
    if python.version[:2] == (3, 8):
        yield judge_libpython(python)
    for simulator in SIMULATORS:
        if simulator[1] in python.modules:
            yield judge_simulator(simulator, python, has_gpu)


def judge_libpython(python: Interpreter) -> Finding:
    """Isaac Gym's binding loads libpython by name."""
    name = "libpython of " + python.path
    if python.libpython:
        return Finding(name, OK, python.libpython + " (what Isaac Gym's binding loads)")
    cure = "rebuild it: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.8, or take conda's Python 3.8"
    return Finding(name, LIMITED, "built without a shared library: Isaac Gym will not import", cure)


def judge_simulator(simulator: Tuple[Any, ...], python: Interpreter, has_gpu: bool) -> Finding:
    """One simulator that an interpreter could import."""
    title, _, packages, needs_gpu, _ = simulator
    versions = ["%s %s" % (name, python.versions[name]) for name in packages if name in python.versions]
    name, text = "%s in %s" % (title, python.path), ", ".join(versions) or "installed"
    if title == "Gymnasium-Robotics" and not mujoco_suits(python.versions):
        cure = "%s -m pip install 'mujoco>=3.5,<3.12'" % python.path
        return Finding(name, LIMITED, text + ": hands and Fetch fail at reset with this mujoco", cure)
    if title == "Isaac Gym" and (python.version[:2] not in ((3, 6), (3, 7), (3, 8)) or not python.libpython):
        cure = "install it into a Python 3.8 that was built with --enable-shared"
        return Finding(name, MISSING, text + ": its bindings do not load in this interpreter", cure)
    if title == "Isaac Gym" and "isaacgymenvs" not in python.modules:
        cure = "clone IsaacGymEnvs (1.5.1) and name its folder: data.env.init_args.isaacgymenvs_path"
        return Finding(name, LIMITED, text + ", whose tasks are not installed beside it", cure)
    if title == "Playground" and not jax_suits(python.versions):
        cure = "%s -m pip install 'jax<0.10'" % python.path
        return Finding(name, LIMITED, text + ": its hands fail at their first step with this jax", cure)
    if title in ("mjlab", "Isaac Lab", "Isaac Gym") and needs_gpu and not has_gpu:
        return Finding(name, LIMITED, text + ": needs an NVIDIA GPU to train", "run it on a machine with a GPU")
    if title == "Playground" and not has_gpu:
        return Finding(name, LIMITED, text + ": on CPU with impl 'jax' alone, slowly", "EnvPoolEnv has the same tasks")
    return Finding(name, OK, text)


def numbers(versions: Dict[str, str], package: str) -> Tuple[int, ...]:
    """(3, 11, 0) of the version of a package; () where it is not there."""
    return tuple(int(x) for x in re.findall(r"\d+", versions.get(package, ""))[:3])


def mujoco_suits(versions: Dict[str, str]) -> bool:
    """gymnasium-robotics up to 1.4.2 fails with mujoco 3.12 and later (its pull request 330 mends that)."""
    return numbers(versions, "gymnasium-robotics") > (1, 4, 2) or numbers(versions, "mujoco")[:2] < (3, 12)


def jax_suits(versions: Dict[str, str]) -> bool:
    """Playground 0.2.0 calls ``clip(a_max=...)``, which jax 0.10 no longer has."""
    return numbers(versions, "playground") > (0, 2, 0) or numbers(versions, "jax")[:2] < (0, 10)


def judge_absent(pythons: List[Interpreter]) -> Iterator[Finding]:
    """Simulators that no interpreter has."""
    present = {module for python in pythons for module in python.modules}
    for title, module, _, _, cure in SIMULATORS:
        if module not in present:
            yield Finding(title, MISSING, "in none of the interpreters looked at", cure + "; see docs/simulators.md")
    if not any(python.version[:2] == (3, 8) for python in pythons):
        yield Finding("Python 3.8", MISSING, "none found; only Isaac Gym needs one", "PYTHON_CONFIGURE_OPTS="
                      "--enable-shared pyenv install 3.8.18, then scripts/setup_isaacgym.sh")  # fmt: skip


#: What was reported of Isaac Gym (its last release is of 2022), by the first compute capability of a generation.
GENERATIONS = (
    ((12, 0), "Blackwell", LIMITED, "no torch for Python 3.8 has kernels for it; one report of success with torch "
     "2.4.1 built from source for CUDA 12.8", "use Playground, mjlab or Isaac Lab"),
    ((10, 0), "Blackwell (data centre)", LIMITED, "no torch for Python 3.8 has kernels for it; no report of "
     "success", "use Playground or mjlab"),
    ((9, 0), "Hopper", MISSING, "every report is of a segmentation fault right after PhysX starts on the GPU; no cure "
     "is known", "use Playground or mjlab, which need neither PhysX nor RT cores"),
    ((8, 9), "Ada", OK, "reported to work with torch 1.13 for CUDA 11.7 or newer, not with torch 1.10", ""),
    ((8, 0), "Ampere", OK, "reported to work", ""),
    ((7, 0), "Volta or Turing", OK, "reported to work", ""),
    ((0, 0), "older than Volta", LIMITED, "no report", "use EnvPool on the CPU"),
)  # fmt: skip
#: GPUs without RT cores, which the application behind Isaac Sim needs.
WITHOUT_RT = re.compile(r"\b(V100|A100|A30|A800|H100|H200|H800|H20|GH200|B100|B200|B300|GB200|GB300)\b", re.I)


def judge_gpus(gpus: List[Gpu], problem: str) -> Iterator[Finding]:
    """What each GPU means for the simulators that run on one."""
    if not gpus:
        text = "none (%s): learner and EnvPool run on the CPU; Isaac Gym, Isaac Lab and mjlab do not train" % problem
        yield Finding("GPU", LIMITED, text, "install NVIDIA's driver if this machine has a GPU")
    for gpu in sorted(set(gpus), key=gpus.index):
        generation = next(entry for entry in GENERATIONS if gpu.capability >= entry[0])
        _, family, status, report, cure = generation
        count = "%d x " % gpus.count(gpu) if gpus.count(gpu) > 1 else ""
        memory = "%.0f GiB" % (gpu.memory / 1024)
        text = "%s%s, %s (sm_%d%d), %s, driver %s" % (count, gpu.name, family, *gpu.capability, memory, gpu.driver)
        yield Finding("GPU", OK, text)
        yield Finding("Isaac Gym on %s" % gpu.name, status, report, cure)
        if WITHOUT_RT.search(gpu.name):
            cure = "use Isaac Lab 3 with its Newton path, Playground or mjlab"
            yield Finding("Isaac Sim on %s" % gpu.name, MISSING, "no RT cores, which its application needs", cure)
        elif gpu.driver.split(".")[0] in ("590", "595"):
            cure = "take driver 580, or a later Isaac Sim"
            yield Finding("Isaac Sim on %s" % gpu.name, LIMITED, "this driver is reported to crash Isaac Sim 5.1", cure)


def judge_torch(answer: Answer, gpus: List[Gpu]) -> Finding:
    """The learner's torch, and whether it has kernels for the GPUs."""
    if answer.problem:
        cure = "pip install --force-reinstall torch; import torch must work in %s" % sys.executable
        return Finding("torch", MISSING, answer.problem, cure, needed=True)
    version, cuda, archs = (answer.found.get(key) for key in ("version", "cuda", "archs"))
    if not cuda:
        status, cure = (LIMITED, "install a torch for CUDA to learn on the GPU") if gpus else (OK, "")
        return Finding("torch", status, "%s, built for the CPU" % version, cure, needed=True)
    text = "%s for CUDA %s (%s)" % (version, cuda, " ".join(archs or []))
    lacking = ["sm_%d%d" % gpu.capability for gpu in gpus if not has_kernels(gpu.capability, archs or [])]
    if lacking:
        cure = "install a torch that is built for %s, or set trainer.accelerator: cpu" % lacking[0]
        return Finding("torch", LIMITED, text + ": no kernels for " + ", ".join(lacking), cure, needed=True)
    if gpus and not answer.found.get("sees_gpu"):
        cure = "look at CUDA_VISIBLE_DEVICES, and for a driver as new as CUDA %s" % cuda
        return Finding("torch", LIMITED, text + ": sees no GPU", cure, needed=True)
    return Finding("torch", OK, text, needed=True)


def has_kernels(capability: Tuple[int, int], archs: Iterable[str]) -> bool:
    """Machine code of the same major and no later minor version, or any earlier PTX, which the driver compiles."""
    for arch in archs:
        match = re.match(r"(sm|compute)_(\d+)(\d)", arch)
        if match is None:
            continue
        built = (int(match.group(2)), int(match.group(3)))
        if built <= capability and (match.group(1) == "compute" or built[0] == capability[0]):
            return True
    return False


def judge_cores(cores: float, affinity: int) -> Finding:
    """Cores and how to share them out."""
    text = "%d" % affinity if cores >= affinity else "%g of %d (quota of the control group)" % (cores, affinity)
    whole = max(1, int(cores))
    if whole == 1:
        cure = "data.mode: lockstep; two cores or more let simulators and learner overlap"
        return Finding("cores", LIMITED, text, cure)
    workers, learner = split_cores(whole)
    threads = "data.num_workers: %d, data.learner_threads: %d" % (workers, learner)
    return Finding("cores", OK, "%s; to begin with, %s" % (text, threads))


def split_cores(cores: int) -> Tuple[int, int]:
    """(workers, threads of the learner): a quarter for the learner, as simulators take most of the time."""
    learner = max(1, cores // 4)
    return max(1, cores - learner), learner


def judge_bfloat16(has_units: bool) -> Finding:
    """Whether low precision pays on this CPU."""
    if has_units:
        return Finding("bfloat16", OK, "the processor has units for it")
    return Finding("bfloat16", LIMITED, "no units in this processor: bf16 would be some twenty times slower on the CPU",
                   "keep trainer.precision: 32-true on the CPU")  # fmt: skip


def judge_shared_memory(memfd_problem: str, shm_bytes: Optional[int]) -> Iterator[Finding]:
    """The replay lies in anonymous shared memory; the size of /dev/shm does not bound it."""
    if memfd_problem:
        cure = "Linux 3.17 or newer and glibc are needed; a sandbox may forbid memfd_create"
        yield Finding("shared memory", MISSING, "memfd_create: " + memfd_problem, cure, needed=True)
    else:
        shm = "no /dev/shm" if shm_bytes is None else "/dev/shm has %.1f GiB" % (shm_bytes / GIB)
        yield Finding("shared memory", OK, "memfd_create works; %s, which the replay does not need" % shm, needed=True)


def judge_process_limits(open_files: int, locked: int) -> Iterator[Finding]:
    """``RLIMIT_NOFILE`` and ``RLIMIT_MEMLOCK``, soft limits; -1 is none."""
    if 0 <= open_files < 1024:
        text = "%d at once: every worker takes about ten" % open_files
        yield Finding("open files", LIMITED, text, "ulimit -n 4096")
    else:
        yield Finding("open files", OK, "no limit" if open_files < 0 else "%d at once" % open_files)
    text = "no limit" if locked < 0 else "%.1f MiB" % (locked / 2**20)
    yield Finding("locked memory", OK, text + " (nothing here locks memory itself)")


def judge_memory(free: int, total: int, where: str) -> Finding:
    """The tightest limit of memory, control groups included."""
    text = "%.1f of %.1f GiB free (limit: %s)" % (free / GIB, total / GIB, where)
    if free < 1 * GIB:
        cure = "free memory or raise the limit; a run of the default takes about 2 GiB"
        return Finding("memory", MISSING, text, cure, needed=True)
    if free < 4 * GIB:
        return Finding("memory", LIMITED, text, "one worker, and a smaller data.capacity", needed=True)
    return Finding("memory", OK, text, needed=True)


def judge_disk(free: int, folder: str) -> Finding:
    """Room for runs and checkpoints."""
    text = "%.1f GiB free in %s" % (free / GIB, folder)
    if free < GIB // 2:
        return Finding("disk", MISSING, text, "free some: checkpoints with their replay need about 1 GiB", needed=True)
    status, cure = (LIMITED, "checkpoints hold the replay: free some") if free < 5 * GIB else (OK, "")
    return Finding("disk", status, text, cure, needed=True)


def judge_drawing(answers: Dict[str, Answer]) -> Finding:
    """Off-screen rendering, by the libraries that MuJoCo can use."""
    working = [name for name, answer in answers.items() if not answer.problem]
    if working:
        return Finding("off-screen images", OK, "MUJOCO_GL=%s works" % working[0])
    problem = next(iter(answers.values())).problem if answers else "not tried"
    if "No module named" in problem:
        cure = "pip install 'claw-lightning[robotics]'"
    else:
        cure = "install a GPU driver with EGL, or apt-get install libegl1 libosmesa6"
    return Finding("off-screen images", LIMITED, "no videos of evaluations (%s)" % problem, cure)


# -- the examination --------------------------------------------------------------------------------------------------


def guarded(name: str, look: Callable[[], Any], needed: bool = False) -> List[Finding]:
    """Findings of one look; one that fails becomes a finding itself."""
    try:
        found = look()
        return [found] if isinstance(found, Finding) else list(found)
    except Exception as error:  # a doctor does not die of what is missing
        text = "could not be looked at (%s: %s)" % (type(error).__name__, " ".join(str(error).split())[:160])
        return [Finding(name, MISSING if needed else LIMITED, text, "see the other lines first", needed=needed)]


def installed_version(name: str) -> Optional[str]:
    """Version of an installed package, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def look_at_limits() -> Iterator[Finding]:
    """What the package's own functions say of this machine."""
    from claw_lightning import limits

    yield from guarded("cores", lambda: judge_cores(limits.usable_cores(), len(os.sched_getaffinity(0))))
    yield from guarded("memory", lambda: judge_memory(*limits.tightest_room()), needed=True)
    yield from guarded("bfloat16", lambda: judge_bfloat16(limits.computes_bfloat16()))


def look_at_shared_memory() -> Iterator[Finding]:
    """Try what the ring does: create, size, map."""
    problem, size = "", None
    try:
        from claw_lightning.rollout.shared import SharedBlock

        SharedBlock(4096).close()
    except (ImportError, OSError, AttributeError) as error:
        problem = str(error) or type(error).__name__
    try:
        system = os.statvfs("/dev/shm")
        size = system.f_blocks * system.f_frsize
    except OSError:
        pass
    return judge_shared_memory(problem, size)


def examine(worker_pythons: Iterable[str]) -> List[Finding]:
    """All findings, in the order in which they are printed. Programs that are asked run side by side."""
    named = [sys.executable, *worker_pythons]
    paths = [*named, *pythons_38()]
    paths = sorted(set(paths), key=paths.index)
    with ThreadPoolExecutor(max_workers=4) as pool:
        torch = pool.submit(ask_python, sys.executable, TORCH_PROBE, LONG_PATIENCE)
        step = pool.submit(ask_python, sys.executable, STEP_PROBE, LONG_PATIENCE, OMP_NUM_THREADS="1")
        drawing = {name: pool.submit(ask_python, sys.executable, DRAW_PROBE, MUJOCO_GL=name) for name in
                   ("egl", "osmesa")}  # fmt: skip
        # Of those that nobody named, only the ones that start are worth a line (a shim of pyenv may lead nowhere).
        pythons = [python for python in pool.map(look_at_python, paths) if python.version or python.path in named]
        gpus, problem = look_at_gpus()
    soft = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
    soft = [-1 if limit == resource.RLIM_INFINITY else limit for limit in soft]
    looks: List[Tuple[str, Callable[[], Any], bool]] = [
        ("learner's Python", lambda: judge_this_python(sys.version_info[:3], installed_version), True),
        ("torch", lambda: judge_torch(torch.result(), gpus), True),
        ("default simulator", lambda: judge_default(step.result()), True),
        ("limits", look_at_limits, True),
        ("shared memory", look_at_shared_memory, True),
        ("limits of processes", lambda: judge_process_limits(*soft), False),
        ("disk", lambda: judge_disk(shutil.disk_usage(os.getcwd()).free, os.getcwd()), True),
        ("GPU", lambda: judge_gpus(gpus, problem), False),
        ("off-screen images", lambda: judge_drawing({k: v.result() for k, v in drawing.items()}), False),
    ]
    findings = [finding for look in looks for finding in guarded(*look)]
    for python in pythons:
        findings += guarded("worker Python " + python.path, partial(judge_interpreter, python, bool(gpus)))
    return findings + guarded("simulators", lambda: judge_absent(pythons))


def would_train(findings: Iterable[Finding]) -> bool:
    """Whether nothing is missing that the default run needs."""
    return not any(finding.needed and finding.status == MISSING for finding in findings)


def report(findings: List[Finding]) -> str:
    """The findings as text, one or two lines each."""
    lines = []
    for finding in findings:
        lines.append("%-8s%s: %s" % (finding.status, finding.name, finding.text))
        if finding.cure:
            lines.append("%-8s-> %s" % ("", finding.cure))
    verdict = "would train" if would_train(findings) else "would NOT train: mend what is missing above first"
    return "\n".join([*lines, "The default (EnvPool, lightning fit --config hand_reach_dense) %s." % verdict])


def cannot_write(path: Path) -> str:
    """Why a file cannot be written, asked without making it; empty where nothing speaks against it."""
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return "there is no folder %s" % path.parent
    return "" if os.access(str(path if path.exists() else path.parent), os.W_OK) else "no permission"


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--worker-python", action="append", default=[], metavar="PATH",
                        help="an interpreter for workers (data.worker_python); may be given several times")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    options = parser.parse_args(arguments)
    problem = cannot_write(options.json) if options.json is not None else ""
    if problem:
        print("--json: cannot write %s (%s)" % (options.json, problem), file=sys.stderr)
        return 1
    sys.path.insert(0, str(ROOT))  # the package need not be installed to be asked
    findings = examine(options.worker_python)
    print(report(findings))
    if options.json is not None:
        content = {"trains": would_train(findings), "findings": [asdict(finding) for finding in findings]}
        try:
            options.json.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            print("--json: cannot write %s (%s)" % (options.json, error.strerror), file=sys.stderr)
            return 1
    return 0 if would_train(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
