"""Simulators that test this package, not policies: one whose numbers prove where they come from, one that misbehaves.

``CodedEnv`` and :func:`check_rows` belong together: what was sampled from a replay tells by itself whether it is whole.
``FaultyEnv`` wraps any other adapter and lets it crash, hang or return nonsense, by a clock or on order.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any, Dict, Iterable, List, NoReturn, Optional, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import (
    NEXT_STEP,
    SAME_STEP,
    EnvError,
    EnvSpec,
    StepResult,
    VectorEnv,
    make_env,
    resolve_class,
)

INIT_ARGS = "data.env.init_args"

#: Words of a coded observation. ``LENGTH`` and ``END`` say how the episode will end, ``ACTION`` is the first component
#: of the action that led here (0 at the beginning of an episode); all words after it are computed from these eight.
LANE, SEED, PROCESS, EPISODE, STEP, LENGTH, END, ACTION = range(8)
HEADER = 8
MIN_OBS_SIZE = HEADER + 2
BY_TERMINATION, BY_TIME_LIMIT = 1, 2

_EXACT = 1 << 24  # whole numbers below are exact in float32
#: Odd constants: products with different words overlap in all bits.
_MIX = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD,
     0xC4CEB9FE1A85EC53, 0x94D049BB133111EB, 0xBF58476D1CE4E5B9], np.uint64,
)  # fmt: skip


def _hash(words: np.ndarray, salt: int = 0) -> np.ndarray:
    """Words [..., K <= 8] int64 -> [...] uint64; one changed word changes all bits."""
    mixed = (words.astype(np.uint64) * _MIX[: words.shape[-1]]).sum(axis=-1, dtype=np.uint64)
    mixed = mixed + np.array([salt], np.uint64) * _MIX[-1]  # arrays wrap around silently, numbers of numpy warn
    for shift in (30, 27, 31):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * _MIX[1]
    return mixed ^ (mixed >> np.uint64(29))


def coded_obs(header: np.ndarray, action: np.ndarray, obs_size: int) -> np.ndarray:
    """Observations [..., O] float32 of headers [..., 7] int64 (LANE to END) and first components of actions [...]."""
    obs = np.empty(header.shape[:-1] + (obs_size,), np.float32)
    obs[..., :ACTION] = header
    obs[..., ACTION] = action
    bits = np.ascontiguousarray(obs[..., ACTION]).view(np.uint32).astype(np.int64)
    key = _hash(np.concatenate([header, bits[..., None]], axis=-1))[..., None]
    column = np.arange(HEADER, obs_size, dtype=np.uint64) * _MIX[2]
    obs[..., HEADER:] = ((key ^ column) * _MIX[0] >> np.uint64(40)).astype(np.float32)
    return obs


def coded_reward(header: np.ndarray) -> np.ndarray:
    """[..., 7] int64, header of the state that is left -> [...] float32 in [0, 1), a multiple of 1/4096."""
    return (_hash(header, salt=1) >> np.uint64(52)).astype(np.float32) / np.float32(4096.0)


def check_rows(
    obs: np.ndarray,
    next_obs: np.ndarray,
    reward: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    action: Optional[np.ndarray] = None,
    valid: Optional[np.ndarray] = None,
) -> Dict[str, int]:
    """Judge sampled transitions of a :class:`CodedEnv`; nothing but the arrays is needed.

    Args:
        obs, next_obs: [..., O] float32.
        reward, terminated, truncated: [...].
        action: [..., A] as stored beside ``obs``; None: not judged.
        valid: [...] bool, which of the transitions are meant; None: all.

    Returns:
        Numbers of transitions. ``rows``: those judged. Each of the others must be 0, but for the last:
        ``torn``: a word of ``obs`` or ``next_obs`` is not what its first words demand (parts of two rows);
        ``cross_episode``: whole, but of two lanes, processes or episodes; ``wrong_step``: of one episode, but not
        successive; ``wrong_reward``; ``wrong_action``: ``next_obs`` is the outcome of another action; ``wrong_end``:
        flagged as ended where the episode was not to end so, or not flagged where it was; ``without_final``:
        terminated, and the next observation opens another episode, which is permitted (nothing is learned from it): a
        worker was replaced after its last row.
    """
    keep = np.ones(np.shape(reward), bool) if valid is None else np.asarray(valid, bool)
    obs, next_obs = np.asarray(obs, np.float32)[keep], np.asarray(next_obs, np.float32)[keep]
    reward, terminated, truncated = (np.asarray(x)[keep] for x in (reward, terminated, truncated))
    (header, torn), (next_header, next_torn) = _decode(obs), _decode(next_obs)
    torn |= next_torn
    same = (header[:, [LANE, SEED, PROCESS, EPISODE]] == next_header[:, [LANE, SEED, PROCESS, EPISODE]]).all(axis=1)
    without_final = ~torn & ~same & terminated & (next_header[:, STEP] == 0)
    ends = header[:, STEP] + 1 == header[:, LENGTH]
    wrong_end = (terminated != (ends & (header[:, END] == BY_TERMINATION))) | (
        truncated != (ends & (header[:, END] == BY_TIME_LIMIT))
    )
    wrong_action = np.zeros(len(obs), bool)
    if action is not None:
        wrong_action = same & (np.asarray(action, np.float32)[keep][:, 0] != next_obs[:, ACTION])
    found = {
        "torn": torn,
        "cross_episode": ~torn & ~same & ~without_final,
        "wrong_step": ~torn & same & (next_header[:, STEP] != header[:, STEP] + 1),
        "wrong_reward": ~torn & (reward != coded_reward(header)),
        "wrong_action": ~torn & wrong_action,
        "wrong_end": ~torn & wrong_end,
        "without_final": without_final,
    }
    return {"rows": len(obs), **{name: int(mask.sum()) for name, mask in found.items()}}


def _decode(obs: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Observations [M, O] -> headers [M, 7] int64, and which are not what their header demands [M] bool."""
    words = obs[:, :ACTION]
    with np.errstate(invalid="ignore"):
        header = np.where(np.isfinite(words) & (np.abs(words) < _EXACT), words, 0.0).astype(np.int64)
    return header, (obs != coded_obs(header, obs[:, ACTION], obs.shape[1])).any(axis=1)


class CodedEnv(VectorEnv):
    """Every number of every row says where it comes from, so that :func:`check_rows` can prove that rows are whole.

    Observation [N, O]: lane, seed and number of the process, number of the episode, step in it, its length and way of
    ending, the action that led here, and a filling that is computed from these: whole numbers (and one action) that
    float32 holds exactly. The reward is a code of the state that is left. Episodes have ``min_length`` to
    ``max_length`` steps, half of them end by termination (then the step is a success), half by their time limit. Lanes
    of all workers differ: a worker's seed is part of their rows, and a process that takes another's place has both
    another seed and another number.

    Args:
        task: ``coded``; there is no other.
        num_envs: N.
        seed: of lengths and ends; the same for each reset.
        obs_size: O, at least 10. In large rows a reader that races with the writer shows sooner.
        action_size: A.
        min_length, max_length: bounds of the episodes' lengths.
        autoreset: ``next_step``, or ``same_step`` with true final observations.
        step_seconds: sleep per vector step; can be changed while it runs.
        compute_seconds: processor time that each environment step takes besides, as a simulator's does.
        mark_process: whether rows hold the number of their process; without it equal seeds give equal rows.
        states_size: S; states are the first S numbers of their observation with the other sign.

    Raises:
        EnvError: another task, or settings out of range.
    """

    def __init__(
        self,
        task: str = "coded",
        num_envs: int = 1,
        seed: int = 0,
        obs_size: int = 16,
        action_size: int = 2,
        min_length: int = 1,
        max_length: int = 40,
        autoreset: str = NEXT_STEP,
        step_seconds: float = 0.0,
        mark_process: bool = True,
        states_size: int = 0,
        compute_seconds: float = 0.0,
    ) -> None:
        if task != "coded":
            raise EnvError("%s.task: CodedEnv has the task 'coded' alone, not '%s'" % (INIT_ARGS, task))
        if obs_size < MIN_OBS_SIZE:
            raise EnvError("%s.obs_size: must be at least %d, not %d" % (INIT_ARGS, MIN_OBS_SIZE, obs_size))
        if action_size < 1 or num_envs < 1:
            raise EnvError("%s.action_size and data.envs_per_worker: must be at least 1" % INIT_ARGS)
        if not 0 <= states_size <= obs_size:
            raise EnvError("%s.states_size: must lie in 0 to obs_size, not %d" % (INIT_ARGS, states_size))
        if not 1 <= min_length <= max_length < _EXACT:
            raise EnvError("%s.min_length: must be at least 1 and at most max_length" % INIT_ARGS)
        if autoreset not in (NEXT_STEP, SAME_STEP):
            raise EnvError("%s.autoreset: next_step or same_step, not '%s'" % (INIT_ARGS, autoreset))
        self.num_envs = num_envs
        self._lengths = (min_length, max_length)
        self._step_seconds = self._checked_seconds("step_seconds", step_seconds)
        self._compute_seconds = self._checked_seconds("compute_seconds", compute_seconds)
        self.spec = EnvSpec(
            task=task,
            obs_size=obs_size,
            action_size=action_size,
            action_low=[-1.0] * action_size,
            action_high=[1.0] * action_size,
            max_episode_steps=max_length,
            states_size=states_size,
            autoreset=autoreset,
        )
        self._header = np.zeros((num_envs, ACTION), np.int64)
        self._header[:, LANE] = np.arange(num_envs)
        self._header[:, SEED] = seed % _EXACT
        self._header[:, PROCESS] = os.getpid() % _EXACT if mark_process else 0
        self._header[:, EPISODE] = -1
        self._over = np.zeros(num_envs, bool)
        self._states: Optional[np.ndarray] = None

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """See :meth:`VectorEnv.reset`."""
        if seed is not None:
            self._header[:, SEED] = seed % _EXACT
        self._over[:] = False
        self._open(np.ones(self.num_envs, bool))
        obs = self._obs(np.zeros(self.num_envs, np.float32))
        self._states = self._states_of(obs)
        return obs

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`."""
        if self._step_seconds > 0:
            time.sleep(self._step_seconds)
        until = time.thread_time() + self._compute_seconds * self.num_envs
        while self._compute_seconds > 0 and time.thread_time() < until:
            pass
        border = self._over.copy()
        reward = coded_reward(self._header)
        reward[border] = 0.0
        self._header[:, STEP] += 1
        self._open(border)
        led = np.where(border, 0.0, action[:, 0]).astype(np.float32)
        done = ~border & (self._header[:, STEP] == self._header[:, LENGTH])
        by_termination = self._header[:, END] == BY_TERMINATION
        obs, final_obs, has_final = self._obs(led), None, None
        if self.spec.autoreset == SAME_STEP:
            final_obs, has_final = obs, done
            self._open(done)
            obs = self._obs(np.where(done, 0.0, led).astype(np.float32))
        else:
            self._over = done.copy()
        self._states = self._states_of(obs)
        return StepResult(
            obs=obs,
            reward=reward,
            terminated=done & by_termination,
            truncated=done & ~by_termination,
            final_obs=final_obs,
            has_final_obs=has_final,
            is_border=border,
            info={"success": (done & by_termination).astype(np.float32)},
            states=self._states,
            final_states=None if final_obs is None else self._states_of(final_obs),
        )

    def states(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.states`."""
        return self._states

    def _states_of(self, obs: np.ndarray) -> Optional[np.ndarray]:
        return -obs[:, : self.spec.states_size] if self.spec.states_size else None

    def configure(self, **settings: Any) -> None:
        """See :meth:`VectorEnv.configure`: ``step_seconds``."""
        if sorted(settings) != ["step_seconds"]:
            super().configure(**settings)
        self._step_seconds = self._checked_seconds("step_seconds", settings["step_seconds"])

    @staticmethod
    def _checked_seconds(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < 3600.0:
            raise EnvError("%s.%s: must be a number of seconds, not %r" % (INIT_ARGS, name, value))
        return float(value)

    def _open(self, lanes: np.ndarray) -> None:
        """Begin new episodes in the lanes [N] bool."""
        header = self._header
        header[lanes, EPISODE] += 1
        header[lanes, STEP] = 0
        plan = _hash(header[:, : EPISODE + 1], salt=2)
        least, most = self._lengths
        lengths = least + (plan % np.uint64(most - least + 1)).astype(np.int64)
        ends = np.where((plan >> np.uint64(40)) & np.uint64(1), BY_TERMINATION, BY_TIME_LIMIT)
        header[lanes, LENGTH], header[lanes, END] = lengths[lanes], ends[lanes]

    def _obs(self, action: np.ndarray) -> np.ndarray:
        return coded_obs(self._header, action, self.spec.obs_size)


# -- faults -----------------------------------------------------------------------------------------------------------

#: What :class:`FaultyEnv` can do. The first ones act on what a step returns, the others happen before the step.
IN_RESULTS = ("nan_obs", "inf_obs", "nan_reward", "wrong_shape", "wrong_dtype")
AT_RESETS = ("nan_reset",)
BEFORE_STEPS = ("raise", "exit", "quit", "hang", "hang_gil", "print", "slow")
FAULTS = IN_RESULTS + AT_RESETS + BEFORE_STEPS

_NOISE = b'{"kind": "ready"}\n{"kind": "error", "message": "printed"}\nnot json \x00\xff\xfe\x80 without an end'


class FaultyEnv(VectorEnv):
    """Another adapter that misbehaves: a simulator as it is on a bad day.

    Faults: ``nan_obs``, ``inf_obs``, ``nan_reward`` (one lane, for one step), ``wrong_shape``, ``wrong_dtype`` (of the
    observations, against the contract), ``nan_reset`` (one lane's first observation), ``raise`` (RuntimeError),
    ``exit`` (the process ends at once, status 3), ``quit`` (``sys.exit(0)``), ``hang`` (sleeps for ever), ``hang_gil``
    (the same in C, so that no other thread of the process runs either), ``print`` (a megabyte of text, JSON and
    garbage on standard output), ``slow`` (twenty steps take ten times as long).

    Args:
        task: ignored; the task is the wrapped adapter's.
        num_envs: N.
        seed: of the wrapped adapter.
        adapter: class path of the wrapped adapter. (Not a nested ``class_path``: the command would build that itself.)
        adapter_args: its arguments.
        faults: by kind, mean seconds between two of them (a number; moments are random), or the vector steps at which
            they happen (a list; steps count from 1, ``nan_reset`` counts resets, and 0 is the building of the
            simulator). Each process counts for itself.
        fault_seed: of the random moments, together with ``seed``.
        orders: folder in which whoever puts a file of the name of a fault (``<kind>`` or ``<kind>.<anything>``) gets
            one; the file is removed.
        record: file to which each fault is appended before it happens, as a line of JSON: ``kind``, ``time`` (of the
            monotonic clock of the machine), ``pid``, ``step``.

    Raises:
        EnvError: unknown faults, or whatever the wrapped adapter raises.
    """

    @classmethod
    def import_first(cls, init_args: Dict[str, Any]) -> None:
        """What the wrapped adapter imports before torch."""
        if init_args.get("adapter"):  # else the constructor says so
            wrapped: Any = resolve_class(init_args["adapter"])
            wrapped.import_first(dict(init_args.get("adapter_args") or {}))

    def __init__(
        self,
        task: str = "",
        num_envs: int = 1,
        seed: int = 0,
        adapter: str = "",
        adapter_args: Optional[Dict[str, Any]] = None,
        faults: Optional[Dict[str, Any]] = None,
        fault_seed: int = 0,
        orders: Optional[str] = None,
        record: Optional[str] = None,
    ) -> None:
        if not adapter:
            raise EnvError("%s.adapter: give the class path of the adapter to wrap" % INIT_ARGS)
        self._orders, self._record = orders, record
        self._rng = np.random.default_rng([abs(fault_seed), abs(seed)])
        self._every: Dict[str, float] = {}
        self._at: Dict[str, List[int]] = {}
        for kind, when in (faults or {}).items():
            self._add(kind, when)
        self._steps = self._resets = self._slow_left = 0
        self._due = {kind: time.monotonic() + self._rng.exponential(mean) for kind, mean in self._every.items()}
        self._happen(kind for kind in BEFORE_STEPS if 0 in self._at.get(kind, ()))
        self.env = make_env(adapter, dict(adapter_args or {}), num_envs, seed)
        self.num_envs, self.spec = self.env.num_envs, self.env.spec

    def _add(self, kind: str, when: Any) -> None:
        if kind not in FAULTS:
            raise EnvError("%s.faults: no fault '%s'; there are %s" % (INIT_ARGS, kind, ", ".join(FAULTS)))
        if isinstance(when, (list, tuple)):
            self._at[kind] = [int(step) for step in when]
        elif isinstance(when, (int, float)) and not isinstance(when, bool) and when > 0:
            self._every[kind] = float(when)
        else:
            raise EnvError("%s.faults.%s: give mean seconds or a list of steps, not %r" % (INIT_ARGS, kind, when))

    def reset(self, seed: Optional[int] = None) -> np.ndarray:
        """See :meth:`VectorEnv.reset`."""
        self._resets += 1
        obs = self.env.reset(seed)
        if self._is_due("nan_reset", self._resets) or "nan_reset" in self._ordered(AT_RESETS):
            self._note("nan_reset")
            obs = _spoilt(obs, self._lane(), np.nan)
        return obs

    def step(self, action: np.ndarray) -> StepResult:
        """See :meth:`VectorEnv.step`."""
        self._steps += 1
        kinds = BEFORE_STEPS + IN_RESULTS
        ordered = self._ordered(kinds)
        due = [kind for kind in kinds if kind in ordered or self._is_due(kind, self._steps)]
        self._happen(kind for kind in due if kind in BEFORE_STEPS)
        started = time.monotonic()
        result = self.env.step(action)
        if self._slow_left > 0:
            self._slow_left -= 1
            time.sleep(9.0 * (time.monotonic() - started))
        for kind in due:
            if kind in IN_RESULTS:
                self._note(kind)
                result = self._spoil(kind, result)
        return result

    def states(self) -> Optional[np.ndarray]:
        """See :meth:`VectorEnv.states`."""
        return self.env.states()

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray) -> np.ndarray:
        """See :meth:`VectorEnv.compute_reward`."""
        return self.env.compute_reward(achieved_goal, desired_goal)

    def configure(self, **settings: Any) -> None:
        """See :meth:`VectorEnv.configure`."""
        self.env.configure(**settings)

    def close(self) -> None:
        """See :meth:`VectorEnv.close`."""
        self.env.close()

    # -- when ---------------------------------------------------------------------------------------------------

    def _is_due(self, kind: str, count: int) -> bool:
        if kind in self._due and time.monotonic() >= self._due[kind]:
            self._due[kind] = time.monotonic() + self._rng.exponential(self._every[kind])
            return True
        return count in self._at.get(kind, ())

    def _ordered(self, kinds: Tuple[str, ...]) -> List[str]:
        """Take the orders for the given kinds; of several processes one gets each."""
        found: List[str] = []
        for name in os.listdir(self._orders) if self._orders else ():
            kind = name.split(".")[0]
            if kind in kinds:
                try:
                    os.unlink(os.path.join(str(self._orders), name))
                except OSError:
                    continue  # another process was faster
                found.append(kind)
        return found

    # -- what ---------------------------------------------------------------------------------------------------

    def _lane(self) -> int:
        return int(self._rng.integers(self.num_envs))

    def _note(self, kind: str) -> None:
        if self._record:
            entry = {"kind": kind, "time": time.monotonic(), "pid": os.getpid(), "step": self._steps}
            with open(self._record, "ab", buffering=0) as file:  # one write: lines of several processes stay whole
                file.write(json.dumps(entry).encode() + b"\n")

    def _happen(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            self._note(kind)
            if kind == "raise":
                raise RuntimeError("fault 'raise' in step %d" % self._steps)
            if kind == "exit":
                os._exit(3)
            if kind == "quit":
                sys.exit(0)
            if kind == "hang":
                _hang()
            if kind == "hang_gil":
                _hang_with_the_interpreter()
            if kind == "print":
                _flood()
            if kind == "slow":
                self._slow_left += 20

    def _spoil(self, kind: str, result: StepResult) -> StepResult:
        if kind == "nan_reward":
            return result._replace(reward=_spoilt(result.reward, self._lane(), np.nan))
        if kind == "wrong_shape":
            return result._replace(obs=result.obs[:, :-1])
        if kind == "wrong_dtype":
            return result._replace(obs=result.obs.astype(np.float64))
        return result._replace(obs=_spoilt(result.obs, self._lane(), np.nan if kind == "nan_obs" else np.inf))


def _spoilt(array: np.ndarray, lane: int, value: float) -> np.ndarray:
    array = array.copy()
    array[lane] = value
    return array


def _hang() -> NoReturn:
    while True:
        time.sleep(3600.0)


def _hang_with_the_interpreter() -> NoReturn:
    libc = ctypes.PyDLL(None)  # calls through it keep the interpreter's lock
    while True:
        libc.pause()


def _flood() -> None:
    for _ in range(1 + (1 << 20) // len(_NOISE)):
        os.write(1, _NOISE)
