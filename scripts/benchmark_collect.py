"""Suite ``collect`` of benchmark.py: what it costs to have a simulator's steps chosen, stamped and written.

All of it runs in one process on one thread, as within a worker. ``bridge`` leaves simulator and policy out: what is
left of a vector step of hand-sized rows (4,096 lanes, observation 211, action 20) is checked, stamped, written into the
shared-memory ring and published, beside a plain copy of the observations, rewards and actions alone into as large a
memory. The other groups collect with a policy of four options and layers [256, 256] from a simulator, beside stepping
that simulator bare, with the same actions at every step.

Group ``workers``: whole workers, two of them on all cores, that step HandReachDense-v3 with a policy of layers
[256, 256] and one option, nobody learning. Others step it with two processes of theirs in the way they are made for.
Counted are steps that the learner could draw. Ours is measured with its default simulator (EnvPool, 16 lanes a worker)
and with the simulator of Gymnasium, one lane a worker, that the others run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from measuring import Arms, Bench, Call, Row, Target
from served import ALL_CORES, Arm, measure_served, rates

from claw_lightning.rollout.acting import Decision, OptionAgent
from claw_lightning.rollout.collector import Collector
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.envs.base import EnvError, EnvSpec, StepResult, VectorEnv
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.ring import LaneRing, RowLayout

#: Sizes of Isaac Gym's ShadowHand.
OBS, ACTION = 211, 20
#: Steps of the ring that is written around: more than any cache holds.
RING_STEPS = 64
POLICY = {"hidden_sizes": [256, 256], "option_hidden_sizes": [64], "num_options": 4}
EXPLORATION = {"kind": "gaussian", "scale_min": 0.05, "scale_max": 0.3}
#: Seconds per environment step of the simulator that only waits; hands in MuJoCo take 500 to 1,200 us.
PAUSE = 500e-6


class Repeating(VectorEnv):
    """Gives the same step again and again, after a pause in which it computes as a simulator does."""

    reuses_buffers = False

    def __init__(self, num_envs: int, obs_size: int, action_size: int, pause: float = 0.0) -> None:
        self.num_envs, self.pause = num_envs, pause
        self.spec = EnvSpec("repeating", obs_size, action_size, [-1.0] * action_size, [1.0] * action_size)
        rng, no = np.random.default_rng(0), np.zeros(num_envs, bool)
        obs = rng.standard_normal((num_envs, obs_size), np.float32)
        reward = rng.standard_normal(num_envs, np.float32)
        self.result = StepResult(obs, reward, no, no, None, None, no, {})

    def reset(self, seed: int | None = None) -> np.ndarray:
        """The one observation."""
        return self.result.obs

    def step(self, action: np.ndarray) -> StepResult:
        """The one step."""
        until = time.perf_counter() + self.pause * self.num_envs
        while time.perf_counter() < until:
            pass
        return self.result


class Idle:
    """In an agent's place: always the same decision, at no cost."""

    version = 0

    def __init__(self, num_lanes: int, action_size: int) -> None:
        rng = np.random.default_rng(1)
        whole, no = np.zeros(num_lanes, np.int32), np.zeros(num_lanes, bool)
        zeros = np.zeros(num_lanes, np.float32)
        action = rng.uniform(-1, 1, (num_lanes, action_size)).astype(np.float32)
        self.decision = Decision(action, whole, whole, whole, no, no, zeros, zeros)

    def act(self, *_: Any) -> Decision:
        """The one decision."""
        return self.decision


def collect_arm(env: VectorEnv, agent: Any, ring_steps: int = RING_STEPS) -> Call:
    """Vector steps of a collector; nothing arrives in its mailbox."""
    spec = env.spec
    layout = RowLayout(spec.obs_size, spec.action_size, spec.states_size)
    ring = LaneRing(layout, ring_steps, env.num_envs)
    collector = Collector(env, agent, ring, Mailbox(1), Control(), lambda episodes: None, seed=0)
    collector.reset()

    def call() -> int:
        collector.step()
        return env.num_envs

    return call


def copy_arm(num_lanes: int, words: int, steps: int = RING_STEPS) -> Call:
    """Copies of so many numbers into the steps of a memory, one after the other."""
    source = np.random.default_rng(2).standard_normal((num_lanes, words), np.float32)
    target = np.zeros((steps, num_lanes, words), np.float32)
    position = 0

    def call() -> int:
        nonlocal position
        np.copyto(target[position], source)
        position = (position + 1) % steps
        return num_lanes

    return call


def bare_arm(env: VectorEnv, step: Callable[[np.ndarray], Any], actions: np.ndarray) -> Call:
    """Steps of a simulator without anything around it."""

    def call() -> int:
        step(actions)
        return env.num_envs

    return call


def measure_bridge(bench: Bench) -> None:
    """What writing and publishing add to a step."""
    lanes = bench.args.lanes
    arms: Arms = {
        "bridge": collect_arm(Repeating(lanes, OBS, ACTION), Idle(lanes, ACTION)),
        "memcpy": copy_arm(lanes, OBS + ACTION),
    }
    bench.run("bridge", arms)


def agent_of(env: VectorEnv) -> OptionAgent:
    """Four options with layers [256, 256] and exploration, as configurations have them."""
    settings = dict(POLICY, obs_size=env.spec.obs_size, action_size=env.spec.action_size)
    return OptionAgent(settings, env.num_envs, 0, exploration=EXPLORATION)


def measure_simulator(bench: Bench, group: str, lanes: int, task: str | None) -> None:
    """Collecting from a simulator beside stepping it; ``task`` None: the one that only waits."""
    if task is None:
        ours, bare = (Repeating(lanes, OBS, ACTION, PAUSE) for _ in range(2))
        actions = np.zeros((lanes, ACTION), np.float32)
        arms = {"collect": collect_arm(ours, agent_of(ours)), "raw": bare_arm(bare, bare.step, actions)}
        return bench.run(group, named(group, arms))
    try:
        from claw_lightning.rollout.envs import EnvPoolEnv

        env = EnvPoolEnv(task=task, num_envs=lanes)
        import envpool
    except (ImportError, EnvError) as error:
        return bench.leave_out(group, " ".join(str(error).split()))
    raw = envpool.make_gymnasium(task, num_envs=lanes, seed=0, num_threads=1)
    raw.reset()
    space = raw.action_space
    actions = np.random.default_rng(3).uniform(space.low, space.high, (lanes, *space.shape)).astype(space.dtype)
    arms = {"collect": collect_arm(env, agent_of(env), 1024), "raw": bare_arm(env, raw.step, actions)}
    bench.run(group, named(group, arms))
    env.close()
    raw.close()


def named(group: str, arms: Arms) -> Arms:
    """Arms under names that tell the group's simulator."""
    return {f"{group}_{name}": call for name, call in arms.items()}


def _simulator_row(group: str, text: str, least: float) -> Row:
    arms = (f"{group}_collect", f"{group}_raw")
    return Row(group, arms, f"collecting over stepping {text} bare", Target(least, True))


#: Group: lanes and task.
SIMULATORS: dict[str, tuple[int, str | None]] = {
    "hand_reach": (16, "HandReachDense-v3"),
    "pause": (16, None),
    "pendulum": (16, "Pendulum-v1"),
}
#: Package: least ratio of row 6.
PEERS = {"stable-baselines3": 2.2, "torchrl": 1.7, "tianshou": 2.6}
#: Ratios of rates, but bridge: of times (the copy's rate over the bridge's).
COLLECT_ROWS = {
    "collect/bridge_to_memcpy": Row(
        "bridge", ("memcpy", "bridge"), "time of write and publish over a copy of the same numbers", Target(2.0, False)
    ),
    "collect/hand_reach_to_raw": _simulator_row("hand_reach", "HandReachDense-v3", 0.85),
    "collect/pause_to_raw": _simulator_row("pause", "a simulator of 500 us per environment step", 0.9),
    "collect/pendulum_to_raw": _simulator_row("pendulum", "Pendulum-v1", 0.5),
    # The same ratios under their numbers.
    "5.hand_reach": _simulator_row("hand_reach", "HandReachDense-v3", 0.85),
    "5.pause": _simulator_row("pause", "a simulator of 500 us per environment step", 0.9),
    "5.pendulum": _simulator_row("pendulum", "Pendulum-v1", 0.5),
    **{
        f"6.{name}": Row("workers", ("workers", name), f"two workers over two processes of {name}", Target(least, True))
        for name, least in PEERS.items()
    },
    **{
        f"6.{name}.same_simulator": Row(
            "workers", ("workers_gymnasium", name), f"the same, with the one simulator that {name} steps"
        )
        for name in PEERS
    },
}


def measure_workers(bench: Bench) -> None:
    """Row 6: two workers without a learner."""
    task, cores = bench.args.task, ALL_CORES
    ours = {"data": {"num_workers": 2}, "task": task}
    single = {"task": task, "adapter": "GymnasiumEnv", "data": {"num_workers": 2, "envs_per_worker": 1}}
    arms = {"workers": Arm("claw", "collect", ours, cores), "workers_gymnasium": Arm("claw", "collect", single, cores)}
    arms |= {name: Arm(name, "collect", {"task": task}, cores) for name in PEERS}
    bench.add_group("workers", rates(measure_served(bench, "workers", arms, "steps/s")))


COLLECT_GROUPS = ("bridge", *SIMULATORS, "workers")
#: Workers of their own are among the arms of ``endtoend``.
COLLECT_QUICK = {"lanes": 64, "seconds": 0.05, "groups": ("bridge", "pause", "pendulum")}


def run_collect(bench: Bench) -> None:
    """The chosen groups, one after the other."""
    for group in bench.args.groups:
        if group == "bridge":
            measure_bridge(bench)
        elif group == "workers":
            measure_workers(bench)
        else:
            measure_simulator(bench, group, *SIMULATORS[group])


def add_collect_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the suite ``collect``."""
    parser.add_argument("--lanes", type=int, default=4096, help="of the bridge (default: 4096)")
    parser.add_argument("--task", default="HandReachDense-v3", help="of the workers (default: HandReachDense-v3)")


def check_collect_arguments(args: argparse.Namespace) -> str | None:
    """What is wrong with them."""
    return "--lanes must be at least 1" if args.lanes < 1 else None
