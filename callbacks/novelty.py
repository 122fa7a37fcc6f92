"""NoveltyBonus: random network distillation, a reward for states that have seldom been seen."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from claw_lightning.checks import check_numbers, check_types
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.module import OptionCritic
from claw_lightning.ranks import SINGLE, Ranks, ranks_of
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.networks import mlp
from claw_lightning.rollout.normalizer import Normalizer, RunningMoments

TRAINED_ROWS = 1024  # of each batch: the predictor is to cost little beside the updates


class _Distillation(nn.Module):
    """Frozen random network, its predictor, and the statistics of observations and errors."""

    error_count: Tensor
    error_mean: Tensor
    error_squares: Tensor

    def __init__(self, obs_size: int, embedding_size: int, hidden: int) -> None:
        super().__init__()
        self.obs_size = obs_size
        self.target = mlp([obs_size, hidden, embedding_size], "relu", 1.0)
        # A layer more than the target: it is not to lack the means to follow it where it has seen enough.
        self.predictor = mlp([obs_size, hidden, hidden, embedding_size], "relu", 1.0)
        self.target.requires_grad_(False)
        self.moments, self.normalizer = RunningMoments(obs_size), Normalizer(obs_size)
        for name in ("error_count", "error_mean", "error_squares"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def error(self, obs: Tensor) -> Tensor:
        """Mean squared error of the prediction, [M, O] normalised -> [M]."""
        return (self.predictor(obs) - self.target(obs)).square().mean(-1)

    def scale(self, error: Tensor, ranks: Ranks = SINGLE) -> Tensor:
        """Running standard deviation of all errors of all ranks so far, these [M] included; all on the device."""
        error = error.double()
        count, mean = torch.full((), float(len(error)), dtype=torch.float64, device=error.device), error.mean()
        squares = (error - mean).square().sum()
        if ranks.size > 1:
            count, sums, products = ranks.mean(count, error.sum(), error.square().sum())
            mean = sums / count
            squares = (products - count * mean.square()).clamp_min(0.0) * ranks.size
            count = count * ranks.size
        total = self.error_count + count
        delta = mean - self.error_mean
        self.error_squares += squares + delta.square() * (self.error_count * count / total)
        self.error_mean += delta * (count / total)
        self.error_count.copy_(total)
        return (self.error_squares / total).sqrt().clamp_min(1e-8).float()


class NoveltyBonus(UpdateCallback):
    """Random network distillation (Burda et al. 2018, arXiv 1810.12894) on the replay's next observations.

    A predictor learns the output of a frozen random network on what is replayed; where it errs, little like it has been
    seen. Its mean squared error, over the running standard deviation of all errors, times ``scale`` is added to the
    (already scaled) reward. Each ``training_step`` makes one step of the predictor, on at most 1,024 rows.
    Observations are normalised by statistics of its own, also where ``model.normalize_observations`` is off.

    The bonus is computed anew whenever a row is replayed and fades as the predictor learns. It is part of what is
    learned, not of ``rollout/return``. Logs ``novelty/error``, the mean error before the division (``reward/intrinsic``
    is the bonus itself).

    Args:
        scale: factor of the bonus, which is of the order of 1.
        embedding_size: outputs of both networks.
        hidden: units of their hidden layers.
        lr: learning rate of the predictor.
    """

    def __init__(self, scale: float = 1.0, embedding_size: int = 64, hidden: int = 128, lr: float = 1e-4) -> None:
        values = {"scale": scale, "embedding_size": embedding_size, "hidden": hidden, "lr": lr}
        check_types("NoveltyBonus", values, NoveltyBonus.__init__)
        check_numbers("NoveltyBonus", {"scale": scale}, least=0.0)
        check_numbers("NoveltyBonus", {"lr": lr}, above=0.0)
        for name, value in (("embedding_size", embedding_size), ("hidden", hidden)):
            if value < 1:
                raise ConfigError(f"NoveltyBonus.{name} is {value}; it must be at least 1")
        self.reward_scale, self.embedding_size, self.hidden, self.lr = scale, embedding_size, hidden, lr
        self._networks: _Distillation | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: dict[str, Any] = {}  # until the first batch tells sizes and device
        self._sum: Any = 0.0  # tensor on the module's device between logging steps
        self._count = 0

    def _prepare(self, obs_size: int, device: torch.device, ranks: Ranks = SINGLE) -> _Distillation:
        networks = self._networks
        if networks is not None and networks.obs_size == obs_size and networks.error_count.device == device:
            return networks
        if networks is not None and networks.obs_size == obs_size:  # another run, on another device
            self._restored = self.state_dict()
        # Networks that are about to be overwritten must not take from the generator what a run without a break has not.
        with torch.random.fork_rng(devices=[], enabled=bool(self._restored)):
            networks = _Distillation(obs_size, self.embedding_size, self.hidden).to(device)
        ranks.broadcast_module(networks)
        optimizer = torch.optim.Adam(networks.predictor.parameters(), lr=self.lr)
        if self._restored:
            try:
                networks.load_state_dict(self._restored["networks"])
            except RuntimeError as error:  # of several lines, one per tensor
                raise ConfigError(
                    "ckpt_path: the checkpoint's NoveltyBonus has networks of other sizes; give its embedding_size "
                    "and hidden"
                ) from error
            optimizer.load_state_dict(self._restored["optimizer"])
        self._networks, self._optimizer, self._restored = networks, optimizer, {}
        return networks

    def intrinsic_reward(self, trainer: pl.Trainer, module: OptionCritic, batch: ReplayBatch) -> Tensor:
        """Bonus of a batch, [U, B] or [U, B, L] (0 outside segments); then one step of the predictor."""
        if batch.layout.image_size:
            raise ConfigError("NoveltyBonus looks at observations, not at images, which this task has; leave it out")
        ranks = ranks_of(trainer)
        networks = self._prepare(batch.next_obs.shape[-1], batch.next_obs.device, ranks)
        networks.moments.update(batch.obs_moments)
        networks.moments.write_to(networks.normalizer)
        bonus = torch.zeros(batch.next_obs.shape[:-1], device=batch.next_obs.device)
        # Full precision whatever the trainer's: the errors are small differences.
        with torch.autocast(batch.next_obs.device.type, enabled=False):
            raw = batch.next_obs.flatten(0, -2) if batch.valid is None else batch.next_obs[batch.valid]
            obs = networks.normalizer(raw.float())
            with torch.no_grad():
                error = networks.error(obs)
                value = error * (self.reward_scale / networks.scale(error, ranks))
            if batch.valid is None:
                bonus = value.view_as(bonus)
            else:
                bonus[batch.valid] = value
            self._learn(networks, obs, ranks)
        self._sum = self._sum + error.mean()
        self._count += 1
        return bonus

    def _learn(self, networks: _Distillation, obs: Tensor, ranks: Ranks) -> None:
        assert self._optimizer is not None
        if len(obs) > TRAINED_ROWS:
            obs = obs[torch.randint(len(obs), (TRAINED_ROWS,), device=obs.device)]
        self._optimizer.zero_grad(set_to_none=True)
        networks.error(obs).mean().backward()
        ranks.average_gradients(networks.predictor.parameters())
        self._optimizer.step()

    def metrics(self) -> dict[str, Any]:
        """Mean error since the last call."""
        if not self._count:
            return {}
        values = {"novelty/error": float(self._sum / self._count)}
        self._sum, self._count = 0.0, 0
        return values

    def state_dict(self) -> dict[str, Any]:
        """Networks, statistics and optimiser; empty before the first batch."""
        if self._networks is None or self._optimizer is None:
            return self._restored
        return {"networks": dict(self._networks.state_dict()), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep :meth:`state_dict` for the first batch."""
        self._networks, self._optimizer, self._restored = None, None, state_dict
