"""Groups of settings of :class:`OptionCritic`, each a dataclass that YAML fills, and the checks between settings.

A combination that cannot mean anything is refused in one line that names both settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from claw_lightning.checks import check_fields, check_numbers
from claw_lightning.errors import ConfigError
from claw_lightning.rollout.networks import ACTIVATIONS
from claw_lightning.rollout.noise import linear_decay


@dataclass
class Distillation:
    """Pulls policies towards others.

    Attributes:
        kind: ``target``: towards a slow copy of the policy itself (a trust region); ``teacher``: towards a frozen
            policy of a checkpoint; ``student``: the options into one flat policy that is evaluated beside them.
        coefficient: weight of the divergence in the losses of actor, option policy and termination (student: unused,
            the student has its own optimiser).
        final_coefficient: weight after ``decay_steps`` environment steps, linear in between; None: no schedule.
        decay_steps: see there.
        kl_limit: divergence per state, in nats, that dual ascent on the coefficient aims at; None: no tuning.
        dual_lr: step of the dual ascent on the logarithm of the coefficient.
        tau: step of the slow copy per update.
        teacher: checkpoint of the teacher.
        std: standard deviation that stands in for a deterministic actor's, in action units: KL = distance^2 / 2 std^2.
        student_hidden_sizes: of the student.
        student_lr: of its optimiser (Adam).
    """

    kind: Literal["none", "target", "teacher", "student"] = "none"
    coefficient: float = 0.1
    final_coefficient: float | None = None
    decay_steps: int = 0
    kl_limit: float | None = None
    dual_lr: float = 1e-2
    tau: float = 1e-3
    teacher: str | None = None
    std: float = 0.2
    student_hidden_sizes: Sequence[int] = (256, 256)
    student_lr: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse values without meaning."""
        group = "model.distillation"
        check_fields(group, self)
        least = {"coefficient": self.coefficient, "final_coefficient": self.final_coefficient}
        check_numbers(group, least, least=0.0)
        above = {"kl_limit": self.kl_limit, "dual_lr": self.dual_lr, "std": self.std, "student_lr": self.student_lr}
        check_numbers(group, above, above=0.0)
        if not 0.0 < self.tau <= 1.0:
            raise ConfigError(f"{group}.tau is {self.tau}; it must lie in (0, 1]")
        if self.kl_limit is not None and self.final_coefficient is not None:
            raise ConfigError(
                f"{group}.kl_limit ({self.kl_limit}) and {group}.final_coefficient ({self.final_coefficient}) both "
                "set the coefficient; keep one"
            )
        if (self.final_coefficient is not None) != (self.decay_steps > 0):
            raise ConfigError(
                f"{group}.final_coefficient ({self.final_coefficient}) and {group}.decay_steps ({self.decay_steps}) "
                "go together"
            )
        for name in ("kl_limit", "final_coefficient"):
            if getattr(self, name) is not None and self.kind in ("none", "student"):
                raise ConfigError(
                    f"{group}.{name} ({getattr(self, name)}) does nothing with {group}.kind '{self.kind}'; use kind "
                    "target or teacher"
                )
        if (self.kind == "teacher") != (self.teacher is not None):
            raise ConfigError(
                f"{group}.kind '{self.kind}' and {group}.teacher {self.teacher}: a teacher's checkpoint belongs to "
                "kind teacher, and that kind needs one"
            )
        if not self.student_hidden_sizes or min(self.student_hidden_sizes) < 1:
            raise ConfigError(f"{group}.student_hidden_sizes is {list(self.student_hidden_sizes)}; give positive sizes")

    def at(self, env_steps: int) -> float:
        """Coefficient after so many environment steps."""
        if self.final_coefficient is None:
            return self.coefficient
        return linear_decay(env_steps, self.coefficient, self.final_coefficient, self.decay_steps)


@dataclass
class PolicyGradient:
    """Replaces the critics' gradient by policy gradients over stored segments (the on-policy family's estimators).

    Attributes:
        advantage: ``one_step``, ``n_step`` or ``gae``.
        length: steps of a segment.
        trace: lambda of ``gae``.
        ratio_clip: bound of importance ratios within an advantage (V-trace's c and rho).
        surrogate_clip: epsilon of the clipped surrogate loss (PPO).
        options: ``sampled``: executed options learn, weighted by stored probabilities; ``all``: every option learns
            from every step by the probability with which it would have been active.
        entropy: weight of the action policy's entropy.
    """

    advantage: Literal["one_step", "n_step", "gae"] = "gae"
    length: int = 16
    trace: float = 0.95
    ratio_clip: float = 1.0
    surrogate_clip: float = 0.2
    options: Literal["sampled", "all"] = "sampled"
    entropy: float = 0.01

    def __post_init__(self) -> None:
        """Refuse values without meaning."""
        group = "model.policy_gradient"
        check_fields(group, self)
        if self.length < 1:
            raise ConfigError(f"{group}.length is {self.length}; it must be at least 1")
        if self.length < 2 and self.advantage != "one_step":
            raise ConfigError(f"{group}.length ({self.length}) leaves {group}.advantage '{self.advantage}' one step")
        if not 0.0 <= self.trace <= 1.0:
            raise ConfigError(f"{group}.trace is {self.trace}; it must lie in [0, 1]")
        check_numbers(group, {"ratio_clip": self.ratio_clip, "surrogate_clip": self.surrogate_clip}, above=0.0)
        check_numbers(group, {"entropy": self.entropy}, least=0.0)


@dataclass
class Diversity:
    """Keeps options apart and in use.

    Attributes:
        bonus: weight of the spread between the options' actions in the actor's loss.
        length_scale: distance of actions (root mean square per dimension) beyond which more spread earns little.
        adaptive_weights: options that are executed rarely weigh more in the losses of critic and actor, inversely to
            their share.
        max_weight: bound of these weights.
    """

    bonus: float = 0.0
    length_scale: float = 0.3
    adaptive_weights: bool = False
    max_weight: float = 5.0

    def __post_init__(self) -> None:
        """Refuse values without meaning."""
        check_fields("model.diversity", self)
        check_numbers("model.diversity", {"bonus": self.bonus}, least=0.0)
        check_numbers("model.diversity", {"length_scale": self.length_scale}, above=0.0)
        check_numbers("model.diversity", {"max_weight": self.max_weight}, least=1.0)


def check_settings(h: Any, groups: dict[str, Any]) -> None:
    """Refuse settings of the model without meaning, alone or together.

    Raises:
        ConfigError: names the keys.
    """
    _check_alone(h)
    _check_range(h)
    _check_together(h, groups)


def _check_alone(h: Any) -> None:
    if h.num_options < 1:
        raise ConfigError(f"model.num_options is {h.num_options}; it must be at least 1 (1: no options)")
    if not 0.0 <= h.gamma < 1.0:
        raise ConfigError(f"model.gamma is {h.gamma}; it must lie in [0, 1)")
    for name in ("policy_delay", "option_delay", "num_critics", "n_step", "filter_length", "image_features"):
        if h[name] < 1:
            raise ConfigError(f"model.{name} is {h[name]}; it must be at least 1")
    if not 0.0 < h.initial_termination < 1.0:
        raise ConfigError(f"model.initial_termination is {h.initial_termination}; it must lie between 0 and 1")
    if h.max_option_duration < 0 or h.min_option_duration < 1:
        raise ConfigError(
            f"model.min_option_duration ({h.min_option_duration}) must be at least 1 and "
            f"model.max_option_duration ({h.max_option_duration}) at least 0 (no cap)"
        )
    if h.lr_decay_steps < 0:
        raise ConfigError(f"model.lr_decay_steps is {h.lr_decay_steps}; it cannot be negative (0: no decay)")
    if h.tau is not None and not 0.0 < h.tau <= 1.0:
        raise ConfigError(f"model.tau is {h.tau}; it must lie in (0, 1]")
    if h.target_delay is not None and h.target_delay < 1:
        raise ConfigError(f"model.target_delay is {h.target_delay}; it must be at least 1")
    for name in ("all_options", "trace", "policy_average", "final_lr"):
        if not 0.0 <= h[name] <= 1.0:
            raise ConfigError(f"model.{name} is {h[name]}; it must lie in [0, 1]")
    if h.target_decision_rate is not None and not 0.0 < h.target_decision_rate < 1.0:
        raise ConfigError(f"model.target_decision_rate is {h.target_decision_rate}; it must lie between 0 and 1")
    for name in ("hidden_sizes", "option_hidden_sizes"):
        if not h[name] or min(h[name]) < 1:
            raise ConfigError(f"model.{name} is {list(h[name])}; give at least one positive size")
    positive = [key for key in h if key.endswith("_lr")] + ["initial_temperature", "obs_clip"]
    check_numbers("model", {name: h[name] for name in positive}, above=0.0)
    least_zero = ("deliberation_cost", "target_noise", "target_noise_clip", "action_penalty", "option_entropy",
                  "termination_entropy", "max_grad_norm", "option_batch_size", "interruption",
                  "critic_atoms", "image_shift")  # fmt: skip
    check_numbers("model", {name: h[name] for name in least_zero}, least=0.0)
    check_numbers("model", {name: h[name] for name in ("target_entropy", "reward_scale")})
    if h.reward_scale == 0.0:
        raise ConfigError("model.reward_scale is 0; nothing could be learned from such rewards")
    if h.activation not in ACTIVATIONS:
        raise ConfigError(f"model.activation is '{h.activation}'; use one of {', '.join(ACTIVATIONS)}")
    if h.critic_atoms == 1:
        raise ConfigError("model.critic_atoms is 1; give 0 (expected values) or at least 2, usually 51 to 251")
    low, high = h.value_range
    check_numbers("model", {"value_range": low})
    check_numbers("model", {"value_range": high})
    if not (low < high):
        raise ConfigError(f"model.value_range is {list(h.value_range)}; the first number must be below the second")


def _check_range(h: Any) -> None:
    if h.target_range is not None:
        low, high = h.target_range
        check_numbers("model", {"target_range": low})
        check_numbers("model", {"target_range": high})
        if not low < high:
            raise ConfigError(
                f"model.target_range is {list(h.target_range)}; the first number must be below the second"
            )


def _check_together(h: Any, groups: dict[str, Any]) -> None:
    # One option switches the machinery off, so that K = 1 is one setting away: what merely shapes options (all_options,
    # diversity, interruption, ...) then does nothing. Refused is what would have to yield something and cannot.
    distillation, gradient, diversity = (groups[name] for name in ("distillation", "policy_gradient", "diversity"))

    def refuse(wrong: bool, first: str, second: str, cure: str) -> None:
        if wrong:
            raise ConfigError(f"model.{first} and model.{second} contradict each other: {cure}")

    options = f"num_options {h.num_options}"
    single = h.num_options == 1
    refuse(
        0 < h.max_option_duration < h.min_option_duration,
        f"min_option_duration ({h.min_option_duration})",
        f"max_option_duration ({h.max_option_duration})",
        "the minimum is above the maximum",
    )
    refuse(
        single and distillation.kind == "student", "distillation.kind student", options,
        "there are no options to distil; set num_options above 1",
    )  # fmt: skip
    if isinstance(h.option_selection, int):
        refuse(
            not 0 <= h.option_selection < h.num_options, f"option_selection {h.option_selection}", options,
            "options are numbered from 0",
        )  # fmt: skip
    elif h.option_selection not in ("learned", "random"):
        raise ConfigError(
            f"model.option_selection is '{h.option_selection}'; use learned, random or an option's number"
        )
    refuse(
        h.option_inference == "filter" and h.actor == "deterministic", "option_inference filter",
        "actor deterministic", "a filter needs the density of actions; use actor gaussian or categorical",
    )  # fmt: skip
    refuse(
        h.network is not None and h.layer_norm, "network", "layer_norm true", "the block has layers of its own",
    )  # fmt: skip
    several = h.n_step > 1
    refuse(
        h.n_step_form == "retrace" and not several, "n_step_form retrace", f"n_step {h.n_step}",
        "set n_step to the length of the segments",
    )  # fmt: skip
    refuse(
        several and h.all_options > 0 and not single, f"n_step {h.n_step}", f"all_options {h.all_options}",
        "a path of several steps belongs to the options that were executed on it; set all_options to 0 or n_step to 1",
    )  # fmt: skip
    refuse(
        several and h.option_inference == "filter" and not single, f"n_step {h.n_step}", "option_inference filter",
        "inferred options learn from single steps",
    )  # fmt: skip
    refuse(
        h.option_inference == "filter" and h.all_options > 0 and not single, "option_inference filter",
        f"all_options {h.all_options}", "the filter already says which options learn",
    )  # fmt: skip
    atoms = f"critic_atoms {h.critic_atoms}"
    refuse(
        several and h.critic_atoms > 0, f"n_step {h.n_step}", atoms, "distributional critics learn from single steps"
    )
    refuse(
        h.critic_atoms > 0 and h.actor == "categorical", atoms, "actor categorical",
        "distributional critics take continuous actions",
    )  # fmt: skip
    if gradient is not None:
        refuse(
            h.actor == "deterministic", "policy_gradient", "actor deterministic",
            "a policy gradient needs a density; use actor gaussian or categorical",
        )  # fmt: skip
        refuse(several, "policy_gradient", f"n_step {h.n_step}", "set policy_gradient.advantage and length instead")
        refuse(
            h.option_inference == "filter", "policy_gradient", "option_inference filter",
            "ratios are those of the stored options",
        )  # fmt: skip
        refuse(h.critic_atoms > 0, "policy_gradient", atoms, "it learns values of options, not of actions")
        refuse(single, "policy_gradient", options, "its baseline is the value of options; set num_options above 1")
        refuse(
            h.all_options > 0, f"policy_gradient.options {gradient.options}", f"all_options {h.all_options}",
            "the first alone decides here",
        )  # fmt: skip
        for name in ("bonus", "adaptive_weights"):
            value = getattr(diversity, name)
            refuse(bool(value), "policy_gradient", f"diversity.{name} {value}", "it belongs to the critics' gradient")
    for name, kind in {
        "uniform_steps": "are kept is not known",
        "uniform_components": "are uniform in part is not known",
        "uniform_scale": "lie at a limit is not a finite number",
    }.items():
        value = getattr(groups["exploration"], name)
        refuse(
            needs_own_actions(h, gradient) and value != 1,
            "policy_gradient" if gradient is not None else "actor gaussian", f"exploration.{name} {value:g}",
            f"the density of actions that {kind}; set it to 1",
        )  # fmt: skip
    refuse(
        needs_own_actions(h, gradient) and groups["exploration"].kind != "none",
        "policy_gradient" if gradient is not None
        else "option_inference filter" if h.option_inference == "filter" else "n_step_form retrace",
        f"exploration.kind {groups['exploration'].kind}",
        "stored densities are the Gaussian actor's own; set exploration.kind none",
    )  # fmt: skip


def needs_own_actions(h: Any, gradient: PolicyGradient | None) -> bool:
    """Whether densities of stored actions are asked for, which noise on top of them would falsify."""
    ratios = gradient is not None or (h.n_step > 1 and h.n_step_form == "retrace")
    return h.actor == "gaussian" and (ratios or h.option_inference == "filter")
