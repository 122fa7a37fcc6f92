"""An arm of a benchmark in a process of its own, so that arms of several interpreters can take turns.

    python serve.py ARMS_FILE

Spoken over standard input and output, one JSON object per line. First comes what the arm is; it is then built, which is
not timed, and called once, which is not timed either::

    {"arm": "td3", "settings": {...}, "affinity": [0], "threads": 1}
    {"ready": true, "versions": {...}, "affinity": [0], "threads": 1}

After that each line asks for work of so many seconds, or of so much that is counted::

    {"do": "run", "seconds": 1.0}      or      {"do": "run", "count": 2000}
    {"count": 118, "seconds": 1.004, "cpu": 0.99}

``{"do": "close"}``, or the end of the input, ends the process. What goes wrong is ``{"error": "one line"}``, and the
process ends. Between two requests it sleeps in a read. Whatever an arm prints goes to standard error.

An arms file holds functions by name in ``ARMS``. Each takes the settings and returns a call (does some of its work and
returns how much that was), or an object with ``drive(channel)``, which answers requests in its own way.

Runs in the packages' own interpreters: needs nothing but the standard library.
"""

import gc
import importlib.util
import json
import os
import sys
import time

#: The data that learners are measured on: sizes of HandReach.
OBS, ACTION = 93, 20
CORES = sorted(os.sched_getaffinity(0))
DISTRIBUTIONS = (
    "claw-lightning", "torch", "numpy", "gymnasium", "gymnasium-robotics", "mujoco", "envpool", "stable-baselines3",
    "skrl", "tianshou", "torchrl", "tensordict", "sheeprl", "lightning",
)  # fmt: skip


def cpu_seconds():
    """Seconds that this process and its ended children were computing."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def timed(call, seconds=None, count=None):
    """Call again and again for at least ``seconds``, or until ``count`` is reached: (count, seconds, cpu seconds)."""
    gc.collect()
    gc.disable()
    try:
        done, cpu, started = 0, cpu_seconds(), time.perf_counter()
        while True:
            done += call()
            elapsed = time.perf_counter() - started
            if elapsed >= seconds if count is None else done >= count:
                return done, elapsed, cpu_seconds() - cpu
    finally:
        gc.enable()


def cores(places):
    """Numbers of cores at places among those that this process had at its start; where there are too few, the last."""
    return {CORES[min(place, len(CORES) - 1)] for place in places}


class Channel:
    """Requests in, answers out."""

    def __init__(self, source, target):
        self.source, self.target = source, target

    def receive(self):
        """The next request; None: there will be none."""
        line = self.source.readline()
        if not line:
            return None
        request = json.loads(line)
        return None if request.get("do") == "close" else request

    def answer(self, **content):
        """One line; an end that nobody reads any more is none of ours."""
        try:
            self.target.write(json.dumps(content) + "\n")
            self.target.flush()
        except BrokenPipeError:
            pass

    def ready(self, threads):
        """The arm is built."""
        self.answer(ready=True, versions=versions(), affinity=sorted(os.sched_getaffinity(0)), threads=threads)


def versions(names=DISTRIBUTIONS):
    """Of this interpreter and those of the named packages that are in it."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def transitions(rows, seed=0):
    """Random rows of the task: obs, action, reward, next_obs, terminated; float32 but the last."""
    import numpy as np

    rng = np.random.default_rng(seed)
    obs, next_obs = (rng.standard_normal((rows, OBS), np.float32) for _ in range(2))
    action = rng.uniform(-1.0, 1.0, (rows, ACTION)).astype(np.float32)
    return obs, action, rng.standard_normal(rows, np.float32), next_obs, rng.random(rows) < 0.02


def spaces():
    """Flat spaces of the task, as Gymnasium has them."""
    import numpy as np
    from gymnasium.spaces import Box

    return Box(-np.inf, np.inf, (OBS,), np.float32), Box(-1.0, 1.0, (ACTION,), np.float32)


def nothing_env():
    """A Gymnasium environment of the task's sizes, for packages that want one and never step it."""
    import gymnasium

    class Nothing(gymnasium.Env):
        observation_space, action_space = spaces()

        def reset(self, *, seed=None, options=None):
            return self.observation_space.sample(), {}

    return Nothing()


def gymnasium_env(task):
    """A task of Gymnasium (or gymnasium-robotics) with flat float32 observations."""
    import gymnasium
    import numpy as np
    from gymnasium import wrappers

    if task.startswith("Hand"):
        import gymnasium_robotics

        gymnasium.register_envs(gymnasium_robotics)
    env = gymnasium.make(task)
    if isinstance(env.observation_space, gymnasium.spaces.Dict):
        env = wrappers.FlattenObservation(env)
    return wrappers.DtypeObservation(env, np.float32)


def compare_sb3():
    """The module scripts/compare_sb3.py: recipe, evaluation, and EnvPool as stable-baselines3 wants it."""
    name = "compare_sb3"
    if name not in sys.modules:
        path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), name + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def play_actor(actor, task, episodes):
    """Mean return of noise-free episodes: a call from observations [N, O] to actions [N, A], both tensors."""
    import numpy as np
    import torch

    from claw_lightning.rollout.acting import Decision

    class Agent:
        num_options = 1

        def reseed(self, seed):
            """Nothing is drawn."""

        def act(self, obs, first, image=None):
            with torch.no_grad():
                action = actor(torch.from_numpy(np.asarray(obs, np.float32))).numpy()
            whole, no = np.zeros(len(obs), np.int32), np.zeros(len(obs), bool)
            previous, zeros = np.where(first, -1, 0).astype(np.int32), whole.astype(np.float32)
            return Decision(action, whole, previous, whole, first, no, zeros, zeros)

    return compare_sb3().play(Agent(), episodes, task)["return"]


def load(path):
    """The arms of a file. Its folder is not on the import path: it holds files named like packages."""
    spec = importlib.util.spec_from_file_location("benchmark_arms", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_arms"] = module
    spec.loader.exec_module(module)
    return module.ARMS


def one_line(error):
    """Type and text of an exception."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def serve(channel, path):
    """Build the arm that is asked for, and answer until the end."""
    first = channel.receive()
    if first is None:
        return
    if first.get("affinity"):
        os.sched_setaffinity(0, cores(first["affinity"]))
    threads = first.get("threads", 1)
    # Read once, when the libraries are loaded.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = str(threads)
    import torch

    torch.set_num_threads(threads)
    arm = load(path)[first["arm"]](first.get("settings", {}))
    if hasattr(arm, "drive"):
        arm.drive(channel)
        return
    arm()  # first calls compile, allocate and warm caches
    torch.set_num_threads(threads)  # some packages set it when they are imported or built
    channel.ready(threads)
    while (request := channel.receive()) is not None:
        if request["do"] == "evaluate":
            channel.answer(**{"return": arm.evaluate(request["episodes"])})
            continue
        if request["do"] == "pids":
            channel.answer(learner=os.getpid(), workers=[])
            continue
        count, seconds, cpu = timed(arm, request.get("seconds"), request.get("count"))
        channel.answer(count=count, seconds=seconds, cpu=cpu)


def main(arguments):
    """Entry point: the arms' file is the only argument."""
    sys.modules["serve"] = sys.modules[__name__]  # arms import it
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    # Packages print; answers have a descriptor of their own.
    target = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    channel = Channel(os.fdopen(os.dup(0), "r"), target)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    status = 0
    try:
        serve(channel, arguments[0])
    except BaseException as error:
        import traceback

        traceback.print_exc()
        channel.answer(error=one_line(error))
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever threads and processes a package has left open


if __name__ == "__main__":
    main(sys.argv[1:])
