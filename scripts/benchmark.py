"""Measure parts of this product against a floor and against other packages, on this machine.

    python scripts/benchmark.py replay --json replay.json

What counts are ratios of one run: arms take turns (A B C A B C ...), a ratio is formed in each round, and a row gives
the median over the rounds and the least and largest. One thread, the garbage collector off while the clock runs, a
first round that does not count. Absolute figures are for scale only: a machine drifts by more than most differences.

Suite ``collect``: see benchmark_collect.py. Suite ``callbacks``: see benchmark_callbacks.py.

Suite ``replay``: rows of HandReach (observation 93, action 20, float32, episodes of 50 steps in 16 lanes) that lie in
the shared-memory ring as workers write them, sampled by :class:`~claw_lightning.replay.memory.ReplayMemory`. The floor
is one gather of packed rows that already hold their next observation: as many bytes, no episodes, nobody who writes.
Other packages hold the same transitions and are asked for as many rows per call. Counted are rows that came back:
of our segments only the steps that belong to them. No rows arrive while the clock runs, on either side.

Other packages are not needed; rows without them are skipped, with a line that says how to have them. As they bring
much along, best in an environment of its own:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install torch psutil stable-baselines3 tianshou torchrl
    /tmp/peers/bin/pip install --no-deps -e .
    /tmp/peers/bin/python scripts/benchmark.py replay
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # read once, when the libraries are loaded
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    )

import argparse
import importlib
import logging
import math
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from benchmark_callbacks import CALLBACK_ROWS, add_callback_arguments, check_callback_arguments, run_callbacks
from benchmark_collect import COLLECT_ROWS, add_collect_arguments, check_collect_arguments, run_collect
from measuring import CLOCKS, DISTRIBUTIONS, Arms, Bench, Call, Results, Row, Target, one_line
from torch import Tensor

from claw_lightning.limits import available_memory, format_bytes, keep_freed_memory
from claw_lightning.replay import Hindsight, Relabeller, ReplayBatch, ReplayMemory
from claw_lightning.replay.episodes import EpisodeIndex
from claw_lightning.replay.samplers import Sampler, Uniform
from claw_lightning.replay.samplers.by_option import ByOption
from claw_lightning.replay.samplers.mixture import Mixture
from claw_lightning.replay.samplers.options import OptionSegments
from claw_lightning.replay.samplers.prioritized import Prioritized
from claw_lightning.replay.samplers.recent import Fresh, Recent
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.goals import goal_reward
from claw_lightning.rollout.ring import BORDER, FIRST, SWITCHED, TRUNCATED, LaneRing, RowLayout, usable

# -- replay: the data -------------------------------------------------------------------------------------------------

#: HandReach in the simulator: the parts of its observation, its action, its episodes.
TASK, OBSERVATION, GOAL, ACTION, EPISODE, LANES = "HandReach-v3", 63, 15, 20, 50, 16
OBS = OBSERVATION + 2 * GOAL
REACHED = 0.01  # m
OPTIONS, OPTION_STEPS = 4, 10
SEGMENT = 16
ALPHA, BETA = 0.6, 0.4
#: Where memory is too short for the large ring.
NARROW_OBS, NARROW_ACTION = 8, 4
LEAST_ROWS = 64 * LANES
#: Of a sampler's tables and what it copies on its way, per row; more than any takes.
SAMPLER_BYTES = 64
CHUNK = 4096  # vector steps that are written at once


def make_ring(rows: int, layout: RowLayout, seed: int = 0) -> LaneRing:
    """A full ring, written as a worker does: a step of all lanes after the other, a border after each episode.

    Lanes begin and end their episodes together. The numbers are random, and repeat after some thousand steps.
    """
    ring = LaneRing(layout, rows // LANES, LANES)
    rng, view = np.random.default_rng(seed), layout.view
    floats = layout.fields["flags"][0]
    noise = rng.standard_normal((min(CHUNK, ring.num_steps), LANES, floats), np.float32)
    for start in range(0, ring.num_steps, CHUNK):
        chunk = ring.rows[start : start + CHUNK, :, :floats]
        chunk[:] = noise[: len(chunk)]
    steps = np.arange(ring.num_steps)
    place = steps % (EPISODE + 1)  # within the episode; the last is its border
    is_border = place == EPISODE
    switches = (place % OPTION_STEPS == 0) & ~is_border
    flags = (place == 0) * FIRST + (place == EPISODE - 1) * TRUNCATED + is_border * BORDER + switches * SWITCHED
    number = np.cumsum(switches) - 1  # of the option's execution
    options = rng.integers(0, OPTIONS, (number[-1] + 1, LANES))
    previous = options[np.maximum(number - switches, 0)]
    previous[place == 0] = -1
    view(ring.rows, "flags")[:] = flags[:, None]
    view(ring.rows, "option")[:] = options[number]
    view(ring.rows, "previous_option")[:] = previous
    view(ring.rows, "option_age")[:] = np.where(is_border, OPTION_STEPS, place % OPTION_STEPS)[:, None]
    view(ring.rows, "version")[:] = steps[:, None]
    for _ in steps:
        ring.publish()
    return ring


@dataclass
class Transitions:
    """The rows of a ring that may be learned from, as arrays [S, N, ...] of S vector steps of N lanes."""

    obs: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    next_obs: np.ndarray
    truncated: np.ndarray
    packed: np.ndarray  # [S, N, words + obs_size]: whole rows and their next observations

    @classmethod
    def of(cls, ring: LaneRing) -> Transitions:
        """Copies of the rows that a reader may draw now; all lanes of a step must be alike in that."""
        first, last = ring.readable()
        view, rows, after = ring.layout.view, ring.rows[first:last], ring.rows[first + 1 : last + 1]
        fine = usable(view(rows, "flags"), view(after, "flags")).all(axis=1)
        rows, next_obs = rows[fine], view(after, "obs")[fine]
        obs, action, reward = (view(rows, name) for name in ("obs", "action", "reward"))
        truncated = (view(rows, "flags") & TRUNCATED) != 0
        return cls(obs, action, reward, next_obs, truncated, np.concatenate([rows, next_obs], axis=-1))

    def __len__(self) -> int:
        return self.reward.size

    def flat(self, name: str) -> np.ndarray:
        """A field [S * N, ...], lane after lane: episodes lie in one piece."""
        values = np.ascontiguousarray(getattr(self, name).swapaxes(0, 1))
        return values.reshape(len(self), *values.shape[2:])

    def episodes(self) -> np.ndarray:
        """Number of each row's episode [S * N] int64, in the order of :meth:`flat`."""
        ended = np.cumsum(self.truncated, axis=0) - self.truncated
        return (ended + np.arange(self.truncated.shape[1]) * len(self.truncated)).T.reshape(-1).astype(np.int64)


class HandReach:
    """Ring and transitions of the task, made when they are first asked for, and what all groups draw from them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.count = args, args.updates * args.batch

    @cached_property
    def ring(self) -> LaneRing:
        """Of ``--rows`` rows."""
        return make_ring(self.args.rows, RowLayout(OBS, ACTION))

    @cached_property
    def transitions(self) -> Transitions:
        """What is in it."""
        return Transitions.of(self.ring)

    def memory(self, sampler: Sampler | None = None, relabeller: Relabeller | None = None) -> ReplayMemory:
        """A memory of its own, over the same ring."""
        return ReplayMemory([self.ring], 0, sampler, relabeller, OPTIONS)

    def sample(self, sampler: Sampler | None = None, length: int = 1, updates: int = 0) -> Call:
        """Sampling as a training step does; ``updates``: other than those of the command line."""
        return sample_arm(self.memory(sampler), updates or self.args.updates, self.args.batch, length)

    def hindsight(self) -> Call:
        """Sampling with four fifths of the goals replaced."""
        spec = EnvSpec(
            task=TASK,
            obs_size=OBS,
            action_size=ACTION,
            action_low=[-1.0] * ACTION,
            action_high=[1.0] * ACTION,
            achieved_goal=(OBSERVATION, OBSERVATION + GOAL),
            desired_goal=(OBSERVATION + GOAL, OBS),
        )
        relabeller = Relabeller(Hindsight("future", 0.8), spec, REWARD, [self.ring])
        return sample_arm(self.memory(relabeller=relabeller), self.args.updates, self.args.batch)


REWARD = goal_reward({"kind": "distance", "threshold": REACHED, "sparse": True})


# -- replay: our arms and the floor -----------------------------------------------------------------------------------


def count_rows(batch: ReplayBatch) -> int:
    """Rows that belong to a batch."""
    return batch.rows[..., 0].numel() if batch.valid is None else int(np.count_nonzero(batch.valid.numpy()))


def sample_arm(memory: ReplayMemory, updates: int, batch: int, length: int = 1) -> Call:
    """One call of the memory."""
    return lambda: count_rows(memory.sample(updates, batch, length))


def prioritized_arm(memory: ReplayMemory, updates: int, batch: int) -> Call:
    """One call of the memory, and the errors of its rows told to the sampler."""
    errors = errors_of(updates * batch)

    def call() -> int:
        drawn = memory.sample(updates, batch)
        assert drawn.places is not None
        memory.sampler.update(drawn.places, next(errors))
        return count_rows(drawn)

    return call


def errors_of(count: int, seed: int = 1) -> cycle[np.ndarray]:
    """Absolute errors [count] float32 without end; alike for all arms that ask for as many."""
    rng = np.random.default_rng(seed)
    return cycle([np.abs(rng.standard_normal(count, np.float32)) for _ in range(16)])


def gather_arm(packed: Tensor, count: int, seed: int = 2) -> Call:
    """One gather of packed rows [n, width], at places that are drawn for it, into fresh memory."""
    rng = np.random.default_rng(seed)

    def call() -> int:
        index = torch.from_numpy(rng.integers(0, len(packed), count))
        return len(torch.index_select(packed, 0, index))

    return call


def packed_noise(rows: int, width: int) -> Tensor:
    """Random rows for :func:`gather_arm`; they repeat."""
    packed = torch.empty(rows, width)
    noise = torch.from_numpy(np.random.default_rng(3).standard_normal((min(rows, CHUNK * LANES), width), np.float32))
    for start in range(0, rows, len(noise)):
        part = packed[start : start + len(noise)]
        part.copy_(noise[: len(part)])
    return packed


# -- replay: other packages -------------------------------------------------------------------------------------------


def goal_spaces(dtype: Any) -> tuple[Any, Any]:
    """The task's spaces as Gymnasium has them; its observations are float64."""
    spaces = importlib.import_module("gymnasium.spaces")
    sizes = {"observation": OBSERVATION, "achieved_goal": GOAL, "desired_goal": GOAL}
    boxes = {name: spaces.Box(-np.inf, np.inf, (size,), dtype) for name, size in sizes.items()}
    return spaces.Dict(boxes), spaces.Box(-1.0, 1.0, (ACTION,), np.float32)


def split_goals(obs: np.ndarray) -> dict[str, np.ndarray]:
    """Parts of flat observations [.., 93]."""
    parts = np.split(obs, [OBSERVATION, OBSERVATION + GOAL], axis=-1)
    return dict(zip(("observation", "achieved_goal", "desired_goal"), parts, strict=True))


class GoalEnv:
    """As much of a VecEnv as stable-baselines3's hindsight asks for."""

    num_envs = LANES

    def env_method(self, name: str, achieved: np.ndarray, desired: np.ndarray, *args: Any, **kwargs: Any) -> list[Any]:
        """Rewards of goals, the only thing that is asked for."""
        return [REWARD(achieved, desired)]


def fill_sb3(buffer: Any, rows: Transitions, convert: Callable[[np.ndarray], Any]) -> None:
    """Add all transitions, a step of all lanes at a time."""
    infos = {end: [{"TimeLimit.truncated": end}] * LANES for end in (False, True)}
    for t, done in enumerate(rows.truncated):
        info = infos[bool(done[0])]
        buffer.add(convert(rows.obs[t]), convert(rows.next_obs[t]), rows.action[t], rows.reward[t], done, info)


def sb3_uniform(task: HandReach) -> list[Call]:
    """stable-baselines3: ReplayBuffer with flat float32 observations."""
    buffers = importlib.import_module("stable_baselines3.common.buffers")
    spaces = importlib.import_module("gymnasium.spaces")
    flat = spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    buffer = buffers.ReplayBuffer(len(task.transitions), flat, goal_spaces(np.float32)[1], device="cpu", n_envs=LANES)
    fill_sb3(buffer, task.transitions, lambda obs: obs)
    return [lambda: len(buffer.sample(task.count).rewards)]


def sb3_hindsight(task: HandReach) -> list[Call]:
    """stable-baselines3: HerReplayBuffer with float32 observations, four of five goals replaced."""
    her = importlib.import_module("stable_baselines3.her.her_replay_buffer")
    buffer = her.HerReplayBuffer(
        len(task.transitions), *goal_spaces(np.float32), GoalEnv(), device="cpu", n_envs=LANES, n_sampled_goal=4,
        goal_selection_strategy="future",
    )  # fmt: skip
    fill_sb3(buffer, task.transitions, split_goals)
    return [lambda: len(buffer.sample(task.count).rewards)]


def sb3_bytes(capacity: int) -> tuple[float, float]:
    """Bytes per row of stable-baselines3's buffers for the task as it is: without and with hindsight."""
    buffers = importlib.import_module("stable_baselines3.common.buffers")
    her = importlib.import_module("stable_baselines3.her.her_replay_buffer")
    plain = buffers.DictReplayBuffer(capacity, *goal_spaces(np.float64), device="cpu", n_envs=LANES)
    hindsight = her.HerReplayBuffer(capacity, *goal_spaces(np.float64), GoalEnv(), device="cpu", n_envs=LANES)
    rows = capacity // LANES * LANES
    return array_bytes(plain) / rows, array_bytes(hindsight) / rows


def array_bytes(buffer: Any) -> int:
    """Bytes of all arrays that an object holds, by itself and in mappings."""
    found = 0
    for value in vars(buffer).values():
        arrays = value.values() if isinstance(value, dict) else [value]
        found += sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    return found


def tianshou_buffer(rows: Transitions) -> Any:
    """tianshou: ReplayBuffer."""
    data = importlib.import_module("tianshou.data")
    truncated = rows.flat("truncated")
    return data.ReplayBuffer.from_data(
        obs=rows.flat("obs"),
        act=rows.flat("action"),
        rew=rows.flat("reward"),
        terminated=np.zeros_like(truncated),
        truncated=truncated,
        done=truncated.copy(),
        obs_next=rows.flat("next_obs"),
    )


def tianshou_uniform(task: HandReach) -> list[Call]:
    """tianshou: ReplayBuffer, one call."""
    buffer = tianshou_buffer(task.transitions)
    return [lambda: len(buffer.sample(task.count)[0])]


def tianshou_prioritized(task: HandReach) -> list[Call]:
    """tianshou: PrioritizedReplayBuffer, sample and write the errors back; as many rows as ours, then one batch."""
    data = importlib.import_module("tianshou.data")

    def arm(count: int) -> Call:
        buffer = data.PrioritizedReplayBuffer(len(task.transitions), alpha=ALPHA, beta=BETA)
        buffer.update(tianshou_buffer(task.transitions))
        errors = errors_of(count)

        def call() -> int:
            batch, indices = buffer.sample(count)
            buffer.update_weight(indices, next(errors))
            return len(batch)

        return call

    return [arm(task.count), arm(task.args.batch)]


def torchrl_buffer(rows: Transitions, count: int, sampler: Any = None) -> Any:
    """torchrl: TensorDictReplayBuffer over a storage in memory."""
    data = importlib.import_module("torchrl.data")
    tensordict = importlib.import_module("tensordict")
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # it tells of each storage
    fields = {name: torch.from_numpy(rows.flat(name)) for name in ("obs", "action", "reward", "next_obs", "truncated")}
    ends = fields["truncated"][:, None]
    content = tensordict.TensorDict(
        {
            "observation": fields["obs"],
            "action": fields["action"],
            "episode": torch.from_numpy(rows.episodes()),
            "next": {
                "observation": fields["next_obs"],
                "reward": fields["reward"][:, None],
                "terminated": torch.zeros_like(ends),
                "truncated": ends,
                "done": ends.clone(),
            },
        },
        batch_size=[len(rows)],
    )
    buffer = data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(len(rows)), batch_size=count, **({} if sampler is None else {"sampler": sampler})
    )
    buffer.extend(content)
    return buffer


def torchrl_uniform(task: HandReach) -> list[Call]:
    """torchrl: uniform, one call."""
    buffer = torchrl_buffer(task.transitions, task.count)
    return [lambda: len(buffer.sample())]


def torchrl_segments(task: HandReach) -> list[Call]:
    """torchrl: SliceSampler, as many rows as ours and one batch of them, with the episodes found once and kept.

    Then one batch with the search for the episodes that is due whenever rows have arrived.
    """
    samplers = importlib.import_module("torchrl.data.replay_buffers.samplers")

    def arm(segments: int, is_cached: bool) -> Call:
        sampler = samplers.SliceSampler(slice_len=SEGMENT, traj_key="episode", cache_values=is_cached)
        buffer = torchrl_buffer(task.transitions, segments * SEGMENT, sampler)
        return lambda: len(buffer.sample())

    return [arm(task.count, True), arm(task.args.batch, True), arm(task.args.batch, False)]


# -- replay: groups ---------------------------------------------------------------------------------------------------


def measure_gather(bench: Bench, task: HandReach) -> None:
    """Uniform sampling beside the floor, and others' uniform sampling beside it."""
    packed = torch.from_numpy(task.transitions.packed.reshape(len(task.transitions), -1))
    arms = {
        "gather": gather_arm(packed, task.count),
        "uniform": task.sample(),
        "gather_single": gather_arm(packed, task.args.batch),
        "uniform_single": task.sample(updates=1),
    }
    bench.add_peer(arms, "stable-baselines3", ["sb3"], lambda: sb3_uniform(task))
    bench.add_peer(arms, "tianshou", ["tianshou"], lambda: tianshou_uniform(task))
    bench.add_peer(arms, "torchrl", ["torchrl"], lambda: torchrl_uniform(task))
    bench.run("gather", arms)


def measure_prioritized(bench: Bench, task: HandReach) -> None:
    """Priorities: sampling and writing them back."""
    updates, batch = task.args.updates, task.args.batch
    arms = {
        "prioritized": prioritized_arm(task.memory(Prioritized(ALPHA, BETA)), updates, batch),
        "prioritized_single": prioritized_arm(task.memory(Prioritized(ALPHA, BETA)), 1, batch),
    }
    bench.add_peer(arms, "tianshou", ["tianshou", "tianshou_single"], lambda: tianshou_prioritized(task))
    bench.run("prioritized", arms)


def measure_segments(bench: Bench, task: HandReach) -> None:
    """Segments of consecutive rows."""
    arms = {"segments": task.sample(length=SEGMENT), "segments_single": task.sample(length=SEGMENT, updates=1)}
    names = ["torchrl", "torchrl_single", "torchrl_uncached"]
    bench.add_peer(arms, "torchrl", names, lambda: torchrl_segments(task))
    bench.run("segments", arms)


def measure_hindsight(bench: Bench, task: HandReach) -> None:
    """Goals in hindsight."""
    arms = {"hindsight": task.hindsight()}
    bench.add_peer(arms, "stable-baselines3", ["sb3"], lambda: sb3_hindsight(task))
    bench.run("hindsight", arms)


def measure_samplers(bench: Bench, task: HandReach) -> None:
    """What our samplers cost beside our uniform one."""
    halves = [make_ring(task.args.rows // 2, task.ring.layout, seed) for seed in (4, 5)]
    arms = {
        "uniform": task.sample(),
        "two_rings": sample_arm(ReplayMemory(halves, 0), task.args.updates, task.args.batch),
        "prioritized": task.sample(Prioritized(ALPHA, BETA)),
        "by_option": task.sample(ByOption()),
        "recent": task.sample(Recent()),
        "fresh": task.sample(Fresh()),
        "mixture": task.sample(Mixture([Uniform(), Prioritized(ALPHA, BETA)], [0.5, 0.5])),
        "hindsight": task.hindsight(),
        "uniform_segments": task.sample(length=SEGMENT),
        "option_segments": task.sample(OptionSegments(), length=SEGMENT),
    }
    bench.run("samplers", arms)


def measure_growth(bench: Bench, task: HandReach) -> None:
    """A hundred times as many rows: what does a sample cost? Caches have their part in it, also in the gather's."""
    args, sizes = task.args, {"small": task.args.small_rows, "large": task.args.large_rows}
    layout, free = RowLayout(OBS, ACTION), available_memory()

    def needed() -> int:
        return sum(sizes.values()) * (2 * layout.row_bytes + 4 * layout.obs_size + SAMPLER_BYTES)

    wide = needed()
    if wide > 0.8 * free:
        layout = RowLayout(NARROW_OBS, NARROW_ACTION)
        if needed() > 0.8 * free:
            reason = f"{format_bytes(needed())} of memory needed, {format_bytes(free)} free: lower --large-rows"
            bench.leave_out("growth", reason)
            return
        bench.note(
            f"growth: {format_bytes(wide)} needed, {format_bytes(free)} free: measured with observations of "
            f"{NARROW_OBS} and actions of {NARROW_ACTION} numbers"
        )
    arms: Arms = {}
    for size, rows in sizes.items():
        ring = make_ring(rows, layout)
        memory = ReplayMemory([ring], 0, Prioritized(ALPHA, BETA))
        arms[f"uniform_{size}"] = sample_arm(ReplayMemory([ring], 0), args.updates, args.batch)
        arms[f"prioritized_{size}"] = prioritized_arm(memory, args.updates, args.batch)
        arms[f"gather_{size}"] = gather_arm(packed_noise(rows, layout.words + layout.obs_size), task.count)
    kinds = ("uniform", "prioritized", "gather")
    bench.run("growth", {name: arms[name] for name in (f"{kind}_{size}" for kind in kinds for size in sizes)})


def measure_bytes(bench: Bench, task: HandReach) -> None:
    """Memory of a row that can be learned from: what borders and the guard band take counts as well."""
    ours = task.ring.block.size / len(task.transitions)
    sizes = {
        "row": float(task.ring.layout.row_bytes),
        "ring": ours,
        "ring_hindsight": ours + EpisodeIndex.bytes_per_row * task.args.rows / len(task.transitions),
    }
    arms: Arms = {}

    def build() -> list[Call]:
        sizes.update(zip(("sb3", "sb3_hindsight"), sb3_bytes(task.args.rows), strict=True))
        return [lambda: 0, lambda: 0]

    bench.add_peer(arms, "stable-baselines3", ["sb3", "sb3_hindsight"], build)
    bench.keep_bytes("bytes", sizes)


#: Ratios of rates, but growth: of times (the small memory's rate over the large one's), and bytes: of sizes.
REPLAY_ROWS = {
    "replay/uniform_to_gather": Row(
        "gather", ("uniform", "gather"), "uniform sampling over one packed gather of as many bytes", Target(0.8, True)
    ),
    "replay/uniform_single_to_gather": Row(
        "gather", ("uniform_single", "gather_single"), "the same, one batch per call"
    ),
    "replay/sb3_to_gather": Row("gather", ("sb3", "gather"), "stable-baselines3 ReplayBuffer over the gather"),
    "replay/tianshou_to_gather": Row("gather", ("tianshou", "gather"), "tianshou ReplayBuffer over the gather"),
    "replay/torchrl_to_gather": Row("gather", ("torchrl", "gather"), "torchrl LazyTensorStorage over the gather"),
    "replay/prioritized_to_tianshou": Row(
        "prioritized", ("prioritized", "tianshou"), "sample and write back over tianshou's", Target(1.5, True)
    ),
    "replay/prioritized_single_to_tianshou": Row(
        "prioritized", ("prioritized_single", "tianshou_single"), "the same, one batch per call"
    ),
    "replay/segments_to_torchrl": Row(
        "segments", ("segments", "torchrl"), f"segments of {SEGMENT} over torchrl's SliceSampler", Target(5.0, True)
    ),
    "replay/segments_single_to_torchrl": Row(
        "segments", ("segments_single", "torchrl_single"), "the same, one batch per call"
    ),
    "replay/segments_to_torchrl_uncached": Row(
        "segments",
        ("segments_single", "torchrl_uncached"),
        "the same, and torchrl looks for the episodes at every call",
    ),
    "replay/hindsight_to_sb3": Row("hindsight", ("hindsight", "sb3"), "over stable-baselines3's HerReplayBuffer"),
    "replay/two_rings_to_uniform": Row("samplers", ("two_rings", "uniform"), "rows of two workers over those of one"),
    **{
        f"replay/{name}_to_uniform": Row("samplers", (name, "uniform"), "over our uniform sampling")
        for name in ("prioritized", "by_option", "recent", "fresh", "mixture", "hindsight")
    },
    "replay/option_segments_to_uniform": Row(
        "samplers", ("option_segments", "uniform_segments"), f"over our uniform sampling of segments of {SEGMENT}"
    ),
    "replay/growth": Row(
        "growth", ("uniform_small", "uniform_large"), "time per uniform sample, large over small", Target(1.3, False)
    ),
    "replay/prioritized_growth": Row(
        "growth", ("prioritized_small", "prioritized_large"), "the same by priority, with writing back"
    ),
    "replay/gather_growth": Row("growth", ("gather_small", "gather_large"), "the same of the packed gather"),
    "replay/bytes_per_row": Row(
        "bytes", ("ring", "row"), "memory per usable row over a row without next observation", Target(1.05, False)
    ),
    "replay/bytes_to_sb3": Row(
        "bytes", ("ring", "sb3"), "memory per row over stable-baselines3's DictReplayBuffer", Target(0.3, False)
    ),
    "replay/bytes_to_sb3_hindsight": Row(
        "bytes", ("ring_hindsight", "sb3_hindsight"), "the same with hindsight, over HerReplayBuffer"
    ),
}
REPLAY_GROUPS = (
    measure_gather, measure_prioritized, measure_segments, measure_hindsight, measure_samplers, measure_growth,
    measure_bytes,
)  # fmt: skip


def run_replay(bench: Bench) -> None:
    """All groups, one after the other."""
    keep_freed_memory()  # as in every run of the product; for all arms alike
    task = HandReach(bench.args)
    for measure in REPLAY_GROUPS:
        measure(bench, task)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the suite ``replay``."""
    parser.add_argument("--rows", type=int, default=200_000, help="stored (default: 200000)")
    parser.add_argument("--large-rows", type=int, default=5_000_000, help="of growth (default: 5000000)")
    parser.add_argument("--small-rows", type=int, default=50_000, help="of growth (default: 50000)")
    parser.add_argument("--batch", type=int, default=256, help="rows or segments of a batch (default: 256)")
    parser.add_argument("--updates", type=int, default=8, help="batches per call (default: 8)")


def check_replay_arguments(args: argparse.Namespace) -> str | None:
    """What is wrong with them."""
    for name in ("batch", "updates"):
        if getattr(args, name) < 1:
            return f"--{name} must be at least 1"
    for name in ("rows", "small_rows"):
        if getattr(args, name) < 2 * LEAST_ROWS:
            return f"--{name.replace('_', '-')} must be at least {2 * LEAST_ROWS}"
    if args.large_rows <= args.small_rows:
        return "--large-rows must exceed --small-rows"
    return None


# -- the command line -------------------------------------------------------------------------------------------------


class Suite(NamedTuple):
    """What can be measured."""

    text: str
    rows: dict[str, Row]
    run: Callable[[Bench], None]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    check: Callable[[argparse.Namespace], str | None]


SUITES = {
    "replay": Suite(
        "sampling of stored experience", REPLAY_ROWS, run_replay, add_replay_arguments, check_replay_arguments
    ),
    "collect": Suite(
        "choosing, stamping and writing of a simulator's steps",
        COLLECT_ROWS,
        run_collect,
        add_collect_arguments,
        check_collect_arguments,
    ),
    "callbacks": Suite(
        "what diagnostics cost the learner",
        CALLBACK_ROWS,
        run_callbacks,
        add_callback_arguments,
        check_callback_arguments,
    ),
}


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        """Print the line and leave with status 2."""
        self.exit(2, f"benchmark: error: {' '.join(message.split())}\n")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check."""
    parser = OneLineParser(prog="benchmark", description="Measure parts of this product beside other packages.")
    suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
    for name, suite in SUITES.items():
        one = suites.add_parser(name, help=suite.text, description=f"Measure {suite.text}.")
        one.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
        one.add_argument("--rounds", type=int, default=7, help="that count (default: 7)")
        one.add_argument("--seconds", type=float, default=1.0, help="of each arm in each round (default: 1)")
        one.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: on a busy machine (default: wall)")
        one.add_argument("--skip-peers", action="store_true", help="leave other packages out")
        suite.add_arguments(one)
    args = parser.parse_args(arguments)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if not (math.isfinite(args.seconds) and args.seconds > 0):
        parser.error("--seconds must be positive")
    if args.json is not None and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json {args.json}: not a file in a folder that exists")
    wrong = SUITES[args.suite].check(args)
    if wrong is not None:
        parser.error(wrong)
    return args


def describe_machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    import psutil

    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(folder / entry).strip() for entry in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    return {
        "system": platform.platform(),
        "processor": names[0] if names else platform.machine(),
        "caches": caches,
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def describe_versions() -> dict[str, str]:
    """Of the interpreter and all packages that take part."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def measure_suite(args: argparse.Namespace) -> Results:
    """Run a suite; its file grows with every group."""
    torch.set_num_threads(1)
    suite = SUITES[args.suite]
    settings = {name: value for name, value in vars(args).items() if name not in ("suite", "json")}
    results = Results(args.suite, settings, describe_machine(), describe_versions())
    machine = results.machine
    print(
        f"threads: {machine['threads']}; cores: {machine['cores']}; load: {machine['load'][0]}; {machine['processor']}"
    )
    print("; ".join(f"{name} {number}" for name, number in results.versions.items()), flush=True)
    suite.run(Bench(args, results, suite.rows))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    args = parse_args(arguments)
    try:
        results = measure_suite(args)
    except KeyboardInterrupt:
        print("benchmark: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"benchmark: error: {one_line(error)}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(
            f"benchmark: error: {one_line(error)}; take smaller sizes (benchmark.py {args.suite} --help)",
            file=sys.stderr,
        )
        return 1
    print("\n" + results.tables(SUITES[args.suite].rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
