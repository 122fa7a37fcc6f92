"""OptionCritic: the update schedule. The equations are in losses.py, the acting networks in rollout/networks.py.

Shapes: U updates per training_step, B batch, O observation, A action, K options, C critics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from claw_lightning import losses
from claw_lightning.checks import check_numbers
from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from claw_lightning.hooks import UpdateCallback
from claw_lightning.networks import TwinCritic
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.envs.base import EnvSpec
from claw_lightning.rollout.networks import ACTIVATIONS, Policy, mlp
from claw_lightning.rollout.normalizer import RunningMoments


class OptionCritic(pl.LightningModule):
    """Off-policy option-critic with twin critics; with ``num_options`` 1 it is TD3 (deterministic) or SAC (gaussian).

    Public attributes for callbacks: :attr:`policy` (what workers run), :attr:`critic`, :attr:`option_value`,
    :attr:`state_value`, :attr:`updates`, :attr:`env_steps`, :attr:`target_pairs`, :attr:`spec`.

    Args:
        num_options: K; 1 switches the option machinery off.
        actor: ``deterministic`` (TD3) or ``gaussian`` (SAC with tuned temperature).
        gamma: discount per environment step.
        deliberation_cost: c, charged for every switch of options: inside the arrival value (full form) and the
            termination loss.
        arrival: how the critic's target values the arrival in s': ``expected`` mixes all options, ``sampled`` draws one
            (unbiased, and nearly as cheap as K = 1).
        option_batch_size: rows of each batch from which option policy, termination and values learn; 0: all.
        max_option_duration: steps after which a worker switches anyway; 0: no cap. Behaviour only.
        min_option_duration: steps before which a worker does not end an option.
        hidden_sizes: of actor and critics.
        option_hidden_sizes: of option policy, termination and values.
        activation: relu, elu, tanh or silu.
        init: orthogonal, xavier, he, or torch (PyTorch's own).
        layer_norm: layer normalisation in the critics.
        critic_lr: learning rate; one optimiser (Adam) per network. Likewise the next five.
        actor_lr: of the action policy.
        option_policy_lr: of the option policy.
        termination_lr: of the termination network.
        value_lr: of option value and state value.
        temperature_lr: of the Gaussian actor's temperature.
        policy_delay: critic updates per update of the action policy (TD3).
        option_delay: critic updates per update of option policy and termination.
        target_noise: standard deviation of the target policy's smoothing noise (deterministic actor).
        target_noise_clip: its bound.
        action_penalty: weight of the mean squared action in the deterministic actor's loss.
        initial_temperature: alpha of the Gaussian actor at the start.
        target_entropy: of the Gaussian actor; None: minus the action size.
        option_entropy: weight of the option policy's entropy.
        termination_entropy: weight of the termination's entropy: keeps beta off 0 and 1.
        initial_termination: beta at the start.
        max_grad_norm: clip of each network's gradient norm; 0: none.
        exploration: noise of the workers.
        normalize_observations: running normalisation in front of all networks.
        obs_clip: bound of normalised observations.
        reward_scale: factor on rewards, in the learner only.
        greedy_options: in evaluation, end an option where beta > 1/2 and take the most probable; else sample.
    """

    def __init__(
        self,
        num_options: int = 4,
        actor: Literal["deterministic", "gaussian"] = "deterministic",
        gamma: float = 0.99,
        deliberation_cost: float = 0.0,
        arrival: Literal["expected", "sampled"] = "expected",
        option_batch_size: int = 0,
        max_option_duration: int = 0,
        min_option_duration: int = 1,
        hidden_sizes: Sequence[int] = (256, 256),
        option_hidden_sizes: Sequence[int] = (128, 128),
        activation: Literal["relu", "elu", "tanh", "silu"] = "relu",
        init: Literal["orthogonal", "xavier", "he", "torch"] = "orthogonal",
        layer_norm: bool = False,
        critic_lr: float = 1e-3,
        actor_lr: float = 1e-3,
        option_policy_lr: float = 3e-4,
        termination_lr: float = 3e-4,
        value_lr: float = 1e-3,
        temperature_lr: float = 3e-4,
        policy_delay: int = 2,
        option_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        action_penalty: float = 0.0,
        initial_temperature: float = 0.1,
        target_entropy: float | None = None,
        option_entropy: float = 0.01,
        termination_entropy: float = 0.01,
        initial_termination: float = 0.1,
        max_grad_norm: float = 0.0,
        exploration: Exploration | None = None,
        normalize_observations: bool = True,
        obs_clip: float = 5.0,
        reward_scale: float = 1.0,
        greedy_options: bool = True,
    ) -> None:
        super().__init__()
        self.exploration = exploration or Exploration()
        self.save_hyperparameters(ignore=["exploration"])
        self.hparams.pop("_instantiator", None)  # written by the command; a stored module is built without it
        self.automatic_optimization = False
        self._check()
        self.spec: EnvSpec | None = None
        self.updates = 0
        self.env_steps = 0
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._rate_mark = (0.0, 0, 0)
        #: Set when a loss stopped being finite: nothing of that state is saved.
        self.diverged = False

    @property
    def settings(self) -> Any:
        """The constructor's arguments by name (Lightning's hparams)."""
        return self.hparams

    # -- construction -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        h = self.settings
        if h.num_options < 1:
            raise ConfigError(f"model.num_options is {h.num_options}; it must be at least 1 (1: no options)")
        if not 0.0 <= h.gamma < 1.0:
            raise ConfigError(f"model.gamma is {h.gamma}; it must lie in [0, 1)")
        for name in ("policy_delay", "option_delay"):
            if h[name] < 1:
                raise ConfigError(f"model.{name} is {h[name]}; it must be at least 1")
        if not 0.0 < h.initial_termination < 1.0:
            raise ConfigError(f"model.initial_termination is {h.initial_termination}; it must lie between 0 and 1")
        if h.max_option_duration < 0 or h.min_option_duration < 1:
            raise ConfigError(
                f"model.min_option_duration ({h.min_option_duration}) must be at least 1 and "
                f"model.max_option_duration ({h.max_option_duration}) at least 0 (no cap)"
            )
        if 0 < h.max_option_duration < h.min_option_duration:
            raise ConfigError(
                f"model.min_option_duration ({h.min_option_duration}) is above "
                f"model.max_option_duration ({h.max_option_duration})"
            )
        for name in ("hidden_sizes", "option_hidden_sizes"):
            if not h[name] or min(h[name]) < 1:
                raise ConfigError(f"model.{name} is {list(h[name])}; give at least one positive size")
        positive = [key for key in h if key.endswith("_lr")] + ["initial_temperature", "obs_clip"]
        check_numbers("model", {name: h[name] for name in positive}, above=0.0)
        least_zero = ("deliberation_cost", "target_noise", "target_noise_clip", "action_penalty", "option_entropy",
                      "termination_entropy", "max_grad_norm", "option_batch_size")  # fmt: skip
        check_numbers("model", {name: h[name] for name in least_zero}, least=0.0)
        check_numbers("model", {name: h[name] for name in ("target_entropy", "reward_scale")})
        if h.reward_scale == 0.0:
            raise ConfigError("model.reward_scale is 0; nothing could be learned from such rewards")
        if h.activation not in ACTIVATIONS:
            raise ConfigError(f"model.activation is '{h.activation}'; use one of {', '.join(ACTIVATIONS)}")

    def configure_model(self) -> None:
        """Build the networks as soon as the task's sizes are known (from the data module or a checkpoint)."""
        if self.spec is not None or self._trainer is None:  # without a trainer a checkpoint is being loaded
            return
        data = getattr(self.trainer, "datamodule", None)
        if data is None or data.spec is None:
            raise ConfigError("OptionCritic needs a ReplayDataModule: its task gives the networks their sizes")
        self.build(data.spec)

    def build(self, spec: EnvSpec) -> None:
        """Build all networks for a task."""
        h = self.settings
        if spec.num_actions > 0:
            raise ConfigError(
                f"task {spec.task} has {spec.num_actions} discrete actions; "
                f"model.actor '{h.actor}' needs continuous ones"
            )
        self.spec = spec
        self.policy_settings: dict[str, Any] = {
            "obs_size": spec.obs_size,
            "action_size": spec.action_size,
            "num_options": h.num_options,
            "actor": h.actor,
            "hidden_sizes": list(h.hidden_sizes),
            "option_hidden_sizes": list(h.option_hidden_sizes),
            "activation": h.activation,
            "init": h.init,
            "normalize": h.normalize_observations,
            "obs_clip": h.obs_clip,
            "initial_termination": h.initial_termination,
        }
        self.policy = Policy(**self.policy_settings)
        self.moments = RunningMoments(spec.obs_size)

        def make_critic() -> TwinCritic:
            return TwinCritic(
                spec.obs_size, spec.action_size, h.num_options, h.hidden_sizes, h.activation, h.layer_norm, h.init
            )

        self.critic, self.target_critic = make_critic(), make_critic()
        self.target_actor: nn.Module | None = None
        if h.actor == "deterministic":
            self.target_actor = Policy(**self.policy_settings).actor
        for online, target in self.target_pairs:
            target.load_state_dict(online.state_dict())
            target.requires_grad_(False)
        if h.actor == "gaussian":
            self.log_temperature = nn.Parameter(torch.tensor(float(h.initial_temperature)).log())
            self.target_entropy = -float(spec.action_size) if h.target_entropy is None else h.target_entropy
        if h.num_options > 1:
            sizes = [spec.obs_size, *h.option_hidden_sizes]
            self.option_value = mlp([*sizes, h.num_options], h.activation, 1.0, h.init)
            self.state_value = mlp([*sizes, 1], h.activation, 1.0, h.init)

    @property
    def target_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """(online, target) networks that a target-update callback averages."""
        pairs: list[tuple[nn.Module, nn.Module]] = [(self.critic, self.target_critic)]
        if self.target_actor is not None:
            pairs.append((self.policy.actor, self.target_actor))
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
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """One Adam per network; the critic's comes first and is the one whose steps Lightning counts."""
        h = self.settings
        groups: list[tuple[str, list[nn.Parameter], float]] = [
            ("critic", list(self.critic.parameters()), h.critic_lr),
            ("actor", list(self.policy.actor.parameters()), h.actor_lr),
        ]
        if h.num_options > 1:
            assert self.policy.option_policy is not None
            assert self.policy.termination is not None
            groups += [
                ("option_policy", list(self.policy.option_policy.parameters()), h.option_policy_lr),
                ("termination", list(self.policy.termination.parameters()), h.termination_lr),
                ("option_value", list(self.option_value.parameters()), h.value_lr),
                ("state_value", list(self.state_value.parameters()), h.value_lr),
            ]
        if h.actor == "gaussian":
            groups.append(("temperature", [self.log_temperature], h.temperature_lr))
        self._optimizer_names = [name for name, _, _ in groups]
        return [torch.optim.Adam(parameters, lr=lr, fused=True) for _, parameters, lr in groups]

    def configure_callbacks(self) -> list[pl.Callback]:
        """Callbacks without which nothing is learned, unless the user gave his own of the kind."""
        from callbacks import PolicyPublisher, StalenessMonitor, TargetUpdate

        present = self.trainer.callbacks  # type: ignore[attr-defined]
        wanted = (TargetUpdate, PolicyPublisher, StalenessMonitor)
        return [cls() for cls in wanted if not any(isinstance(callback, cls) for callback in present)]

    # -- the update schedule ------------------------------------------------------------------------------------

    def training_step(self, batch: ReplayBatch, batch_idx: int) -> None:
        """U updates: critic each time, policies every ``policy_delay``-th."""
        self._batch_hook("on_batch_sampled", batch)
        self.env_steps = batch.env_steps
        if self.settings.normalize_observations:
            self.moments.update(batch.moments)
            self.moments.write_to(self.policy.normalizer)
        obs, next_obs = self.policy.normalizer(batch.obs), self.policy.normalizer(batch.next_obs)
        action, option, terminated = batch.action, batch.option, batch.terminated
        reward = batch.reward * self.settings.reward_scale
        for u in range(len(batch)):
            self.update_critic(
                obs[u], action[u], option[u], reward[u], terminated[u], next_obs[u], last=u == len(batch) - 1
            )
            self.updates += 1
            if self.updates % self.settings.policy_delay == 0:
                self.update_actor(obs[u], option[u])
            if self.settings.num_options > 1 and self.updates % self.settings.option_delay == 0:
                self.update_options(next_obs[u], option[u], terminated[u])
            self._batch_hook("on_update_end")
        if self.settings.num_options > 1:
            self.update_values(next_obs[-1])
        self._log_training()
        if self.trainer.datamodule.finished:  # type: ignore[attr-defined]
            self.trainer.should_stop = True
            # Lightning then validates once more on the way out, but else only in epochs that are due.
            self.trainer.check_val_every_n_epoch = None

    def update_critic(
        self, obs: Tensor, action: Tensor, option: Tensor, reward: Tensor, terminated: Tensor, next_obs: Tensor,
        last: bool,
    ) -> None:  # fmt: skip
        """Twin critics towards ``r + gamma (1 - terminated) U(s', o)``."""
        with torch.no_grad():
            value = self.expected_arrival if self.settings.arrival == "expected" else self.sampled_arrival
            target = losses.td_target(reward, terminated, value(next_obs, option), self.settings.gamma)
        q = self.critic(obs, action, option)
        loss = losses.critic_loss(q, target)
        self._descend("critic", loss, self.critic, counted=last)
        self._record("loss/critic", loss)
        self._record("q/mean", q)

    def expected_arrival(self, next_obs: Tensor, option: Tensor) -> Tensor:
        """U(s', o) of the executed options, exactly: all options' values at s', mixed. [B, O], [B] -> [B]."""
        arrival = losses.arrival_value(
            self.next_option_values(next_obs),
            self.policy.option_probs(next_obs),
            self.policy.beta(next_obs),
            self.settings.deliberation_cost,
        )
        return arrival.gather(1, option.unsqueeze(1)).squeeze(1)

    def sampled_arrival(self, next_obs: Tensor, option: Tensor) -> Tensor:
        """U(s', o) by one draw: end with beta, then draw from the option policy. [B, O], [B] -> [B].

        Unbiased for :meth:`expected_arrival`, at the price of one option's value in place of K; its extra variance is
        that of Q_Omega(s', .) over options, which is small beside the spread over states.
        """
        ended = torch.zeros_like(option, dtype=torch.bool)
        if self.settings.num_options > 1:
            beta = self.policy.beta(next_obs).gather(1, option.unsqueeze(1)).squeeze(1)
            ended = torch.rand_like(beta) < beta
            selected = torch.multinomial(self.policy.option_probs(next_obs), 1).squeeze(1)
            option = torch.where(ended, selected, option)
        actor = self.policy.actor if self.target_actor is None else self.target_actor
        action, bonus = self.target_action(actor(next_obs, option))
        value = self.target_critic(next_obs, action, option).amin(0) + bonus
        return value - self.settings.deliberation_cost * ended

    def next_option_values(self, next_obs: Tensor) -> Tensor:
        """Q_Omega(s', o) of all options from the target networks: the smaller twin per option, [B, K]."""
        actor = self.policy.actor if self.target_actor is None else self.target_actor
        actions, bonus = self.target_action(actor.forward_all(next_obs))  # type: ignore[operator]
        return self.target_critic.forward_all(next_obs, actions).amin(0) + bonus

    def target_action(self, raw: Tensor) -> tuple[Tensor, Tensor | float]:
        """Action of the target policy [..., A] and the entropy bonus [...] (0 for deterministic actors).

        Deterministic: the target actor's action with clipped noise (TD3's smoothing), one draw per option.
        Gaussian: a sample of the current policy and ``-alpha log pi`` (SAC).
        """
        h = self.settings
        if self.target_actor is None:
            action, log_prob = self.policy.actor.sample(raw)
            return action, -self.log_temperature.exp() * log_prob
        action = self.policy.actor.mean_action(raw).float()
        noise = (torch.randn_like(action) * h.target_noise).clamp_(-h.target_noise_clip, h.target_noise_clip)
        return (action + noise).clamp_(-1.0, 1.0), 0.0

    def update_actor(self, obs: Tensor, option: Tensor) -> None:
        """Action policy of the executed options uphill on the critics, whose weights stay as they are."""
        actor, weight = self.policy.actor, torch.ones(len(obs), device=obs.device)
        self.critic.requires_grad_(False)
        raw = actor(obs, option)
        if self.target_actor is not None:
            action = actor.mean_action(raw)
            q = self.critic(obs, action, option, first=1)[0]
            loss = losses.deterministic_actor_loss(q, action.float(), weight, self.settings.action_penalty)
        else:
            action, log_prob = actor.sample(raw)
            q = self.critic(obs, action, option).amin(0)
            alpha = self.log_temperature.exp().detach()
            loss = losses.gaussian_actor_loss(q, log_prob, alpha, weight)
            temperature_loss = losses.temperature_loss(
                self.log_temperature, log_prob.detach(), self.target_entropy, weight
            )
            self._descend("temperature", temperature_loss, None)
            self._record("temperature", alpha)
        self._descend("actor", loss, actor)
        self.critic.requires_grad_(True)
        self._record("loss/actor", loss)
        self._record("action/saturation", (action.detach().abs() > 0.99).float())

    def update_options(self, next_obs: Tensor, option: Tensor, terminated: Tensor) -> None:
        """Option policy and termination at s' for the option that arrives there; expected gradients (all options)."""
        h = self.settings
        assert self.policy.option_policy is not None
        assert self.policy.termination is not None
        if h.option_batch_size > 0:
            next_obs, option, terminated = (x[: h.option_batch_size] for x in (next_obs, option, terminated))
        with torch.no_grad():
            q_next = self.next_option_values(next_obs)
        alive = (~terminated).float()
        probs, beta = self.policy.option_probs(next_obs), self.policy.beta(next_obs)
        arriving = nn.functional.one_hot(option, h.num_options).float() * alive.unsqueeze(1)
        # The option policy is asked where the arriving option ends: weight beta (equation 1.3).
        chosen = (arriving * beta).sum(1).detach()
        policy_entropy = losses.categorical_entropy(probs)
        policy_loss = losses.option_policy_loss(probs, q_next, chosen)
        self._descend(
            "option_policy", policy_loss - h.option_entropy * (policy_entropy * alive).mean(), self.policy.option_policy
        )
        termination_loss = losses.termination_loss(beta, q_next, probs, h.deliberation_cost, arriving)
        termination_entropy = (losses.bernoulli_entropy(beta) * arriving).sum() / arriving.sum().clamp_min(1.0)
        self._descend(
            "termination", termination_loss - h.termination_entropy * termination_entropy, self.policy.termination
        )
        for name, value in (
            ("loss/option_policy", policy_loss),
            ("loss/termination", termination_loss),
            ("option/policy_entropy", policy_entropy),
            ("option/beta", beta),
            ("option/beta_extreme", ((beta < 0.01) | (beta > 0.99)).float()),
            ("option/value_spread", q_next.std(1)),
        ):
            self._record(name, value)

    def update_values(self, next_obs: Tensor) -> None:
        """Q_Omega(s, .) and V(s) as networks of the state alone, for diagnostics; once per ``training_step``.

        Targets and advantages never use them: A from two separately learned values would not sum to zero over options.
        """
        if self.settings.option_batch_size > 0:
            next_obs = next_obs[: self.settings.option_batch_size]
        with torch.no_grad():
            q_next = self.next_option_values(next_obs)
        value_loss = losses.value_regression_loss(self.option_value(next_obs).float(), q_next)
        self._descend("option_value", value_loss, self.option_value)
        with torch.no_grad():
            value = losses.state_value(q_next, self.policy.option_probs(next_obs))
        state_loss = losses.value_regression_loss(self.state_value(next_obs).float().squeeze(1), value)
        self._descend("state_value", state_loss, self.state_value)
        self._record("loss/option_value", value_loss)
        self._record("loss/state_value", state_loss)

    def _descend(self, name: str, loss: Tensor, network: nn.Module | None, counted: bool = False) -> None:
        """One optimiser step; only ``counted`` ones go through Lightning's wrapper, which counts global_step."""
        wrapped = self.optimizers()[self._optimizer_names.index(name)]  # type: ignore[index]
        optimizer = wrapped.optimizer
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.settings.max_grad_norm > 0 and network is not None:
            norm = nn.utils.clip_grad_norm_(network.parameters(), self.settings.max_grad_norm)
            self._record(f"grad_norm/{name}", norm)
        if counted:
            wrapped.step()
        else:
            optimizer.step()

    def _batch_hook(self, name: str, *args: Any) -> None:
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, UpdateCallback):
                getattr(callback, name)(self.trainer, self, *args)

    # -- evaluation ---------------------------------------------------------------------------------------------

    def validation_step(self, seed: int, batch_idx: int) -> None:
        """Noise-free episodes in the evaluator's process."""
        self._evaluate(int(seed), "val")

    def test_step(self, seed: int, batch_idx: int) -> None:
        """As validation, on another seed."""
        self._evaluate(int(seed), "test")

    def _evaluate(self, seed: int, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        result = data.evaluate(self.policy, self.agent_settings(), data.eval_episodes, seed)
        if result is None or not result["return"]:
            return
        metrics = {
            f"{stage}/{name}": sum(values) / len(values)
            for name in ("return", "length", "success")
            if (values := result[name])
        }
        returns = torch.tensor(result["return"])
        metrics[f"{stage}/return_std"] = float(returns.std()) if len(returns) > 1 else 0.0
        for name, value in metrics.items():
            self.log(name, value, batch_size=1, logger=False, prog_bar=name == "val/return")
        self._to_loggers({**metrics, "time/env_steps": float(self.env_steps), "time/updates": float(self.updates)})

    # -- logging ------------------------------------------------------------------------------------------------

    def _record(self, name: str, value: Tensor) -> None:
        """Accumulate a mean on the device; nothing is synchronised before the next logging step."""
        mean = value.detach().float().mean()
        self._sums[name] = self._sums[name] + mean if name in self._sums else mean
        self._counts[name] = self._counts.get(name, 0) + 1

    def _log_training(self) -> None:
        trainer = self.trainer
        if (trainer.fit_loop.total_batch_idx + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        metrics = {name: float(total / self._counts[name]) for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        broken = [name for name, value in metrics.items() if name.startswith("loss/") and not math.isfinite(value)]
        if broken:
            self.diverged = True
            raise ConfigError(
                f"{broken[0]} is no longer finite after {self.updates} updates: lower model.{broken[0][5:]}_lr or "
                "model.reward_scale, or set model.max_grad_norm; the last checkpoint is from before"
            )
        now, steps, updates = time.monotonic(), self.env_steps, self.updates
        then, steps_then, updates_then = self._rate_mark
        self._rate_mark = (now, steps, updates)
        metrics.update({"time/env_steps": float(steps), "time/updates": float(updates)})
        if then > 0:
            seconds = max(1e-9, now - then)
            metrics["time/env_steps_per_s"] = (steps - steps_then) / seconds
            metrics["time/updates_per_s"] = (updates - updates_then) / seconds
        metrics.update(data.log_metrics())
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, UpdateCallback):
                metrics.update(callback.metrics())
        self._to_loggers(metrics)
        self.latest_metrics = metrics

    #: Values of the last logging step, for progress bars and callbacks.
    latest_metrics: dict[str, float] = {}

    def _to_loggers(self, metrics: dict[str, float]) -> None:
        """Straight to the loggers with environment steps as the axis; ``self.log`` would cost more than an update."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.env_steps)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def on_fit_start(self) -> None:
        """Tell the loggers what runs."""
        for _, target in self.target_pairs:
            target.requires_grad_(False)
        if self.trainer.world_size > 1:
            raise ConfigError(
                f"trainer.devices gives {self.trainer.world_size} ranks; this version trains on one device"
            )
        if str(self.trainer.precision) == "16-mixed":
            raise ConfigError("trainer.precision 16-mixed needs a scaler per optimiser; use bf16-mixed or 32-true")

    def on_train_start(self) -> None:
        """Publish the policy with the exploration that fits the step count, before any worker acts."""
        self.set_exploration()

    def set_exploration(self) -> None:
        """Write the current noise multiplier and uniform probability into what workers receive."""
        multiplier, uniform = self.exploration.at(self.env_steps, learning=self.updates > 0)
        self.policy.exploration.copy_(torch.tensor([multiplier, uniform]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Counters and the task's sizes, from which :meth:`on_load_checkpoint` builds the networks."""
        assert self.spec is not None
        checkpoint["claw"] = {"spec": self.spec.to_json(), "updates": self.updates, "env_steps": self.env_steps}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore counters; build the networks if that has not happened (``load_from_checkpoint``)."""
        stored = checkpoint.get("claw")
        if stored is None:
            raise ConfigError("ckpt_path: this checkpoint was not written by claw-lightning")
        spec = EnvSpec.from_json(stored["spec"])
        if self.spec is None:
            self.build(spec)
        else:
            self._check_fits(spec, checkpoint)
        self.updates, self.env_steps = stored["updates"], stored["env_steps"]

    def _check_fits(self, spec: EnvSpec, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another task or of networks of another shape, naming both."""
        assert self.spec is not None
        pairs = [(f"task {spec.task}", f"task {self.spec.task}")] if spec.task != self.spec.task else []
        for name in ("obs_size", "action_size"):
            if getattr(spec, name) != getattr(self.spec, name):
                pairs.append((f"{name} {getattr(spec, name)}", f"{name} {getattr(self.spec, name)}"))
        stored = checkpoint.get("hyper_parameters", {})
        for name in ("num_options", "actor", "hidden_sizes", "option_hidden_sizes", "layer_norm"):
            theirs, ours = stored.get(name, self.settings[name]), self.settings[name]
            if (list(theirs) != list(ours)) if isinstance(ours, (list, tuple)) else theirs != ours:
                pairs.append((f"model.{name} {theirs}", f"model.{name} {ours}"))
        if pairs:
            theirs, ours = (", ".join(side) for side in zip(*pairs, strict=True))
            raise ConfigError(f"ckpt_path: the checkpoint was made with {theirs}; this run has {ours}")
