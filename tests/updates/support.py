"""What the tests of updates share: rows made by hand, and optimiser steps that can be watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from claw_lightning.minibatch import Minibatch
from claw_lightning.module import OptionCritic
from claw_lightning.rollout.envs.base import EnvSpec
from tests.runs import TINY

DISCRETE = EnvSpec("fake", obs_size=3, action_size=1, action_low=[0.0], action_high=[2.0], num_actions=3)
Step = Callable[[str, nn.Module | None], None]


def make_discrete(seed: int = 0, spec: EnvSpec = DISCRETE, **settings: Any) -> OptionCritic:
    """Tiny built OptionCritic with a categorical actor."""
    torch.manual_seed(seed)
    module = OptionCritic(**{**TINY, "actor": "categorical", "num_options": 2, **settings})
    module.build(spec)
    return module


def make_rows(
    size: int = 8, num_options: int = 2, seed: int = 0, length: int = 0, num_actions: int = 0, **fields: Any
) -> Minibatch:
    """Random rows of tests.runs.SPEC (or of DISCRETE), segments if ``length``; ``fields`` replaces some."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size, length) if length else (size,)

    def integers(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    previous = integers(-1, num_options)
    action = torch.rand(*shape, 2, generator=generator) * 1.8 - 0.9
    values: dict[str, Any] = {
        "obs": torch.randn(*shape, 3, generator=generator),
        "action": integers(0, num_actions).unsqueeze(-1).float() if num_actions else action,
        "option": integers(0, num_options),
        "reward": torch.randn(*shape, generator=generator),
        "terminated": torch.zeros(shape, dtype=torch.bool),
        "next_obs": torch.randn(*shape, 3, generator=generator),
        "first": previous < 0,
        "previous": previous,
        "switched": (previous < 0) | (integers(0, 2) == 1),
        "age": torch.zeros(shape, dtype=torch.int32),
        "log_prob_action": -torch.rand(*shape, generator=generator),
        "log_prob_option": -torch.rand(*shape, generator=generator),
        "valid": torch.ones(shape, dtype=torch.bool) if length else None,
        **fields,
    }
    return Minibatch(**values)


def capture(module: OptionCritic, monkeypatch: Any, step: Step | None = None) -> dict[str, Tensor]:
    """Replace optimiser steps: losses by name; ``step`` is called after a plain backward pass."""
    found: dict[str, Tensor] = {}

    def descend_together(networks: dict[str, nn.Module | None], loss: Tensor, counted: bool = False) -> None:
        found.update({name: loss.detach() for name in networks})
        if step is not None:
            module.zero_grad()
            loss.backward()
            for name, network in networks.items():
                step(name, network)

    monkeypatch.setattr(module, "descend_together", descend_together)
    return found


def sgd(lr: float) -> Step:
    """Plain gradient steps in place of Adam's."""

    @torch.no_grad()
    def step(name: str, network: nn.Module | None) -> None:
        for p in network.parameters() if network is not None else ():
            if p.grad is not None:
                p.sub_(lr * p.grad)

    return step


def constant(values: Any) -> Callable[[Tensor], Tensor]:
    """Function of observations [..., O] with the same [K] everywhere."""
    row = torch.as_tensor(values)
    return lambda obs: row.expand(*obs.shape[:-1], len(row)).clone()
