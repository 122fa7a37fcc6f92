"""OptionCritic: the update schedule. The equations are in losses.py, the acting networks in rollout/networks.py.

Shapes: U updates per training_step, B batch, L steps of a segment, O observation, S states, A action, K options, C
critics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from claw_lightning.augmentation import random_shift
from claw_lightning.checkpoints import stored_spec
from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from claw_lightning.hooks import end_run
from claw_lightning.learner import Learner
from claw_lightning.minibatch import Minibatch
from claw_lightning.networks import DiscreteCritic, TwinCritic
from claw_lightning.ranks import RANK_STRIDE, ranks_of
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.networks import NetworkBlock, NetworkError, Policy, make_network
from claw_lightning.rollout.noise import linear_decay
from claw_lightning.rollout.normalizer import Normalizer, RunningMoments
from claw_lightning.settings import Distillation, Diversity, PolicyGradient, check_settings, needs_own_actions
from claw_lightning.strategy import check_strategy
from claw_lightning.updates import policy_gradient
from claw_lightning.updates.actor import update_actor
from claw_lightning.updates.critic import update_critic, update_critic_over_segments
from claw_lightning.updates.distillation import load_teacher, move_reference, update_student
from claw_lightning.updates.options import update_options, update_values
from claw_lightning.updates.rows import learning_rows
from claw_lightning.values import NextValues

GROUPS = {
    "exploration": Exploration,
    "distillation": Distillation,
    "policy_gradient": PolicyGradient,
    "diversity": Diversity,
}


#: Settings of groups on which it depends which networks there are.
STRUCTURE = ("distillation.kind", "distillation.student_hidden_sizes", "distillation.kl_limit", "policy_gradient")


#: Settings that act at the beginning of a run alone, and what goes on from a checkpoint in their place.
AT_THE_START = {
    "init": "networks",
    "initial_termination": "terminations",
    "initial_temperature": "temperature",
    "deliberation_cost": "deliberation cost",
}


def structure(groups: dict[str, Any]) -> tuple[Any, ...]:
    """Values of :data:`STRUCTURE` from plain groups, told apart only where networks differ (a teacher adds none)."""
    distillation = groups.get("distillation") or asdict(Distillation())
    kind = distillation["kind"]
    return (
        kind if kind in ("target", "student") else "none",
        list(distillation["student_hidden_sizes"]) if kind == "student" else None,
        distillation["kl_limit"] is not None,
        groups.get("policy_gradient") is not None,
    )


def plain_network(network: Any) -> dict[str, Any] | None:
    """``model.network`` as ``class_path`` and ``init_args``, from what the command or a checkpoint gives.

    Raises:
        ConfigError: it is something else.
    """
    if network is None:
        return None
    if callable(network) and not isinstance(network, type):
        network = network(1, 1)  # the command's factory, which hands out the recipe and not the block
    if isinstance(network, Mapping) and "class_path" in network:
        return {"class_path": str(network["class_path"]), "init_args": dict(network.get("init_args") or {})}
    raise ConfigError("model.network: give class_path and init_args of a NetworkBlock; workers build it too")


class OptionCritic(Learner):
    """Off-policy option-critic with twin critics; with ``num_options`` 1 it is TD3 (deterministic) or SAC (gaussian).

    Public attributes for callbacks: :attr:`policy` (what workers run), :attr:`critic`, :attr:`state_value`,
    :attr:`updates`, :attr:`env_steps`, :attr:`target_pairs`, :attr:`spec`.

    Args:
        num_options: K; 1 switches the option machinery off.
        actor: ``deterministic`` (TD3), ``gaussian`` (SAC with tuned temperature) or ``categorical`` (discrete actions).
        gamma: discount per environment step.
        deliberation_cost: c, charged for every switch of options, in units of the (scaled) reward.
        deliberation_form: ``full``: c is part of the return, in the arrival value and in the termination loss;
            ``regularizer``: in the termination loss alone.
        target_decision_rate: tunes c so that arriving options end with this mean probability; None: c is fixed.
        deliberation_cost_lr: step of that controller, in units of the spread of option values.
        arrival: how the critic's target values the arrival in s': ``expected`` mixes all options, ``sampled`` draws one
            (unbiased, and nearly as cheap as K = 1).
        all_options: eta; options learn from steps of others: with weight eta by the probability of having been active,
            with 1 - eta if executed. 0: executed options alone. With ``arrival: sampled`` by a draw, at no cost.
        option_inference: ``stored``: the option that the worker executed; ``filter``: its distribution given the
            actions so far, by the current policy (HO2), over ``filter_length`` steps.
        filter_length: steps of the filter.
        option_selection: ``learned``; for ablations ``random`` or the number of the only option to choose.
        interruption: in evaluation, also end an option whose value is below that of choosing afresh by more than cost
            and this margin; None: never.
        normalize_advantages: divide option advantages by their running root mean square in the losses of option policy
            and termination: the weights of entropies and cost then mean the same for every task.
        option_batch_size: rows of each batch from which option policy, termination and values learn; 0: all.
        max_option_duration: steps after which a worker switches anyway; 0: no cap. Behaviour only.
        min_option_duration: steps before which a worker does not end an option.
        hidden_sizes: of actor and critics.
        option_hidden_sizes: of option policy, termination and values.
        option_heads: how the actor knows its option: ``embedding`` into the first layer, or ``separate`` last layers.
        network: a :class:`NetworkBlock` of your own (``class_path``, ``init_args``), which takes the place of all
            layers behind the first in every network; of the sizes above only the first number then counts. None: plain
            layers.
        activation: relu, elu, tanh or silu.
        init: orthogonal, xavier, he, or torch (PyTorch's own).
        policy_average: step per update of a slow copy of the policy (Polyak average), which is evaluated and acts in
            :meth:`agent` in place of the policy itself; workers go on with the latter. Evens out how a policy sways
            from update to update. 0: no copy.
        image_features: numbers into which an encoder turns the image of a task that has images. The critics' loss alone
            trains it; all networks see its features beside the observation.
        image_shift: pixels by which images are shifted at random in learning (DrQ); 0: none.
        critic_input: what critics see: ``obs``, what policies see; ``states``, the task's privileged states beside it
            (an asymmetric critic: workers never need them); ``auto``: with states where the task has them.
        layer_norm: layer normalisation in the critics.
        num_critics: C; the smallest of them is the target's value. 1 for DDPG.
        critic_atoms: Z of categorical critics over ``value_range``; 0: critics of the expected value.
        value_range: lowest and highest value of categorical critics.
        target_range: bounds of the critics' targets, in scaled rewards, where the task's return is known to be bounded:
            [-1/(1 - gamma), 0] for rewards of -1 until a goal is reached; None: none.
        n_step: steps of rewards before the bootstrap.
        n_step_form: ``executed``: along the executed options; ``switch``: cut where the first option ended;
            ``retrace``: all steps of a segment, off-policy corrected.
        trace: lambda of ``retrace``.
        policy_gradient: learn by policy gradients over stored segments instead; None: by the critics' gradient.
        distillation: towards a slow copy, a teacher, or into a flat student.
        diversity: what keeps options apart and in use.
        critic_lr: learning rate; one optimiser (Adam) per network. Likewise the next five.
        actor_lr: of the action policy.
        option_policy_lr: of the option policy.
        termination_lr: of the termination network.
        value_lr: of option value and state value.
        temperature_lr: of the stochastic actor's temperature.
        tau: step of the target networks towards the networks themselves; the callback TargetUpdate takes it. None: its
            own ``tau``, or 0.005.
        target_delay: critic updates per step of the target networks. With TD3's ``policy_delay`` 2, 2 is the paper's
            choice. None: TargetUpdate's own ``every``, or 1.
        lr_decay_steps: environment steps over which all learning rates fall linearly to ``final_lr`` of their values;
            0: they stay.
        final_lr: share of the learning rates that is left then.
        policy_delay: critic updates per update of the action policy (TD3).
        option_delay: critic updates per update of option policy and termination.
        target_noise: standard deviation of the target policy's smoothing noise (deterministic actor).
        target_noise_clip: its bound.
        action_penalty: weight of the mean squared action in the deterministic actor's loss.
        initial_temperature: alpha of stochastic actors at the start.
        tune_temperature: adapt alpha to ``target_entropy``; else it stays.
        target_entropy: None: minus the action size (gaussian), 0.3 log A (categorical).
        option_entropy: weight of the option policy's entropy.
        termination_entropy: weight of the termination's entropy: keeps beta off 0 and 1.
        initial_termination: beta at the start.
        max_grad_norm: clip of each network's gradient norm; 0: none.
        exploration: noise of the workers; None: that of :class:`Exploration`, or none where stored densities are used.
        normalize_observations: running normalisation in front of all networks.
        obs_clip: bound of normalised observations.
        reward_scale: factor on rewards, in the learner only.
        greedy_options: in evaluation, end an option where beta > 1/2 and take the most probable; else sample.
    """

    advantage_scale: Tensor
    option_shares: Tensor

    def __init__(
        self,
        num_options: int = 4,
        actor: Literal["deterministic", "gaussian", "categorical"] = "deterministic",
        gamma: float = 0.99,
        deliberation_cost: float = 0.0,
        deliberation_form: Literal["full", "regularizer"] = "full",
        target_decision_rate: float | None = None,
        deliberation_cost_lr: float = 1e-3,
        arrival: Literal["expected", "sampled"] = "expected",
        all_options: float = 0.0,
        option_inference: Literal["stored", "filter"] = "stored",
        filter_length: int = 8,
        option_selection: int | str = "learned",
        interruption: float | None = None,
        normalize_advantages: bool = True,
        option_batch_size: int = 0,
        max_option_duration: int = 0,
        min_option_duration: int = 1,
        hidden_sizes: Sequence[int] = (256, 256),
        option_hidden_sizes: Sequence[int] = (128, 128),
        option_heads: Literal["embedding", "separate"] = "embedding",
        network: Callable[[int, int], NetworkBlock] | None = None,
        activation: Literal["relu", "elu", "tanh", "silu"] = "relu",
        init: Literal["orthogonal", "xavier", "he", "torch"] = "orthogonal",
        policy_average: float = 0.0,
        image_features: int = 50,
        image_shift: int = 0,
        critic_input: Literal["auto", "obs", "states"] = "auto",
        layer_norm: bool = False,
        num_critics: int = 2,
        critic_atoms: int = 0,
        value_range: tuple[float, float] = (-100.0, 100.0),
        target_range: tuple[float, float] | None = None,
        n_step: int = 1,
        n_step_form: Literal["executed", "switch", "retrace"] = "executed",
        trace: float = 1.0,
        policy_gradient: PolicyGradient | None = None,
        distillation: Distillation | None = None,
        diversity: Diversity | None = None,
        critic_lr: float = 1e-3,
        actor_lr: float = 1e-3,
        option_policy_lr: float = 3e-4,
        termination_lr: float = 3e-4,
        value_lr: float = 1e-3,
        temperature_lr: float = 3e-4,
        tau: float | None = None,
        target_delay: int | None = None,
        lr_decay_steps: int = 0,
        final_lr: float = 0.1,
        policy_delay: int = 2,
        option_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        action_penalty: float = 0.0,
        initial_temperature: float = 0.1,
        tune_temperature: bool = True,
        target_entropy: float | None = None,
        option_entropy: float = 1.0,
        termination_entropy: float = 1.0,
        initial_termination: float = 0.1,
        max_grad_norm: float = 0.0,
        exploration: Exploration | None = None,
        normalize_observations: bool = True,
        obs_clip: float = 5.0,
        reward_scale: float = 1.0,
        greedy_options: bool = True,
    ) -> None:
        super().__init__()
        network = plain_network(network)  # type: ignore[assignment]  # what is stored, and what workers are told
        self.save_hyperparameters(ignore=list(GROUPS))
        self.hparams.pop("_instantiator", None)  # written by the command; a stored module is built without it
        given = {"exploration": exploration, "distillation": distillation, "policy_gradient": policy_gradient,
                 "diversity": diversity}  # fmt: skip
        check_types("model", {**self.settings, **given}, OptionCritic.__init__)
        #: Groups that the caller set: they win over a checkpoint's.
        self._given_groups = {name: group for name, group in given.items() if group is not None}
        self.distillation = distillation or Distillation()
        self.policy_gradient = policy_gradient
        self.diversity = diversity or Diversity()
        own = needs_own_actions(self.settings, policy_gradient)  # also while a checkpoint is loaded, before its groups
        self.exploration = exploration or Exploration(kind="none" if own else "gaussian")
        check_settings(self.settings, self.groups)
        self.spec: EnvSpec | None = None
        self._errors: list[Tensor] | None = None
        self._optimizer_names, self._rates = [], list[float]()
        self._rates_before: dict[str, float] | None = None  # learning rates of the checkpoint that a run goes on from
        self.option_critic: nn.Module | None = None
        self._teacher: tuple[Policy, ...] = ()  # in a tuple: frozen, and no part of checkpoints

    @property
    def groups(self) -> dict[str, Any]:
        """Grouped settings by name."""
        return {name: getattr(self, name) for name in GROUPS}

    @property
    def segment_length(self) -> int:
        """Consecutive rows that one sample holds."""
        if self.policy_gradient is not None:
            return self.policy_gradient.length
        filters = self.settings.option_inference == "filter" and self.settings.num_options > 1
        return self.settings.filter_length if filters else self.settings.n_step

    # -- construction -------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build the networks as soon as the task's sizes are known (from the data module or a checkpoint)."""
        if self.spec is not None or self._trainer is None:  # without a trainer a checkpoint is being loaded
            return
        data = getattr(self.trainer, "datamodule", None)
        if data is None or data.spec is None:
            raise ConfigError("OptionCritic needs a ReplayDataModule: its task gives the networks their sizes")
        if str(self.trainer.precision) not in ("32-true", "bf16-mixed", "16-mixed"):
            raise ConfigError(f"trainer.precision {self.trainer.precision} is not supported; use 32-true or bf16-mixed")
        self.build(data.spec)

    def build(self, spec: EnvSpec) -> None:
        """Build all networks for a task.

        Raises:
            ConfigError: the settings do not fit the task, or ``model.network`` cannot be used.
        """
        try:
            self._build(spec)
        except NetworkError as error:
            raise ConfigError(str(error)) from error

    def _build(self, spec: EnvSpec) -> None:
        h = self.settings
        discrete = spec.num_actions > 0
        if discrete != (h.actor == "categorical"):
            raise ConfigError(
                f"task {spec.task} has {spec.num_actions} discrete actions; model.actor '{h.actor}' needs continuous "
                "ones: use categorical"
                if discrete
                else f"task {spec.task} has continuous actions; model.actor 'categorical' needs discrete ones: use "
                "deterministic or gaussian"
            )
        self.spec = spec
        action_size = spec.num_actions or spec.action_size
        self.policy_settings: dict[str, Any] = {
            "obs_size": spec.obs_size,
            "action_size": action_size,
            "num_options": h.num_options,
            "actor": h.actor,
            "hidden_sizes": list(h.hidden_sizes),
            "option_hidden_sizes": list(h.option_hidden_sizes),
            "activation": h.activation,
            "init": h.init,
            "normalize": h.normalize_observations,
            "obs_clip": h.obs_clip,
            "initial_termination": h.initial_termination,
            "option_heads": h.option_heads,
            "option_selection": h.option_selection,
        }
        if h.network is not None:
            self.policy_settings["network"] = h.network
        if self.distillation.kind == "student":
            self.policy_settings["student_hidden_sizes"] = list(self.distillation.student_hidden_sizes)
        if spec.image_shape is not None:
            self._check_image_shift(spec)
            self.policy_settings.update(image_shape=list(spec.image_shape), image_features=h.image_features)
        self._choose_critic_input(spec)
        self.policy = Policy(**self.policy_settings)
        self.policy.switch_cost.fill_(h.deliberation_cost)
        self.moments = RunningMoments(spec.obs_size)
        if self.sees_states:
            self.states_moments = RunningMoments(spec.states_size)
            self.states_normalizer = Normalizer(
                spec.states_size, h.obs_clip if h.normalize_observations else float("inf")
            )
        self.log_temperature: nn.Parameter | None = None
        if self.policy_gradient is None:
            self._build_critics(spec, action_size)
        else:
            self._build_option_critic()
        if self.policy.encoder is not None:
            self.target_encoder = Policy(**self.policy_settings).encoder
        for online, target in self.target_pairs:
            target.load_state_dict(online.state_dict())
            target.requires_grad_(False)
        if h.num_options > 1:
            sizes = [self.policy.input_size, *h.option_hidden_sizes, 1]
            self.state_value = make_network(h.network, sizes, h.activation, 1.0, h.init)
            self.register_buffer("advantage_scale", torch.tensor(0.0))
            self.register_buffer("option_shares", torch.full((h.num_options,), 1.0 / h.num_options))
        self._build_reference()
        self.average: Policy | None = None
        if h.policy_average > 0:
            self.average = self._frozen_copy()
        self._bind()

    def _choose_critic_input(self, spec: EnvSpec) -> None:
        wanted = self.settings.critic_input
        if wanted == "states" and spec.states_size == 0:
            raise ConfigError(
                f"model.critic_input is states, but task {spec.task} has none; use obs or auto, or an adapter that "
                "delivers states"
            )
        self.sees_states = spec.states_size > 0 and wanted != "obs"

    def _build_option_critic(self) -> None:
        """Values of options that learn from returns: the policy's own, or with states a network that stays here."""
        if not self.sees_states:
            self.target_option_value = Policy(**self.policy_settings).option_value
            return
        h = self.settings
        sizes = [self.critic_input_size, *h.option_hidden_sizes, h.num_options]
        self.option_critic, self.target_option_value = (
            make_network(h.network, sizes, h.activation, 0.01, h.init) for _ in range(2)
        )

    @property
    def critic_input_size(self) -> int:
        """Numbers that critics take: those of the policies, and S with states."""
        assert self.spec is not None
        return self.policy.input_size + (self.spec.states_size if self.sees_states else 0)

    @property
    def value_network(self) -> tuple[nn.Module, str]:
        """What learns values of options from returns (``policy_gradient``), and the name of its optimiser."""
        if self.option_critic is not None:
            return self.option_critic, "critic"
        assert self.policy.option_value is not None
        return self.policy.option_value, "option_value"

    def _check_image_shift(self, spec: EnvSpec) -> None:
        shift, shape = self.settings.image_shift, spec.image_shape
        if shape is not None and shift >= min(shape[1:]):
            raise ConfigError(
                f"model.image_shift is {shift}; images of {spec.task} have {shape[1]} x {shape[2]} pixels, give a few"
            )

    def _build_critics(self, spec: EnvSpec, action_size: int) -> None:
        h = self.settings

        def make_critic() -> TwinCritic | DiscreteCritic:
            common = (h.num_options, h.hidden_sizes, h.activation, h.layer_norm, h.init, h.num_critics)
            if spec.num_actions > 0:
                return DiscreteCritic(self.critic_input_size, action_size, *common, h.network)
            return TwinCritic(self.critic_input_size, action_size, *common, h.critic_atoms, h.value_range, h.network)

        self.critic, self.target_critic = make_critic(), make_critic()
        self.target_actor: nn.Module | None = None
        if h.actor == "deterministic":
            self.target_actor = Policy(**self.policy_settings).actor
        else:
            self.log_temperature = nn.Parameter(torch.tensor(float(h.initial_temperature)).log())
            default = 0.3 * float(torch.tensor(action_size).log()) if spec.num_actions else -float(action_size)
            self.target_entropy = default if h.target_entropy is None else h.target_entropy
            greatest = math.log(action_size) if spec.num_actions else action_size * math.log(2.0)
            if self.target_entropy > greatest:
                raise ConfigError(
                    f"model.target_entropy is {h.target_entropy}; actions of {spec.task} have {greatest:.3g} at most"
                )

    def _frozen_copy(self) -> Policy:
        """The policy as it is, without gradients."""
        copy = Policy(**self.policy_settings)
        copy.load_state_dict(self.policy.state_dict())
        return copy.requires_grad_(False)

    def _build_reference(self) -> None:
        """What distillation compares with: a slow copy, or a place for the teacher."""
        self.reference: Policy | None = None
        if self.distillation.kind == "target":
            self.reference = self._frozen_copy()
        if self.distillation.kl_limit is not None:
            self.log_multiplier = nn.Parameter(torch.tensor(max(1e-6, self.distillation.coefficient)).log())

    def _bind(self) -> None:
        """What the targets use."""
        if self.policy_gradient is None:
            actor = self.policy.actor if self.target_actor is None else self.target_actor
            self.next_values = NextValues(
                self.policy, actor, self.target_critic, self.log_temperature, self.settings  # type: ignore[arg-type]
            )  # fmt: skip

    @property
    def target_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """(online, target) networks that a target-update callback averages."""
        pairs: list[tuple[nn.Module, nn.Module]] = []
        if self.policy_gradient is not None:
            assert self.target_option_value is not None
            pairs.append((self.value_network[0], self.target_option_value))
        else:
            pairs.append((self.critic, self.target_critic))
            if self.target_actor is not None:
                pairs.append((self.policy.actor, self.target_actor))
        if self.policy.encoder is not None:
            assert self.target_encoder is not None
            pairs.append((self.policy.encoder, self.target_encoder))
        return pairs

    def agent_settings(self) -> dict[str, Any]:
        """Plain settings from which a worker builds its OptionAgent."""
        h = self.settings
        return {
            "policy": self.policy_settings,
            "max_option_duration": h.max_option_duration if h.num_options > 1 else 0,
            "min_option_duration": h.min_option_duration,
            "exploration": self.exploration.agent_settings(),
            "greedy_options": h.greedy_options,
            "interruption": h.interruption if h.num_options > 1 else None,
        }

    def agent(self, num_lanes: int = 1, seed: int = 0, student: bool = False) -> OptionAgent:
        """What acts noise-free with a copy of the present policy, N lanes at once; with ``student`` the flat policy.

        Raises:
            ConfigError: there is no student, or no network yet.
        """
        if self.spec is None:
            raise ConfigError("agent(): the networks come with fit, load_from_checkpoint or build(spec); do that first")
        if student and self.policy.student is None:
            raise ConfigError("agent(student=True): this run distilled no student (model.distillation.kind)")
        settings = {**self.agent_settings(), "exploration": None}
        made = OptionAgent(num_lanes=num_lanes, seed=seed, evaluate=True, **settings)
        made.load(self.evaluated_policy.flatten(), self.updates)
        made.use_student = student
        return made

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One Adam per network; the first one's steps (critic, or option value) are those that Lightning counts."""
        h, policy = self.settings, self.policy
        groups: list[tuple[str, list[nn.Parameter], float]] = []
        if self.policy_gradient is None:
            groups.append(("critic", list(self.critic.parameters()), h.critic_lr))
        elif self.option_critic is not None:
            groups.append(("critic", list(self.option_critic.parameters()), h.critic_lr))
        if h.num_options > 1:
            assert policy.option_policy is not None
            assert policy.termination is not None
            assert policy.option_value is not None
            groups += [
                ("option_value", list(policy.option_value.parameters()), h.value_lr),
                ("option_policy", list(policy.option_policy.parameters()), h.option_policy_lr),
                ("termination", list(policy.termination.parameters()), h.termination_lr),
                ("state_value", list(self.state_value.parameters()), h.value_lr),
            ]
        groups.append(("actor", list(policy.actor.parameters()), h.actor_lr))
        if self.log_temperature is not None and h.tune_temperature:
            groups.append(("temperature", [self.log_temperature], h.temperature_lr))
        if policy.student is not None:
            groups.append(("student", list(policy.student.parameters()), self.distillation.student_lr))
        if self.distillation.kl_limit is not None:
            groups.append(("multiplier", [self.log_multiplier], self.distillation.dual_lr))
        if policy.encoder is not None:  # learns with what is counted: the critics, or the values of options
            groups[0][1].extend(policy.encoder.parameters())
        self._optimizer_names = [name for name, _, _ in groups]
        self._rates = [lr for _, _, lr in groups]
        return [torch.optim.Adam(parameters, lr=lr, fused=True) for _, parameters, lr in groups]

    def configure_callbacks(self) -> list[pl.Callback]:
        """Callbacks without which nothing is learned, unless the user gave his own of the kind.

        Raises:
            ConfigError: targets would be moved by several.
        """
        from callbacks import PolicyPublisher, StalenessMonitor, TargetUpdate

        present = self.trainer.callbacks  # type: ignore[attr-defined]
        if sum(isinstance(callback, TargetUpdate) for callback in present) > 1:
            raise ConfigError("trainer.callbacks holds TargetUpdate more than once; keep one, or set model.tau instead")
        wanted = (TargetUpdate, PolicyPublisher, StalenessMonitor)
        return [cls() for cls in wanted if not any(isinstance(callback, cls) for callback in present)]

    # -- the update schedule ------------------------------------------------------------------------------------

    def training_step(self, batch: ReplayBatch, batch_idx: int) -> None:
        """U updates: critic each time, policies every ``policy_delay``-th."""
        h = self.settings
        self.batches_begun += 1
        for callback in self.callbacks():
            callback.on_batch_sampled(self.trainer, self, batch)
        self.env_steps = batch.env_steps
        if h.normalize_observations:
            self.update_moments(batch)
        states = self.states_normalizer if self.sees_states else None
        stacked = Minibatch.of(batch, self.policy.normalizer, self.reward(batch), h.num_options > 1, states)
        if self.distillation.kind == "teacher":
            stacked.raw_obs = batch.obs
        self.schedule_rates()
        self._errors = None if batch.places is None else []
        for u in range(len(batch)):
            if self.policy_gradient is None:
                self.update(stacked.at(u), last=u == len(batch) - 1)
            else:
                self.updates += 1
                with self.phase("policy_gradient"):
                    policy_gradient.update(self, stacked.at(u), last=u == len(batch) - 1)
                self.move_average()
            with self.phase("on_update_end"):  # where targets follow and policies are published
                for callback in self.callbacks():
                    callback.on_update_end(self.trainer, self)
        if batch.places is not None and self._errors is not None:
            self.trainer.datamodule.update_priorities(batch.places, torch.stack(self._errors))  # type: ignore[attr-defined]
        with self.phase("log_training"):
            self.log_training()
        if self.trainer.datamodule.finished:  # type: ignore[attr-defined]
            end_run(self.trainer)

    def update_moments(self, batch: ReplayBatch) -> None:
        """Count what arrived into the running normalisation: observations for all, states for the critics alone."""
        self.moments.update(batch.obs_moments)
        self.moments.write_to(self.policy.normalizer)
        if self.sees_states:
            self.states_moments.update(batch.states_moments)
            self.states_moments.write_to(self.states_normalizer)

    def schedule_rates(self) -> None:
        """Learning rates as they are due after so many environment steps."""
        h = self.settings
        if h.lr_decay_steps > 0:
            factor = linear_decay(self.env_steps, 1.0, h.final_lr, h.lr_decay_steps)
            for wrapped, rate in zip(self.optimizers(), self._rates, strict=True):  # type: ignore[arg-type]
                for group in wrapped.optimizer.param_groups:
                    group["lr"] = rate * factor
            self.record("lr/factor", torch.tensor(factor))

    def update(self, rows: Minibatch, last: bool) -> None:
        """One update: critic, and what is due of actor, options, values and student. ``last`` of its training step."""
        h = self.settings
        rows = self.perceived(rows)
        learning = learning_rows(self, rows)
        with self.phase("update_critic"):
            if h.n_step == 1:
                update_critic(self, learning, counted=last)
            else:
                update_critic_over_segments(self, rows, counted=last)
        self.updates += 1
        if self.policy.encoder is not None:
            learning = learning.detached()
        if self.updates % h.policy_delay == 0:
            with self.phase("update_actor"):
                update_actor(self, learning)
        if h.num_options > 1 and self.updates % h.option_delay == 0:
            with self.phase("update_options"):
                update_options(self, learning)
        if self.policy.student is not None and self.updates % h.policy_delay == 0:
            with self.phase("update_student"):
                update_student(self, learning)
        if self.distillation.kind == "target":
            move_reference(self)
        self.move_average()
        if last and h.num_options > 1:
            with self.phase("update_values"):
                update_values(self, learning)

    def perceived(self, rows: Minibatch) -> Minibatch:
        """Rows whose observations hold the features of their images.

        Those of the observations carry a gradient into the encoder, which the critics' loss alone may use (Yarats et
        al., arXiv 1910.01741). Those of next observations are the target encoder's, without a gradient.
        """
        if rows.image is None or rows.next_image is None:
            return rows
        assert self.target_encoder is not None
        shift = self.settings.image_shift
        obs = self.policy.perceive(rows.obs, random_shift(rows.image, shift))
        with torch.no_grad():
            features = self.target_encoder(random_shift(rows.next_image, shift))
        image = rows.image if self._teacher else None  # it has an encoder of its own
        return replace(rows, obs=obs, next_obs=torch.cat((rows.next_obs, features), -1), image=image, next_image=None)

    def with_encoder(self, network: nn.Module) -> nn.Module:
        """A network and the encoder that learns from its loss, whose gradients are clipped together."""
        return network if self.policy.encoder is None else nn.ModuleList([network, self.policy.encoder])

    @torch.no_grad()
    def note_errors(self, q: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """Keep absolute TD errors for a sampler that wants them: [C, B] and [B], or [C, B, K] and [B, K] with weights.

        Means over critics; over options or steps by the weights [B, K].
        """
        if self._errors is not None:
            error = (q - target).abs().mean(0)
            self._errors.append(error if weight is None else (error * weight).sum(1))

    def reward(self, batch: ReplayBatch) -> Tensor:
        """What is learned from: the task's reward, scaled, and what callbacks add to it."""
        reward = batch.reward * self.settings.reward_scale
        for callback in self.callbacks():
            intrinsic = callback.intrinsic_reward(self.trainer, self, batch)
            if intrinsic is not None:
                reward = reward + intrinsic
                self.record("reward/intrinsic", intrinsic)
        return reward

    def option_values(self, judged: Tensor) -> Tensor:
        """Q_Omega(s, .) as the options' losses use it, without gradient: [B, J] -> [B, K], J what critics see."""
        if self.policy_gradient is None:
            return self.next_values.options(judged)
        assert self.target_option_value is not None
        with torch.no_grad():
            return self.target_option_value(judged).float()

    @torch.no_grad()
    def move_average(self) -> None:
        """The averaged policy follows by ``policy_average``."""
        if self.average is not None:
            averages: list[Tensor] = list(self.average.parameters())
            present: list[Tensor] = list(self.policy.parameters())
            torch._foreach_lerp_(averages, present, self.settings.policy_average)

    @property
    def evaluated_policy(self) -> Policy:
        """What evaluations and :meth:`agent` play with: the averaged policy where there is one."""
        if self.average is None:
            return self.policy
        with torch.no_grad():  # statistics, cost and the like are not averaged
            for mine, present in zip(self.average.buffers(), self.policy.buffers(), strict=True):
                mine.copy_(present)
        return self.average

    @property
    def reference_policy(self) -> Policy | None:
        """What the policies are kept near: a slow copy, or a teacher."""
        return self._teacher[0] if self._teacher else self.reference

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Freeze the targets, load the teacher, refuse what one device and one scaler cannot do."""
        for _, target in self.target_pairs:
            target.requires_grad_(False)
        d, h = self.distillation, self.settings
        if d.teacher is not None:  # only where something is distilled: a finished run is evaluated without its teacher
            assert self.spec is not None
            self._teacher = (load_teacher(d.teacher, self.spec, h.num_options, h.actor).to(self.device),)
        if str(self.trainer.precision) == "16-mixed":
            raise ConfigError("trainer.precision 16-mixed needs a scaler per optimiser; use bf16-mixed or 32-true")
        self._join_ranks()
        self._open_logs()

    def _open_logs(self) -> None:
        """Nothing is refused any more: the data module may make the run's folder."""
        open_logs = getattr(getattr(self.trainer, "datamodule", None), "open_logs", None)
        if open_logs is not None:
            open_logs()

    def _join_ranks(self) -> None:
        """With several ranks: begin with the same parameters, and each with noise of its own from here on."""
        check_strategy(getattr(self.trainer, "strategy", None))
        self.ranks = ranks_of(self.trainer)
        if self.ranks.size > 1:
            settings = {**self.hparams, **self.groups}
            self.ranks.check_settings({f"model.{name}": value for name, value in settings.items()})
            self.ranks.broadcast_module(self)
            self.ranks.check_equal(self.state_dict().items())
            torch.manual_seed(torch.initial_seed() + RANK_STRIDE * self.ranks.rank)

    def on_validation_start(self) -> None:
        """Evaluations need the ranks too, also where nothing is trained."""
        self.ranks = ranks_of(self.trainer)
        self._open_logs()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """With several ranks: what wants to stop this one's loop becomes a vote, and all stop after the same step."""
        if self.ranks.size > 1 and self.trainer.should_stop and not self.trainer.datamodule.finished:  # type: ignore[attr-defined]
            self.trainer.should_stop = False
            self.trainer.datamodule.ask_to_stop()  # type: ignore[attr-defined]

    def on_train_start(self) -> None:
        """Publish the policy with the exploration that fits the step count, before any worker acts."""
        self.set_exploration()
        if self._rates_before is not None:  # the optimisers came back with their learning rates; a changed one wins
            for wrapped, name, rate in zip(self.optimizers(), self._optimizer_names, self._rates, strict=True):  # type: ignore[arg-type]
                if self._rates_before.get(name) != rate:
                    for group in wrapped.optimizer.param_groups:
                        group["lr"] = rate

    def set_exploration(self) -> None:
        """Write the current noise multiplier and uniform probability into what workers receive."""
        multiplier, uniform = self.exploration.at(self.env_steps, learning=self.updates > 0)
        self.policy.exploration.copy_(torch.tensor([multiplier, uniform]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Counters and the task's sizes, from which :meth:`on_load_checkpoint` builds the networks."""
        assert self.spec is not None
        checkpoint["claw"] = {
            "spec": self.spec.to_json(),
            "updates": self.updates,
            "env_steps": self.env_steps,
            "policy": self.policy_settings,
            "critic_input": "states" if self.sees_states else "obs",
            "groups": {name: None if group is None else asdict(group) for name, group in self.groups.items()},
            "start": {name: self.settings[name] for name in AT_THE_START},
            "rates": dict(zip(self._optimizer_names, self._rates, strict=True)),
            "means": {"sums": dict(self._sums), "counts": dict(self._counts)},  # up to the next logging step
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore counters; build the networks if that has not happened (``load_from_checkpoint``)."""
        stored = checkpoint.get("claw")
        if stored is None:
            raise ConfigError("ckpt_path: this checkpoint was not written by claw-lightning")
        spec = stored_spec(stored)
        for name, value in checkpoint.get("state_dict", {}).items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ConfigError(f"ckpt_path: {name} of the checkpoint is not finite; take an older one")
        if self.spec is None:
            self._take_settings(stored)
            self.build(spec)
            # Lightning has written the caller's arguments over the checkpoint's hyper_parameters by now.
            self._apply_changes(stored.get("start", {}), checkpoint)
        else:
            self._check_fits(spec, checkpoint)
            if self._trainer is not None and self.trainer.state.fn == "fit":
                self._apply_changes(checkpoint.get("hyper_parameters", {}), checkpoint)
        self.updates, self.env_steps = stored["updates"], stored["env_steps"]
        decays = checkpoint.get("hyper_parameters", {}).get("lr_decay_steps", 0) > 0
        # Of a run whose rates fell, what they have become is no rate of this one's.
        self._rates_before = {} if decays and self.settings.lr_decay_steps == 0 else stored.get("rates", {})
        means = stored.get("means", {"sums": {}, "counts": {}})
        self._sums = {name: total.to(self.device) for name, total in means["sums"].items()}
        self._counts = dict(means["counts"])

    def _take_settings(self, stored: dict[str, Any]) -> None:
        """Settings of a checkpoint from which a module is made (``load_from_checkpoint``); the caller's own win.

        Raises:
            ConfigError: the caller's are those of other networks; one line.
        """
        # Of a checkpoint from before there was a choice, critics see what policies see.
        theirs, ours = stored.get("critic_input", "obs"), self.settings.critic_input
        pairs = [] if ours in ("auto", theirs) else [("critic_input", theirs, ours)]
        self.hparams["critic_input"] = theirs
        groups = stored.get("groups", {})
        for name, values in groups.items():
            if name not in self._given_groups:
                setattr(self, name, None if values is None else GROUPS[name](**values))
        now = {name: None if group is None else asdict(group) for name, group in self.groups.items()}
        pairs += [each for each in zip(STRUCTURE, structure(groups), structure(now), strict=True) if each[1] != each[2]]
        for name, theirs, ours in pairs:
            raise ConfigError(f"model.{name} {ours} does not fit the checkpoint, made with {theirs}; leave it out")
        check_settings(self.settings, self.groups)

    def _apply_changes(self, stored: dict[str, Any], checkpoint: dict[str, Any]) -> None:
        """Make settings that differ from the checkpoint's take effect, where its tensors would hide them.

        Raises:
            ConfigError: a setting that differs would do nothing; one line.
        """
        h, state = self.settings, checkpoint["state_dict"]
        groups = checkpoint["claw"].get("groups", {})
        theirs, ours = (groups.get("distillation") or {}).get("coefficient"), self.distillation.coefficient
        if self.distillation.kl_limit is not None and theirs not in (None, ours):
            raise ConfigError(
                f"model.distillation.coefficient {ours} would do nothing: with kl_limit it is where the multiplier "
                f"began, and that of the checkpoint, which began with {theirs}, goes on; leave it out"
            )
        fixed_cost, fixed_temperature = h.target_decision_rate is None, not h.tune_temperature
        for name, what in AT_THE_START.items():
            theirs, ours = stored.get(name, h[name]), h[name]
            if theirs == ours:
                continue
            if name == "deliberation_cost" and fixed_cost:
                for key in state:
                    if key.endswith("switch_cost"):
                        state[key] = torch.full_like(state[key], ours)
            elif name == "initial_temperature" and fixed_temperature and "log_temperature" in state:
                state["log_temperature"] = torch.full_like(state["log_temperature"], math.log(ours))
            else:
                raise ConfigError(
                    f"model.{name} {ours} would do nothing: it acts at the beginning of a run, and the {what} of the "
                    f"checkpoint, which began with {theirs}, go on as they are; leave it out"
                )

    def _check_fits(self, spec: EnvSpec, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another task or of networks of another shape, naming both."""
        assert self.spec is not None
        pairs = [(f"task {spec.task}", f"task {self.spec.task}")] if spec.task != self.spec.task else []
        for name in ("obs_size", "action_size", "image_shape", *(("states_size",) if self.sees_states else ())):
            if getattr(spec, name) != getattr(self.spec, name):
                pairs.append((f"{name} {getattr(spec, name)}", f"{name} {getattr(self.spec, name)}"))
        stored = checkpoint.get("hyper_parameters", {})
        for name in ("num_options", "actor", "hidden_sizes", "option_hidden_sizes", "layer_norm", "option_heads",
                     "num_critics", "critic_atoms", "value_range", "network", "activation", "normalize_observations",
                     "tune_temperature", *(("image_features",) if spec.image_shape else ())):  # fmt: skip
            theirs, ours = stored.get(name, self.settings[name]), self.settings[name]
            if (list(theirs) != list(ours)) if isinstance(ours, (list, tuple)) else theirs != ours:
                pairs.append((f"model.{name} {theirs}", f"model.{name} {ours}"))
        critics = [checkpoint["claw"].get("critic_input", "obs"), "states" if self.sees_states else "obs"]
        if critics[0] != critics[1]:
            pairs.append((f"model.critic_input {critics[0]}", f"model.critic_input {critics[1]}"))
        averages = [float(rate) > 0 for rate in (stored.get("policy_average", 0.0), self.settings.policy_average)]
        if averages[0] != averages[1]:
            pairs.append((f"model.policy_average {stored.get('policy_average', 0.0)}",
                          f"model.policy_average {self.settings.policy_average}"))  # fmt: skip
        groups = checkpoint["claw"].get("groups", {})
        now = {name: None if group is None else asdict(group) for name, group in self.groups.items()}
        for name, theirs, ours in zip(STRUCTURE, structure(groups), structure(now), strict=True):
            if theirs != ours:
                pairs.append((f"model.{name} {theirs}", f"model.{name} {ours}"))
        if pairs:
            theirs, ours = (", ".join(side) for side in zip(*pairs, strict=True))
            raise ConfigError(f"ckpt_path: the checkpoint was made with {theirs}; this run has {ours}")
        missing = sorted(set(self.state_dict()) - set(checkpoint.get("state_dict", self.state_dict())))
        if missing:
            raise ConfigError(
                f"ckpt_path: the checkpoint is of another version of claw-lightning; it lacks {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            )
