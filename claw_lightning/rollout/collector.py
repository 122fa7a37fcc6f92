"""The loop that every worker runs: pull parameters, act, step, write. Lock-step mode runs it in-process."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import numpy as np

from claw_lightning.rollout import control as phases
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.envs.base import ContractError, StepResult, VectorEnv
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.recorder import Recorder
from claw_lightning.rollout.ring import (
    BORDER,
    BY_CAP,
    FIRST,
    HAS_FINAL,
    QUARANTINED,
    SWITCHED,
    TERMINATED,
    TRUNCATED,
    LaneRing,
)
from claw_lightning.rollout.stamp import Stamp, all_finite

#: Vector steps in a row without finite numbers after which a lane of a task without a time limit counts as broken.
BROKEN_LIMIT = 1000


class Episode(NamedTuple):
    """A finished episode: undiscounted return, length in steps, success at its last step (nan: task has none)."""

    ret: float
    length: int
    success: float


class EpisodeTracker:
    """Accumulates returns of N lanes and hands out finished episodes. Border steps do not count."""

    def __init__(self, num_lanes: int) -> None:
        self.returns = np.zeros(num_lanes, np.float64)
        self.lengths = np.zeros(num_lanes, np.int64)

    def update(self, reward: np.ndarray, done: np.ndarray, border: np.ndarray, success: Any) -> List[Any]:
        """Add one vector step; returns (lane, Episode) of lanes that ended. A return may be no number."""
        counted = ~border
        self.returns += np.where(counted, reward, 0.0)
        self.lengths += counted
        finished = []
        for lane in np.flatnonzero(done & counted):
            solved = float(success[lane]) if success is not None else float("nan")
            finished.append((int(lane), Episode(float(self.returns[lane]), int(self.lengths[lane]), solved)))
            self.returns[lane], self.lengths[lane] = 0.0, 0
        return finished


def seen(env: VectorEnv, obs: np.ndarray) -> Any:
    """What the policy acts on: the observation on the simulator's device where it deals in tensors, else the array."""
    return obs if env.obs_on_device is None else env.obs_on_device


class Puller:
    """Adopts new parameters from a mailbox into an agent."""

    def __init__(self, mailbox: Mailbox, agent: OptionAgent, control: Control) -> None:
        self.mailbox, self.agent, self.control = mailbox, agent, control
        self._sequence = 0

    @property
    def has_pulled(self) -> bool:
        """Whether parameters were adopted at all."""
        return self._sequence > 0

    @property
    def has_mail(self) -> bool:
        """Whether there are newer parameters."""
        return self.mailbox.sequence > self._sequence

    def pull(self) -> bool:
        """Adopt newer parameters if there are any; never waits."""
        letter = self.mailbox.read(self._sequence)
        if letter is None:
            return False
        self._sequence, version, values = letter
        self.agent.load(values, version)
        self.control.version = version
        return True


class Collector:
    """Steps one vector environment and writes every step into the ring.

    Args:
        on_episodes: called with a list of finished :class:`Episode`.
        pull_every: vector steps between looks into the mailbox.
    """

    def __init__(
        self,
        env: VectorEnv,
        agent: OptionAgent,
        ring: LaneRing,
        mailbox: Mailbox,
        control: Control,
        on_episodes: Callable[[List[Episode]], None],
        seed: int,
        pull_every: int = 1,
    ) -> None:
        self.env, self.agent, self.ring, self.control = env, agent, ring, control
        self.puller = Puller(mailbox, agent, control)
        self.on_episodes, self.seed, self.pull_every = on_episodes, seed, max(1, pull_every)
        self.tracker = EpisodeTracker(env.num_envs)
        self.steps = 0
        self._obs: Optional[np.ndarray] = None
        self._states: Optional[np.ndarray] = None
        self._image: Optional[np.ndarray] = None
        self._stamp = Stamp(ring.layout, env.num_envs)
        #: Vector steps in a row with numbers that are not finite, per lane.
        self._broken = np.zeros(env.num_envs, np.int64)
        self._patience = env.spec.max_episode_steps + 2 if env.spec.max_episode_steps > 0 else BROKEN_LIMIT

    def reset(self) -> None:
        """Open new episodes in all lanes. Their first-step flags keep anything from crossing into them."""
        self.control.beat(phases.RESET)
        obs = self._checked(self.env.reset(self.seed), (self.env.num_envs, self.env.spec.obs_size), "observation")
        image = self.env.image()
        self._check_image(image)
        self._keep(obs, self.env.states(), image)
        self._first = np.ones(self.env.num_envs, bool)

    @property
    def is_between_episodes(self) -> bool:
        """Whether the next step opens an episode in every lane."""
        return self._obs is None or bool(self._first.all())

    def take_over(self, other: Collector) -> None:
        """Go on in place of another collector with the same agent, in new episodes."""
        self.steps, self.puller = other.steps, other.puller

    def retrace(self, actions: Sequence[np.ndarray], changes: Dict[int, List[Dict[str, Any]]], known: int = 0) -> bool:
        """Bring a new simulator to where another one was that took these actions, the last of them in the newest step.

        Nothing is written into the ring but the observation that the next action is chosen on.

        Args:
            actions: [N, A] each, since all lanes began an episode.
            changes: settings of the simulator, by the step before which they were changed.
            known: first step that the ring holds.

        Returns:
            Whether all observations, states and rewards that the ring holds came out the same to the bit.
        """
        ring, view = self.ring, self.ring.layout.view
        if not actions:
            return True  # not even begun: the first step does
        self.control.beat(phases.RESET)
        obs = self._checked(self.env.reset(self.seed), (self.env.num_envs, self.env.spec.obs_size), "observation")
        states, image, first = self.env.states(), self.env.image(), np.ones(self.env.num_envs, bool)
        begin = ring.head - len(actions)
        for step, action in enumerate(actions, begin):
            for settings in changes.get(step, ()):
                self.env.configure(**settings)
            self.control.beat(phases.STEP)
            rows = ring.rows[step % ring.num_steps]
            is_stored = step >= max(known, ring.head - ring.num_steps + 1)
            if is_stored and view(rows, "obs").tobytes() != obs.tobytes():
                return False
            if is_stored and states is not None and view(rows, "states").tobytes() != states.tobytes():
                return False
            result = self.env.step(np.nan_to_num(action))
            self._check(result)
            if is_stored and view(rows, "reward").tobytes() != result.reward.tobytes():
                return False
            done = (result.terminated | result.truncated) & ~result.is_border
            self.tracker.update(result.reward, done, result.is_border, result.info.get("success"))
            self._count_broken(~all_finite(obs, action, result.reward[:, None], states))
            first = done if ring.layout.has_finals else result.is_border.copy()
            obs, states, image = result.obs, result.states, result.image
        for settings in changes.get(ring.head, ()):
            self.env.configure(**settings)
        self._first = first
        self._keep(obs, states, image)
        return True

    def _keep(self, obs: np.ndarray, states: Optional[np.ndarray], image: Optional[np.ndarray]) -> None:
        """Keep what the next action is chosen on until its row is complete: a simulator may write over its buffers."""
        layout = self.ring.layout
        if layout.states_size:
            states = self._checked(states, (self.env.num_envs, self.env.spec.states_size), "states")
        if self.env.reuses_buffers:
            obs, states = obs.copy(), None if states is None else states.copy()
        self._obs, self._states = obs, states if layout.states_size else None
        if layout.image_size:
            assert image is not None  # checked
            self.ring.write_images(image)
            # Pixels can be seen in the row; compressed, it holds nothing that could be seen.
            rows = self.ring.slot()
            self._image = image.copy() if layout.has_arena else layout.view(rows, "image").reshape(image.shape)

    def step(self) -> None:
        """One vector step: pull, act, simulate, publish."""
        if self._obs is None:
            self.reset()
        timers = self.control.timers
        started = time.perf_counter()
        self.control.beat(phases.PULL)
        if self.steps % self.pull_every == 0:
            self.puller.pull()
        self.steps += 1
        pulled = time.perf_counter()
        assert self._obs is not None
        decision = self.agent.act(seen(self.env, self._obs), self._first, self._image)
        inferred = time.perf_counter()
        self._stamp_decision(decision)
        self.control.beat(phases.STEP)
        # The stamp keeps what was chosen, which is then quarantined.
        is_finite = np.isfinite(decision.action.sum())
        result = self.env.step(decision.action if is_finite else np.nan_to_num(decision.action))
        self._check(result)
        simulated = time.perf_counter()
        self._write_result(decision, result)
        self._finish(result)
        written = time.perf_counter()
        timers += (simulated - inferred, inferred - pulled, written - simulated, pulled - started, 0.0)

    def _stamp_decision(self, decision: Any) -> None:
        """Before the step: what the simulator does to the actions that it is given must not change the rows."""
        stamp = self._stamp
        stamp["action"][:] = decision.action
        stamp["log_prob_action"][:] = decision.log_prob_action
        stamp["log_prob_option"][:] = decision.log_prob_option
        stamp["option"][:] = decision.option
        stamp["previous_option"][:] = decision.previous_option
        stamp["option_age"][:] = decision.age
        stamp["version"][:] = self.agent.version

    def _write_result(self, decision: Any, result: StepResult) -> None:
        """Complete the rows and publish them."""
        ring, stamp, n = self.ring, self._stamp, self.env.num_envs
        assert self._obs is not None
        stamp["reward"][:] = result.reward
        flags = np.zeros(n, np.int8)  # eight times narrower than sums of plain integers are
        for mask, bit in (
            (result.terminated, TERMINATED), (result.truncated, TRUNCATED), (self._first, FIRST),
            (result.is_border, BORDER), (decision.switched, SWITCHED), (decision.by_cap, BY_CAP),
        ):  # fmt: skip
            flags |= mask.view(np.int8) * np.int8(bit)
        flags = flags.astype(np.int32)
        bad = ~all_finite(self._obs, self._states, stamp.floats)
        if bad.any():
            flags[bad] |= QUARANTINED
            self.control.add_quarantined(int(bad.sum()))
        self._count_broken(bad)
        if ring.layout.has_finals:
            indices = np.full(n, -1, np.int32)
            if result.has_final_obs is not None and result.has_final_obs.any():
                lanes = np.flatnonzero(result.has_final_obs)
                assert result.final_obs is not None  # checked
                finals = result.final_obs[lanes]
                if ring.layout.states_size:
                    assert result.final_states is not None  # checked
                    finals = np.concatenate([finals, result.final_states[lanes]], axis=1)
                indices[lanes] = ring.write_finals(finals)
                flags[lanes] |= HAS_FINAL
                broken = lanes[~all_finite(finals)]
                self.control.add_quarantined(int(((flags[broken] & QUARANTINED) == 0).sum()))
                flags[broken] |= QUARANTINED
            stamp["final_index"][:] = indices
        stamp["flags"][:] = flags
        stamp.write(ring.slot(), self._obs, self._states)
        ring.publish()

    def _finish(self, result: Any) -> None:
        done = (result.terminated | result.truncated) & ~result.is_border
        episodes = self.tracker.update(result.reward, done, result.is_border, result.info.get("success"))
        if episodes:
            self.on_episodes([episode for _, episode in episodes])
        # Next-step autoreset opens an episode after the border step, same-step autoreset right after the end.
        # (a copy: the simulator may write over its own before the flags of the next row are made)
        self._first = done if self.ring.layout.has_finals else result.is_border.copy()
        self._keep(result.obs, result.states, result.image)

    @staticmethod
    def _checked(array: Any, shape: Any, what: str, dtype: Any = np.float32) -> np.ndarray:
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != dtype:
            is_array = isinstance(array, np.ndarray)
            got = "of shape %s %s" % (array.shape, array.dtype) if is_array else "as %s" % type(array).__name__
            raise ContractError(
                "the simulator returned %s %s, expected %s %s" % (what, got, shape, np.dtype(dtype).name)
            )
        return array

    def _check_image(self, image: Any) -> None:
        if self.env.spec.image_shape is not None:
            self._checked(image, (self.env.num_envs, *self.env.spec.image_shape), "image", np.uint8)

    def _check(self, result: StepResult) -> None:
        """Hold a step against the contract: what is of another shape must not be spread over rows by broadcasting.

        Raises:
            ContractError: names the array, its shape and dtype, and what was expected.
        """
        n = self.env.num_envs
        shape = (n, self.env.spec.obs_size)
        for value, kind, what in ((result, StepResult, "the step"), (getattr(result, "info", {}), dict, "info")):
            if not isinstance(value, kind):
                raise ContractError(
                    "the simulator returned %s as %s, expected %s" % (what, type(value).__name__, kind.__name__)
                )
        self._checked(result.obs, shape, "observation")
        self._check_image(result.image)
        self._checked(result.reward, (n,), "reward")
        for name in ("terminated", "truncated", "is_border"):
            self._checked(getattr(result, name), (n,), name, np.bool_)
        if self.ring.layout.has_finals and result.has_final_obs is not None:
            self._checked(result.has_final_obs, (n,), "has_final_obs", np.bool_)
            if result.has_final_obs.any():
                self._checked(result.final_obs, shape, "final_obs")
                if self.ring.layout.states_size:
                    self._checked(result.final_states, (n, self.ring.layout.states_size), "final_states")
        success = result.info.get("success")
        if success is not None and (np.shape(success) != (n,) or np.asarray(success).dtype.kind not in "biuf"):
            raise ContractError(
                "the simulator returned success of shape %s %s, expected (%d,) numbers"
                % (np.shape(success), np.asarray(success).dtype, n)
            )

    def _count_broken(self, bad: np.ndarray) -> None:
        """Give up a simulator one of whose lanes does not come back to numbers: it would be quarantined for ever.

        Raises:
            ContractError: a lane has given none for longer than an episode lasts.
        """
        if not bad.any() and not self._broken.any():
            return
        self._broken = np.where(bad, self._broken + 1, 0)
        if self._broken.max() > self._patience:
            lane = int(self._broken.argmax())
            raise ContractError(
                "lane %d has had numbers that are not finite for %d steps; the simulator has broken down"
                % (lane, self._broken[lane])
            )


def evaluate(
    env: VectorEnv,
    agent: OptionAgent,
    episodes: int,
    seed: int,
    control: Control,
    student: bool = False,
    recorder: Optional[Recorder] = None,
) -> Dict[str, Any]:
    """Play noise-free episodes; every lane contributes equally many, so that short episodes are not over-counted.

    Returns ``return``, ``length``, ``success`` (empty where the task has none) of ``episodes`` episodes, and
    ``option`` with the share of steps of each option.
    With ``student`` the policy's flat student plays. A ``recorder`` keeps every step; then what its ``save`` tells of
    images is returned too.
    """
    agent.use_student = student
    agent.draws_options = recorder is not None and recorder.draws_options
    agent.reseed(seed)  # an evaluation depends on policy and seed alone, not on those before it
    lanes = env.num_envs
    quota = np.full(lanes, episodes // lanes)
    quota[: episodes % lanes] += 1
    tracker = EpisodeTracker(lanes)
    control.beat(phases.RESET)
    obs, first = env.reset(seed), np.ones(lanes, bool)
    image, states = env.image(), env.states() if recorder is not None else None
    done = np.zeros(lanes, bool)
    results: List[Episode] = []
    usage = np.zeros(agent.num_options)
    same_step = env.spec.autoreset == "same_step"
    while quota.any():
        control.beat(phases.EVALUATE)
        if control.stop:
            break
        decision = agent.act(seen(env, obs), first, image)
        if recorder is not None:  # the step after an end belongs to no episode; same-step autoreset has none
            recorder.look((quota > 0) & (same_step | ~done))
            # A simulator may write over its own.
            obs, image, states = obs.copy(), *(None if each is None else each.copy() for each in (image, states))
        result = env.step(decision.action)
        counted = (quota > 0) & ~result.is_border
        if recorder is not None:
            recorder.add(obs, image, decision, result, counted, states)
        usage += np.bincount(decision.option[counted], minlength=agent.num_options)
        done = (result.terminated | result.truncated) & ~result.is_border
        for lane, episode in tracker.update(result.reward, done, result.is_border, result.info.get("success")):
            if quota[lane] > 0:
                quota[lane] -= 1
                if np.isfinite(episode.ret):
                    results.append(episode)
        first = done if same_step else result.is_border
        obs, image, states = result.obs, result.image, result.states
    success = [e.success for e in results if np.isfinite(e.success)]
    recorded = {} if recorder is None else recorder.save()
    return {
        **recorded,
        "return": [e.ret for e in results],
        "length": [float(e.length) for e in results],
        "success": success,
        "option": [float(u) for u in usage / max(1.0, usage.sum())],
    }
