"""PolicyGraph: what an agent does in evaluation as a pure function of tensors, fit for torch.export and ONNX.

Shapes: N lanes, O observation, C, H, W image, A action, K options.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from claw_lightning.rollout.acting import OptionAgent
from claw_lightning.rollout.envs.base import EnvSpec


class PolicyGraph(nn.Module):
    """One decision of an agent that evaluates, from raw observations to actions in the simulator's units.

    The rules are those of :meth:`OptionAgent.act`. What the agent keeps from step to step goes in and comes out, and so
    do the random numbers where it draws any.

    Args:
        agent: as :meth:`OptionCritic.agent` makes it; its networks are copied.
        spec: the task, for the bounds of its actions.

    Attributes:
        has_options: whether an option is kept from step to step: K > 1, and not the flat student.
        has_steps: whether the age of that option is, too: where durations are bounded.
        has_uniform: whether random numbers are needed: with ``model.greedy_options: false`` or options at random.
    """

    centre: Tensor
    half_range: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, agent: OptionAgent, spec: EnvSpec) -> None:
        super().__init__()
        policy = deepcopy(agent.policy).cpu().eval().requires_grad_(False)
        actor = policy.student if agent.use_student else policy.actor
        assert actor is not None
        self.obs_size, self.image_shape = spec.obs_size, spec.image_shape
        self.num_options = agent.num_options
        self.num_actions, self.action_size = spec.num_actions, spec.action_size
        self.has_options = agent.num_options > 1 and not agent.use_student
        self.min_duration, self.max_duration = agent.min_duration, agent.max_duration
        self.has_steps = self.has_options and (self.min_duration > 1 or self.max_duration > 0)
        self.greedy = agent.greedy_options
        self.greedy_choice = self.greedy and policy.option_selection != "random"
        self.has_uniform = self.has_options and not (self.greedy and self.greedy_choice)
        self.interruption = agent.interruption if self.has_options else None
        # Networks that are not asked would only make the file larger.
        policy.actor, policy.student = actor, None
        if not self.has_options:
            policy.option_policy = policy.termination = None
        if self.interruption is None:
            policy.option_value = None
        self.policy = policy
        low, high = torch.tensor(spec.action_low).double(), torch.tensor(spec.action_high).double()
        for name, value in (
            ("low", low),
            ("high", high),
            ("centre", (high + low) / 2),
            ("half_range", (high - low) / 2),
        ):
            self.register_buffer(name, value.float())

    def forward(
        self,
        obs: Tensor | None = None,
        image: Tensor | None = None,
        option: Tensor | None = None,
        first: Tensor | None = None,
        steps: Tensor | None = None,
        uniform: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Decide; the inputs that :meth:`example` names, no others.

        Args:
            obs: [N, O] float32, raw.
            image: [N, C, H, W] uint8.
            option: [N] int64, the running options: ``next_option`` of the step before; anything where ``first``.
            first: [N] bool, lanes in which an episode begins.
            steps: [N] int64, steps since that option was chosen: ``next_steps`` of the step before.
            uniform: [N, 2] float32 in [0, 1): the first ends the option where it is below its termination probability,
                the second chooses the next one.

        Returns:
            ``action``: [N, A] float32 in the simulator's units, or [N] int64, the numbers of discrete actions. With
            options also ``next_option`` [N] int64, the one that acts now and that the next call is given, likewise
            ``next_steps`` [N] int64 (with ``has_steps``); ``option_probs`` [N, K] float32, and ``termination`` [N]
            float32: probability that the option which ran until now ends here. Names of inputs and outputs differ
            because ONNX has one set of names for both.
        """
        x = self._seen(obs, image)
        if not self.has_options:
            return {"action": self._action(x, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device))}
        assert option is not None
        assert first is not None
        running = torch.where(first, torch.zeros_like(option), option)
        probs = self.policy.option_probs(x)
        beta = self.policy.beta(x).gather(1, running.unsqueeze(1)).squeeze(1)
        switched = first | self._ended(x, probs, beta, running, steps, uniform)
        running = torch.where(switched, self._choice(probs, uniform), running)
        found = {"action": self._action(x, running), "next_option": running}
        if self.has_steps:
            assert steps is not None
            found["next_steps"] = torch.where(switched, torch.zeros_like(steps), steps + 1)
        return {**found, "option_probs": probs, "termination": beta}

    def example(self, num_lanes: int = 2) -> dict[str, Tensor]:
        """Inputs of the right names, shapes and dtypes, in the order of :meth:`forward`."""
        found: dict[str, Tensor] = {}
        if self.obs_size:
            found["obs"] = torch.zeros(num_lanes, self.obs_size)
        if self.image_shape is not None:
            found["image"] = torch.zeros((num_lanes, *self.image_shape), dtype=torch.uint8)
        if self.has_options:
            found["option"] = torch.zeros(num_lanes, dtype=torch.int64)
            found["first"] = torch.ones(num_lanes, dtype=torch.bool)
        if self.has_steps:
            found["steps"] = torch.zeros(num_lanes, dtype=torch.int64)
        if self.has_uniform:
            found["uniform"] = torch.zeros(num_lanes, 2)
        return found

    def _seen(self, obs: Tensor | None, image: Tensor | None) -> Tensor:
        if obs is None:  # an image alone
            assert image is not None
            assert self.policy.encoder is not None
            return self.policy.encoder(image)
        x = self.policy.normalizer(torch.nan_to_num(obs))
        if self.policy.encoder is None:
            return x
        assert image is not None
        return self.policy.perceive(x, image)

    def _ended(
        self, x: Tensor, probs: Tensor, beta: Tensor, running: Tensor, steps: Tensor | None, uniform: Tensor | None
    ) -> Tensor:
        if self.greedy:
            ended = beta > 0.5
        else:
            assert uniform is not None
            ended = uniform[:, 0] < beta
        if self.interruption is not None:
            q = self.policy.option_values(x)
            value = (probs * q).sum(dim=1)
            kept = q.gather(1, running.unsqueeze(1)).squeeze(1) + self.policy.switch_cost + self.interruption
            ended = ended | (kept < value)
        if steps is not None:
            ended = ended & (steps + 1 >= self.min_duration)
            if self.max_duration > 0:
                ended = ended | (steps + 1 >= self.max_duration)
        return ended

    def _choice(self, probs: Tensor, uniform: Tensor | None) -> Tensor:
        if self.greedy_choice:
            return probs.argmax(dim=1)
        assert uniform is not None
        return (probs.cumsum(dim=1) < uniform[:, 1:]).sum(dim=1).clamp(max=self.num_options - 1)

    def _action(self, x: Tensor, option: Tensor) -> Tensor:
        action = self.policy.actor.mean_action(self.policy.actor(x, option))
        if self.num_actions > 0:
            return action.squeeze(-1).to(torch.int64)
        # Clipped, lest rounding lead out of the bounds.
        return torch.clamp(self.centre + self.half_range * action, self.low, self.high)
