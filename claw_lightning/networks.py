"""Networks that judge: twin critics Q(s, o, a). They never leave the learner.

Shapes: B batch, O observation, A action, K options, C critics, H hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from claw_lightning.rollout.networks import ACTIVATIONS, init_linear, make_block


class StackedLinear(nn.Module):
    """C linear layers at once: [C, B, in] or [B, in] -> [C, B, out] as one batched matrix product."""

    def __init__(
        self, count: int, fan_in: int, fan_out: int, gain: float = 2**0.5, bias: bool = True, scheme: str = "orthogonal"
    ) -> None:
        super().__init__()
        layers = [init_linear(nn.Linear(fan_in, fan_out), gain, scheme) for _ in range(count)]
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]).contiguous())
        biases = torch.stack([layer.bias.detach().unsqueeze(0) for layer in layers])
        self.bias = nn.Parameter(biases) if bias else None

    def forward(self, x: Tensor, first: int | None = None) -> Tensor:
        """Apply all layers, or the first ``first`` of them."""
        weight = self.weight[:first]
        if x.dim() == 2:
            x = x.expand(len(weight), -1, -1)
        out = torch.bmm(x, weight)
        # Not baddbmm: it first spreads the bias over the whole output, which costs more than the product (CPU, bf16).
        # The cast matters too: adding float32 to bfloat16 in place takes ten times as long.
        return out if self.bias is None else out.add_(self.bias[:first].to(out.dtype))

    def each(self, inputs: Sequence[Tensor], below: StackedLinear | None = None) -> list[Tensor]:
        """The first layers, each on an input of its own [B, in] -> [B, out].

        With ``below``, layers of as many outputs without a bias, whose inputs follow this one's: [B, in + below's in].

        Product by product: in float32 on a CPU that is a tenth faster than :meth:`forward`'s batched product.
        """
        weight = self.weight if below is None else torch.cat((self.weight, below.weight), 1)
        weights = _first(weight, len(inputs))
        if self.bias is None:
            return [x @ weight for x, weight in zip(inputs, weights, strict=True)]
        biases = _first(self.bias, len(inputs))
        return [torch.addmm(bias, x, weight) for bias, x, weight in zip(biases, inputs, weights, strict=True)]


def _first(stacked: Tensor, count: int) -> Sequence[Tensor]:
    """So many of a stack, one by one. Of all of them no slice, whose backward pass fills the whole stack with zeros."""
    return (stacked if count == len(stacked) else stacked[:count]).unbind()


class ReluNetworks(torch.autograd.Function):
    """C networks of linear layers with ReLU between them, on the same two inputs: [B, L], [B, R] -> [C, B, out].

    One node in place of a dozen, whose backward pass writes the gradients of the stacked parameters where they belong.
    PyTorch's own takes a tenth longer on a CPU: it adds up views by copies. Derivatives of derivatives are its own.
    """

    @staticmethod
    def forward(ctx: Any, count: int, left: Tensor, right: Tensor, *parameters: Tensor) -> Tensor:
        """The first ``count`` of them; ``parameters``: weight [C, L + R, out], bias [C, 1, out], weight, bias ..."""
        weights, biases = parameters[::2], parameters[1::2]
        x = torch.cat((left, right), 1)
        hidden, outputs = [], []
        for c in range(count):
            h = x
            for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True), 1):
                h = torch.addmm(bias[c], h, weight[c])
                if layer < len(weights):
                    hidden.append(h.relu_())
            outputs.append(h)
        ctx.count, ctx.border = count, left.shape[1]
        ctx.save_for_backward(left, right, *parameters, x, *hidden)
        return torch.stack(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of the inputs and of the parameters, each where it is wanted."""
        with torch.autocast("cpu", enabled=False):  # as the forward pass was
            if torch.is_grad_enabled():  # create_graph: as a penalty on gradients wants
                return None, *ReluNetworks._with_graph(ctx, grad)
            return None, *ReluNetworks._gradients(ctx, grad)

    @staticmethod
    def _with_graph(ctx: Any, grad: Tensor) -> list[Tensor | None]:
        """Gradients that can be differentiated again, by the plain layers."""
        arguments = ctx.saved_tensors[: len(ctx.needs_input_grad) - 1]
        left, right, *parameters = arguments
        outputs = []
        for c in range(ctx.count):
            h = torch.cat((left, right), 1)
            for layer, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
                h = torch.addmm(bias[c], torch.relu(h) if layer > 0 else h, weight[c])
            outputs.append(h)
        wanted = [x for x, is_wanted in zip(arguments, ctx.needs_input_grad[1:], strict=True) if is_wanted]
        found = iter(torch.autograd.grad(torch.stack(outputs), wanted, grad, create_graph=True))
        return [next(found) if is_wanted else None for is_wanted in ctx.needs_input_grad[1:]]

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> list[Tensor | None]:
        wanted = ctx.needs_input_grad[3:]
        depth = len(wanted) // 2
        _, _, *saved = ctx.saved_tensors
        parameters, x, hidden = saved[: 2 * depth], saved[2 * depth], saved[2 * depth + 1 :]
        is_whole = ctx.count == len(parameters[0])
        make = torch.empty_like if is_whole else torch.zeros_like
        grads = [make(p) if is_wanted else None for p, is_wanted in zip(parameters, wanted, strict=True)]
        of_inputs: list[Tensor | None] = [None, None]
        spans = slice(ctx.border), slice(ctx.border, None)
        for c in range(ctx.count):
            inputs = [x, *hidden[c * (depth - 1) : (c + 1) * (depth - 1)]]
            g = grad[c]
            for layer in reversed(range(depth)):
                of_weight, of_bias = grads[2 * layer : 2 * layer + 2]
                if of_weight is not None:
                    torch.mm(inputs[layer].T, g, out=of_weight[c])
                if of_bias is not None:
                    torch.sum(g, 0, keepdim=True, out=of_bias[c])
                weight = parameters[2 * layer][c]
                if layer > 0:
                    g = g @ weight.T
                    g = torch.ops.aten.threshold_backward.grad_input(g, inputs[layer], 0, grad_input=g)
                    continue
                for side, span in enumerate(spans):
                    if ctx.needs_input_grad[1 + side]:
                        part, total = g @ weight[span].T, of_inputs[side]
                        of_inputs[side] = part if total is None else total.add_(part)
        return [*of_inputs, *grads]


def prefers_apart(x: Tensor) -> bool:
    """Whether C products are faster than a batched one: not for few bits (CPU), and not for many launches (GPU)."""
    return x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


class TwinCritic(nn.Module):
    """C = 2 action values Q_i(s, o, a) with separate weights, computed together.

    The first layer is split into the observation's part and that of action and option: for the values of all K options
    at one state the former is computed once. The last layer runs in float32 also under autocast: eight bits of
    mantissa are too few for a value.

    With Z = ``atoms`` > 0 each critic is a categorical distribution over ``support`` (C51) and its value the mean;
    :meth:`logits` gives the distribution itself.
    """

    support: Tensor

    one_hot: Tensor

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        num_options: int,
        hidden: Sequence[int],
        activation: str,
        layer_norm: bool = False,
        scheme: str = "orthogonal",
        count: int = 2,
        atoms: int = 0,
        value_range: Sequence[float] = (0.0, 0.0),
        network: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.count, self.num_options, self.atoms = count, num_options, atoms
        self.obs_layer = StackedLinear(count, obs_size, hidden[0], scheme=scheme)
        # Action and option enter together, the option as one-hot: its rows of the weights are its embedding.
        options = num_options if num_options > 1 else 0
        self.action_layer = StackedLinear(count, action_size + options, hidden[0], bias=False, scheme=scheme)
        self.blocks: nn.ModuleList | None = None
        if network is not None:
            self.blocks = nn.ModuleList(make_block(network, hidden[0], max(1, atoms)) for _ in range(count))
        else:
            self.hidden = nn.ModuleList(StackedLinear(count, a, b, scheme=scheme) for a, b in pairwise(hidden))
            self.norms = nn.ModuleList(nn.LayerNorm(size) for size in hidden) if layer_norm else None
            self.last = StackedLinear(count, hidden[-1], max(1, atoms), gain=0.01, scheme=scheme)
        self.activation = ACTIVATIONS[activation]()
        self.register_buffer("one_hot", torch.eye(num_options), persistent=False)
        self.register_buffer("support", torch.linspace(value_range[0], value_range[1], max(1, atoms)), persistent=False)

    def forward(self, obs: Tensor, action: Tensor, option: Tensor, first: int | None = None) -> Tensor:
        """Values of the executed options: [B, O], [B, A], [B] int64 -> [C, B] (``first``: so many critics)."""
        return self._value(self.logits(obs, action, option, first))

    def logits(self, obs: Tensor, action: Tensor, option: Tensor, first: int | None = None) -> Tensor:
        """As :meth:`forward`, before the mean: [C, B, Z] (without atoms: the values themselves, [C, B])."""
        if self.num_options > 1:
            action = torch.cat((action, self.one_hot[option]), dim=1)
        if prefers_apart(obs):
            count = self.count if first is None else first
            if self._is_plain:
                return self._plain(obs, action, count)
            return self._rest_apart(self.obs_layer.each([torch.cat((obs, action), 1)] * count, self.action_layer))
        return self._rest(self.obs_layer(obs, first).add_(self.action_layer(action, first)), first)

    def forward_all(self, obs: Tensor, actions: Tensor, first: int | None = None) -> Tensor:
        """Values of all options, each with its own action: [B, O], [B, K, A] -> [C, B, K]."""
        return self._value(self.logits_all(obs, actions, first))

    def logits_all(self, obs: Tensor, actions: Tensor, first: int | None = None) -> Tensor:
        """As :meth:`forward_all`, before the mean: [C, B, K, Z] (without atoms: [C, B, K])."""
        batch, num_options = actions.shape[:2]
        if self.num_options > 1:
            actions = torch.cat((actions, self.one_hot.expand(batch, -1, -1)), dim=2)
        actions = actions.reshape(batch * num_options, -1)
        if prefers_apart(obs):
            count = self.count if first is None else first
            hidden = self.action_layer.each([actions] * count)
            for h, from_obs in zip(hidden, self.obs_layer.each([obs] * count), strict=True):
                h.view(batch, num_options, -1).add_(from_obs.unsqueeze(1))
            return self._rest_apart(hidden).unflatten(1, (batch, num_options))
        h = self.action_layer(actions, first)
        from_obs = self.obs_layer(obs, first)
        h.view(len(from_obs), batch, num_options, -1).add_(from_obs.unsqueeze(2))
        return self._rest(h, first).unflatten(1, (batch, num_options))

    @property
    def _is_plain(self) -> bool:
        return self.blocks is None and self.norms is None and isinstance(self.activation, nn.ReLU)

    def _plain(self, obs: Tensor, action: Tensor, count: int) -> Tensor:
        """Linear layers with ReLU between them: [B, O], [B, A (+ K)] -> [C, B], or [C, B, Z] with atoms."""
        # Both parts of the first layer in one product: side by side they are copied before a second one would begin.
        first = torch.cat((self.obs_layer.weight, self.action_layer.weight), 1)
        rest = [p for layer in (*self.hidden, self.last) for p in (layer.weight, layer.bias)]
        out = ReluNetworks.apply(count, obs, action, first, self.obs_layer.bias, *rest)
        return out if self.atoms else out.squeeze(-1)

    def _value(self, out: Tensor) -> Tensor:
        return out.softmax(-1) @ self.support if self.atoms else out

    def _rest(self, h: Tensor, first: int | None) -> Tensor:
        if self.blocks is not None:
            out = torch.stack([block(x) for block, x in zip(self.blocks[:first], h.unbind(), strict=True)]).float()
            return out if self.atoms else out.squeeze(-1)
        for i, layer in enumerate([*self.hidden, None]):
            if self.norms is not None:
                h = self.norms[i](h)
            h = self.activation(h)
            if layer is not None:
                h = layer(h, first)
        with torch.autocast(h.device.type, enabled=False):
            assert self.last.bias is not None
            if self.atoms:
                return torch.bmm(h.float(), self.last.weight[:first]) + self.last.bias[:first]
            # Unbind, not h[i]: the backward pass of indexing fills the whole tensor with zeros once per critic.
            weights = self.last.weight[:first, :, 0].unbind()
            q = torch.stack([torch.mv(x, weight) for x, weight in zip(h.float().unbind(), weights, strict=True)])
            return q + self.last.bias[:first, 0]

    def _rest_apart(self, hidden: list[Tensor]) -> Tensor:
        """What :meth:`_rest` does, critic by critic: C of [B, H] -> [C, B], or [C, B, Z] with atoms."""
        if self.blocks is not None:
            return self._rest(torch.stack(hidden), len(hidden))
        for i, layer in enumerate([*self.hidden, None]):
            if self.norms is not None:
                hidden = [self.norms[i](h) for h in hidden]
            hidden = [self.activation(h) for h in hidden]
            if layer is not None:
                hidden = layer.each(hidden)
        out = torch.stack(self.last.each(hidden))
        return out if self.atoms else out.squeeze(-1)


class DiscreteCritic(nn.Module):
    """C action values of discrete actions: one network per critic with an output for each option and action."""

    def __init__(
        self, obs_size: int, num_actions: int, num_options: int, hidden: Sequence[int], activation: str,
        layer_norm: bool = False, scheme: str = "orthogonal", count: int = 2, network: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.count, self.num_options, self.num_actions = count, num_options, num_actions
        self.blocks: nn.ModuleList | None = None
        if network is not None:
            self.obs_layer = StackedLinear(count, obs_size, hidden[0], scheme=scheme)
            outputs = num_options * num_actions
            self.blocks = nn.ModuleList(make_block(network, hidden[0], outputs) for _ in range(count))
            return
        sizes = [obs_size, *hidden]
        self.layers = nn.ModuleList(StackedLinear(count, a, b, scheme=scheme) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for size in hidden) if layer_norm else None
        self.last = StackedLinear(count, hidden[-1], num_options * num_actions, gain=0.01, scheme=scheme)
        self.activation = ACTIVATIONS[activation]()

    def table(self, obs: Tensor) -> Tensor:
        """All values: [B, O] -> [C, B, K, A]."""
        if self.blocks is not None:
            h = self.obs_layer(obs)
            out = torch.stack([block(x) for block, x in zip(self.blocks, h.unbind(), strict=True)])
            return out.float().unflatten(-1, (self.num_options, self.num_actions))
        h = obs
        for i, layer in enumerate(self.layers):
            h = layer(h)
            if self.norms is not None:
                h = self.norms[i](h)
            h = self.activation(h)
        with torch.autocast(h.device.type, enabled=False):
            return self.last(h.float()).unflatten(-1, (self.num_options, self.num_actions))

    def forward(self, obs: Tensor, action: Tensor, option: Tensor) -> Tensor:
        """Values of the executed options and actions: [B, O], [B, 1], [B] int64 -> [C, B]."""
        values = self.forward_all(obs, action.unsqueeze(1).expand(-1, self.num_options, -1))
        return values.gather(2, option.expand(self.count, -1).unsqueeze(2)).squeeze(2)

    def forward_all(self, obs: Tensor, actions: Tensor) -> Tensor:
        """Values of all options, each with its own action: [B, O], [B, K, 1] -> [C, B, K]."""
        return self.table(obs).gather(3, actions.long().expand(self.count, -1, -1, -1)).squeeze(3)
