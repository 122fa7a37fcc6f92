"""OptionAgent: the policy as an option machine over N lanes: terminate, re-select, act, cap."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Union

import numpy as np
import torch

from claw_lightning.rollout.distributions import squashed_gaussian_log_prob
from claw_lightning.rollout.forward import make_forward
from claw_lightning.rollout.networks import Policy, build_policy
from claw_lightning.rollout.noise import GaussianNoise, OrnsteinUhlenbeckNoise, lane_scales


class Decision(NamedTuple):
    """What the agent did at one vector step; all arrays [N] unless noted, int32 / float32 / bool."""

    action: np.ndarray  # [N, A] in [-1, 1]
    option: np.ndarray
    previous_option: np.ndarray  # -1 at first steps
    age: np.ndarray  # steps since the option began; 0 where it was selected now
    switched: np.ndarray
    by_cap: np.ndarray
    log_prob_action: np.ndarray  # of stochastic actors, uniform actions included; 0 for deterministic ones
    log_prob_option: np.ndarray  # log p_hat(o | s, previous option), log pi_Omega at first steps


class OptionAgent:
    """Acts with a local copy of the policy.

    At each step of a running option o the agent ends it with probability ``beta_o(s)``, but not before
    ``min_option_duration`` and always at ``max_option_duration`` (0: no cap), then draws from ``pi_Omega(.|s)``. The
    cap is behaviour only: targets keep the learned beta.

    Args:
        policy: plain settings of :class:`Policy`.
        num_lanes: N.
        exploration: ``kind`` (``gaussian``, ``ornstein_uhlenbeck``, ``none``), ``scale_min``, ``scale_max`` (spread
            over all lanes of all workers, fraction of the action range's half width).
        evaluate: noise-free: mean actions, options by ``greedy_options`` (end where beta > 1/2, take the likeliest).
        interruption: margin; in evaluation an option also ends where Q_Omega(s, o) + c + margin < V(s), whatever beta
            says (:meth:`Policy.option_values`; c is :attr:`Policy.switch_cost`). None: never.
        device: where the networks are evaluated. Random draws, and all that is handed out, are on the CPU.

    Attributes:
        use_student: act with the policy's flat student in place of the options.
        draws_options: in evaluation, end and choose options by chance as in training, whatever ``greedy_options`` says.
    """

    def __init__(
        self,
        policy: Dict[str, Any],
        num_lanes: int,
        seed: int,
        max_option_duration: int = 0,
        min_option_duration: int = 1,
        exploration: Optional[Dict[str, Any]] = None,
        worker: int = 0,
        num_workers: int = 1,
        evaluate: bool = False,
        greedy_options: bool = True,
        interruption: Optional[float] = None,
        device: str = "cpu",
    ) -> None:
        with torch.inference_mode(False):  # Lightning evaluates in that mode, whose tensors count no versions
            self.policy: Policy = build_policy(policy).to(device)
        self.policy.eval()
        self.forward = make_forward(self.policy, torch.device(device))
        self.num_lanes = num_lanes
        self._lanes = np.arange(num_lanes)
        self.num_options = self.policy.num_options
        self.max_duration, self.min_duration = max_option_duration, min_option_duration
        self.evaluate, self.greedy_options = evaluate, greedy_options
        self.interruption = interruption
        self.use_student = self.draws_options = False
        self.version = 0
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)
        actor = self.policy.actor
        action_size = 1 if actor.kind == "categorical" else actor.action_size
        settings = dict(exploration or {"kind": "none"})
        kind = settings.get("kind", "gaussian")
        self.noise: Any = None
        if kind != "none" and not evaluate and actor.kind != "categorical":
            scales = lane_scales(
                settings.get("scale_min", 0.1), settings.get("scale_max", 0.1), num_lanes, worker, num_workers
            )
            cls = {"gaussian": GaussianNoise, "ornstein_uhlenbeck": OrnsteinUhlenbeckNoise}[kind]
            self.noise = cls(num_lanes, action_size, scales, self._rng)
        self._uniform_steps = float(settings.get("uniform_steps", 1.0))
        #: Lanes that keep a uniform action, and these actions; NaN stands for what is left to the policy.
        self._held = np.zeros(num_lanes, bool)
        self._held_action = np.zeros((num_lanes, action_size))
        self._uniform_components = float(settings.get("uniform_components", 1.0))
        self._uniform_scale = float(settings.get("uniform_scale", 1.0))
        self._option = np.zeros(num_lanes, np.int32)
        self._age = np.zeros(num_lanes, np.int32)

    def load(self, values: np.ndarray, version: int) -> None:
        """Adopt flat policy parameters."""
        self.policy.load_flat(values)
        self.forward.refresh()
        self.version = version

    def reseed(self, seed: int) -> None:
        """Draw as a new agent of this seed would."""
        self._rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        self._generator.manual_seed(seed)

    def state_dict(self) -> Dict[str, Any]:
        """Random states, options and what is kept from step to step, as plain containers and tensors; no parameters."""
        return {
            "numpy": self._rng.bit_generator.state,
            "torch": self._generator.get_state(),
            "option": torch.from_numpy(self._option.copy()),
            "age": torch.from_numpy(self._age.copy()),
            "held": torch.from_numpy(self._held.copy()),
            "held_action": torch.from_numpy(self._held_action.copy()),
            "noise": None if self.noise is None else self.noise.state_dict(),
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; noise of another kind begins anew."""
        self._rng.bit_generator.state = state["numpy"]
        self._generator.set_state(state["torch"])
        self._option, self._age = state["option"].numpy().copy(), state["age"].numpy().copy()
        self._held, self._held_action = state["held"].numpy().copy(), state["held_action"].numpy().copy()
        if self.noise is not None and state["noise"] is not None:
            self.noise.load_state_dict(state["noise"])

    def act(
        self, obs: Union[np.ndarray, torch.Tensor], first: np.ndarray, image: Optional[np.ndarray] = None
    ) -> Decision:
        """Decide for raw observations [N, O]; ``first`` [N] bool marks lanes that open an episode.

        Args:
            obs: an array, or a tensor where the simulator left it (:attr:`VectorEnv.obs_on_device`).
            image: [N, C, H, W] uint8, of tasks that have images.

        Raises:
            ValueError: the policy sees images, and none was given.
        """
        self.forward.observe(obs, image)
        previous = self._option.copy()
        previous[first] = -1
        log_prob_option = np.zeros(self.num_lanes, np.float32)
        if self.num_options > 1 and not self.use_student:
            probs, betas = self.forward.options()
            beta = betas[self._lanes, self._option]
            switched, by_cap = self._terminate(beta, first, self._interrupted(probs))
            chosen = self._select(probs)
            self._option = np.where(switched, chosen, self._option).astype(np.int32)
            log_prob_option = self._log_prob_option(probs, beta, previous)
        else:
            switched, by_cap = first.copy(), np.zeros(self.num_lanes, bool)
        self._age = np.where(switched, 0, self._age + 1).astype(np.int32)
        raw = self.forward.student() if self.use_student else self.forward.raw(self._option)
        action, log_prob = self._action(raw, first)
        return Decision(action, self._option, previous, self._age, switched, by_cap, log_prob, log_prob_option)

    def _interrupted(self, probs: np.ndarray) -> Any:
        """Lanes whose option is worth less than choosing afresh, by more than cost and margin (evaluation only)."""
        if self.interruption is None or not self.evaluate:
            return False
        q = self.forward.values()
        value = (probs * q).sum(axis=1)
        running = q[self._lanes, self._option]
        return running + float(self.policy.switch_cost) + self.interruption < value

    @property
    def _is_greedy(self) -> bool:
        return self.evaluate and self.greedy_options and not self.draws_options

    def _terminate(self, beta: np.ndarray, first: np.ndarray, interrupted: Any) -> Any:
        if self._is_greedy:
            ended = (beta > 0.5) | interrupted
        else:
            ended = (self._rng.random(self.num_lanes) < beta) | interrupted
        ended &= self._age + 1 >= self.min_duration
        by_cap = np.zeros(self.num_lanes, bool)
        if self.max_duration > 0:
            by_cap = (self._age + 1 >= self.max_duration) & ~ended & ~first
        return ended | by_cap | first, by_cap

    def _select(self, probs: np.ndarray) -> np.ndarray:
        if self._is_greedy and self.policy.option_selection != "random":
            return probs.argmax(axis=1)
        # Inverse transform; clipped because float32 cumulative sums may end below 1.
        draws = self._rng.random((self.num_lanes, 1))
        return np.minimum((probs.cumsum(axis=1) < draws).sum(axis=1), self.num_options - 1)

    def _log_prob_option(self, probs: np.ndarray, beta: np.ndarray, previous: np.ndarray) -> np.ndarray:
        selected = probs[self._lanes, self._option]
        stay = (previous == self._option).astype(np.float32)
        arrival = np.where(previous < 0, selected, (1.0 - beta) * stay + beta * selected)
        return np.log(np.maximum(arrival, np.finfo(np.float32).tiny)).astype(np.float32)

    def _action(self, raw: torch.Tensor, first: np.ndarray) -> Any:
        actor = self.policy.actor
        log_prob = np.zeros(self.num_lanes, np.float32)
        if self.evaluate:
            return actor.mean_action(raw).numpy(), log_prob
        multiplier, uniform_probability = self.policy.exploration.tolist()
        if actor.kind == "gaussian":
            mean, std = actor.gaussian(raw)
            pre_tanh = mean + std * torch.randn(mean.shape, generator=self._generator)
            log_prob = squashed_gaussian_log_prob(pre_tanh, mean, std).numpy()
            action = torch.tanh(pre_tanh).numpy()
        elif actor.kind == "categorical":
            probs = raw.float().softmax(-1)
            drawn = torch.multinomial(probs, 1, generator=self._generator)
            action = drawn.numpy().astype(np.float32)
        else:
            action = actor.mean_action(raw).numpy()
        if self.noise is not None:
            self.noise.reset(first)
            action = action + self.noise.sample(multiplier)
        if uniform_probability > 0.0:
            if self._uniform_steps > 1.0:
                self._hold(uniform_probability, first)
                uniform, drawn_uniformly = self._held, self._held_action
            else:
                uniform = self._rng.random(self.num_lanes) < uniform_probability
                drawn_uniformly = self._uniform_action(action.shape, uniform_probability)
            replaced = uniform[:, None]
            if self._uniform_components < 1.0:
                replaced = replaced & ~np.isnan(drawn_uniformly)
            np.copyto(action, drawn_uniformly, "same_kind", replaced)
        if actor.kind == "categorical":
            log_prob = actor.log_prob(raw, torch.from_numpy(action)).numpy()
        else:
            np.maximum(action, -1.0, out=action)
            np.minimum(action, 1.0, out=action)
        if uniform_probability > 0.0 and actor.kind != "deterministic":
            # The behaviour is a mixture, and so is its density: a ratio to pi alone would explode where pi is small.
            inside = torch.from_numpy(action.astype(np.float32))
            own = actor.log_prob(raw, inside).numpy() + np.log(max(1.0 - uniform_probability, 1e-30))
            log_prob = np.logaddexp(own, np.log(uniform_probability) + self._uniform_log_density)
        return action.astype(np.float32, copy=False), log_prob.astype(np.float32, copy=False)

    def _hold(self, share: float, first: np.ndarray) -> None:
        """Begin and end stretches of kept uniform actions, geometric in length, that take ``share`` of all steps."""
        mean = self._uniform_steps
        goes_on = self._held & ~first & (self._rng.random(self.num_lanes) >= 1.0 / mean)
        begins = ~goes_on & (self._rng.random(self.num_lanes) < share / (mean * (1.0 - share) + share))
        fresh = self._uniform_action(self._held_action.shape, share)
        self._held_action = np.where(begins[:, None], fresh, self._held_action)
        self._held = goes_on | begins

    def _uniform_action(self, shape: Any, share: float) -> np.ndarray:
        if self.policy.actor.kind == "categorical":
            return self._rng.integers(0, self.policy.actor.action_size, shape).astype(np.float64)
        drawn = np.clip(self._rng.uniform(-self._uniform_scale, self._uniform_scale, shape), -1.0, 1.0)
        if self._uniform_components < 1.0 and share < 1.0:  # before learning begins the policy has nothing to add
            kept = self._rng.random(shape) >= self._uniform_components
            kept[np.arange(shape[0]), self._rng.integers(0, shape[1], shape[0])] = False
            drawn[kept] = np.nan
        return drawn

    @property
    def _uniform_log_density(self) -> float:
        size = self.policy.actor.action_size
        return -float(np.log(size)) if self.policy.actor.kind == "categorical" else -size * float(np.log(2.0))
