"""Schedule of exploration; the noise itself is drawn in the workers (rollout/noise.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from claw_lightning.checks import check_fields, check_numbers
from claw_lightning.errors import ConfigError
from claw_lightning.rollout.noise import linear_decay


@dataclass
class Exploration:
    """How workers explore.

    Attributes:
        kind: gaussian, ornstein_uhlenbeck or none (a Gaussian actor samples by itself).
        scale_min: standard deviation of the least noisy lane, as a fraction of half the action range.
        scale_max: of the noisiest; lanes of all workers are spread evenly between the two.
        final: factor on the noise at the end of the decay.
        decay_steps: environment steps of the linear decay from 1 to ``final``; 0: none.
        uniform: share of steps with a uniform action in place of the policy's, once learning has begun.
        uniform_steps: steps for which such an action is kept, on average (Dabney et al., Temporally-Extended
            epsilon-Greedy Exploration, arXiv 2006.01782): a hand that is told another thing at every step hardly moves.
            Holds for the warm-up too.
        uniform_components: share of the action's components that a uniform action replaces, at least one; the policy
            keeps the others. Below 1, a finger is tried out while the policy holds the rest of the hand in place: a
            pose that differs from a known one in a few joints is all but never met by a wholly uniform action. The
            warm-up replaces all.
        uniform_scale: uniform actions are drawn from [-uniform_scale, uniform_scale] and clipped to [-1, 1], in the
            warm-up too. Above 1, the share 1 - 1 / uniform_scale of their components lies at a limit: with joints under
            position control, an open or a closed finger, which no draw from within the limits gives.
    """

    kind: Literal["gaussian", "ornstein_uhlenbeck", "none"] = "gaussian"
    scale_min: float = 0.1
    scale_max: float = 0.1
    final: float = 1.0
    decay_steps: int = 0
    uniform: float = 0.0
    uniform_steps: float = 1.0
    uniform_components: float = 1.0
    uniform_scale: float = 1.0

    def __post_init__(self) -> None:
        """Refuse values without meaning."""
        check_fields("model.exploration", self)
        if not 0.0 <= self.scale_min <= self.scale_max:
            raise ConfigError(
                f"model.exploration: 0 <= scale_min ({self.scale_min}) <= scale_max ({self.scale_max}) does not hold"
            )
        numbers = {"scale_min": self.scale_min, "scale_max": self.scale_max, "final": self.final}
        check_numbers("model.exploration", numbers, least=0.0)
        if not 0.0 <= self.uniform <= 1.0:
            raise ConfigError(f"model.exploration.uniform is {self.uniform}; it is a probability")
        check_numbers("model.exploration", {"uniform_steps": self.uniform_steps}, least=1.0)
        if not 0.0 < self.uniform_components <= 1.0:
            raise ConfigError(
                f"model.exploration.uniform_components is {self.uniform_components}; it is a share, above 0, at most 1"
            )
        check_numbers("model.exploration", {"uniform_scale": self.uniform_scale}, least=1.0)
        if self.decay_steps < 0 or self.final < 0:
            raise ConfigError("model.exploration: decay_steps and final cannot be negative")

    def agent_settings(self) -> dict[str, Any]:
        """Plain settings for OptionAgent."""
        names = ("kind", "scale_min", "scale_max", "uniform_steps", "uniform_components", "uniform_scale")
        return {name: getattr(self, name) for name in names}

    def at(self, env_steps: int, learning: bool) -> tuple[float, float]:
        """Noise multiplier and probability of a uniform action; all actions are uniform before learning begins."""
        if not learning:
            return 1.0, 1.0
        if self.decay_steps == 0:
            return 1.0, self.uniform
        return linear_decay(env_steps, 1.0, self.final, self.decay_steps), self.uniform
