"""Forward passes of a policy as a worker needs them: of plain layers on the CPU in NumPy, of all else by the modules.

A worker asks its policy for a few lanes at a time, where a call of a module costs more than its arithmetic. The same
products in NumPy, the first layers of all networks in one of them, take a third of the time. Results may differ from
the modules' in the last bits of float32.

Shapes: N lanes, O observation, A action, K options, R raw outputs of the actor, H hidden units.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple, Union

import numpy as np
import torch
from torch import Tensor, nn

from claw_lightning.rollout.networks import Policy


def _relu(x: np.ndarray) -> None:
    np.maximum(x, 0.0, out=x)


def _elu(x: np.ndarray) -> None:
    np.copyto(x, np.expm1(np.minimum(x, 0.0)), where=x < 0.0)


def _tanh(x: np.ndarray) -> None:
    np.tanh(x, out=x)


def _silu(x: np.ndarray) -> None:
    x *= 0.5 + 0.5 * np.tanh(0.5 * x)  # the sigmoid, in a form that does not overflow


#: In place, by the module's class.
ACTIVATIONS: Dict[Any, Callable[[np.ndarray], None]] = {
    nn.ReLU: _relu, nn.ELU: _elu, nn.Tanh: _tanh, nn.SiLU: _silu,
}  # fmt: skip


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """Without gradients, and outside the precision of a learner in whose process it may run (lock-step mode)."""
    return torch.no_grad()(torch.autocast("cpu", enabled=False)(method))


class ModuleForward:
    """The modules as they are: any device, blocks of users, images.

    Call :meth:`observe` first, at every step; the others are of what was observed last.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.policy, self.device = policy, device
        self._x = torch.empty(0)

    def refresh(self) -> None:
        """Parameters have been loaded anew."""

    @_alone
    def observe(self, obs: Union[np.ndarray, Tensor], image: Optional[np.ndarray]) -> None:
        """Raw observations [N, O], an array or a tensor, in which what is not finite counts as 0 (or the largest).

        Raises:
            ValueError: the policy sees images, and none was given.
        """
        if isinstance(obs, Tensor):
            raw = torch.nan_to_num(obs).to(self.device)
        else:
            raw = torch.from_numpy(np.nan_to_num(obs)).to(self.device)
        self._x = self.policy.normalizer(raw)
        if self.policy.encoder is not None:
            if image is None:
                raise ValueError("act: this policy sees images; give image [N, C, H, W] uint8 beside the observations")
            self._x = self.policy.perceive(self._x, torch.from_numpy(image).to(self.device))

    @_alone
    def options(self) -> Tuple[np.ndarray, np.ndarray]:
        """Option policy and termination probabilities of all options, each [N, K] float32."""
        return self.policy.option_probs(self._x).cpu().numpy(), self.policy.beta(self._x).cpu().numpy()

    @_alone
    def values(self) -> np.ndarray:
        """Q_Omega(s, .) [N, K] float32."""
        return self.policy.option_values(self._x).cpu().numpy()

    @_alone
    def raw(self, option: np.ndarray) -> Tensor:
        """Raw outputs of the actor for options [N], [N, R] on the CPU."""
        return self.policy.actor(self._x, torch.from_numpy(option.astype(np.int64)).to(self.device)).cpu()

    @_alone
    def student(self) -> Tensor:
        """Raw outputs of the flat student, [N, R] on the CPU."""
        assert self.policy.student is not None
        return self.policy.student(self._x, torch.zeros(len(self._x), dtype=torch.int64, device=self.device)).cpu()


class ArrayForward(ModuleForward):
    """Plain layers on the CPU, in NumPy; what workers seldom ask for goes through the modules.

    Weights are seen where they lie, so that a policy that is loaded anew needs nothing done; the first layers, which
    are copied side by side, are copied again when one of them has changed.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, torch.device("cpu"))
        actor = policy.actor
        self._mean, self._std = policy.normalizer.mean.numpy(), policy.normalizer.std.numpy()
        self._limit = np.float32(policy.normalizer.limit)
        self._firsts = [actor.obs_layer]
        self._activate = ACTIVATIONS[type(actor.activation)]
        self._body = _layers(actor.body)
        self._asks_options = policy.num_options > 1 and policy.option_selection == "learned"
        self._choosers: List[List[Tuple[np.ndarray, np.ndarray]]] = []
        if policy.num_options > 1:
            assert policy.termination is not None
            networks = [policy.termination] + ([policy.option_policy] if self._asks_options else [])
            for network in networks:
                assert network is not None
                self._firsts.append(network[0])  # type: ignore[arg-type]
                self._choosers.append(_layers(network)[1:])
        self._width = start = actor.obs_layer.out_features
        self._spans: List[slice] = []
        for layer in self._firsts[1:]:
            self._spans.append(slice(start, start + layer.out_features))
            start += layer.out_features
        #: Of the first layers, and what they depend on: parameters whose versions PyTorch counts.
        self._watched = [p for layer in self._firsts for p in (layer.weight, layer.bias)]
        if actor.embedding is not None:
            self._watched += [actor.embedding.weight, actor.option_layer.weight, actor.option_layer.bias]
        self._seen: List[int] = []
        self._lanes = np.arange(0)
        self._hidden = np.empty((0, 0), np.float32)

    @staticmethod
    def supports(policy: Policy, device: torch.device) -> bool:
        """Whether it can: networks of plain layers alone, on the CPU."""
        networks = [policy.actor.body, policy.termination, policy.option_policy]
        plain = (nn.Linear, *ACTIVATIONS)
        return (
            device.type == "cpu"
            and policy.encoder is None
            and type(policy.actor.activation) in ACTIVATIONS
            and all(
                isinstance(network, nn.Sequential) and all(type(layer) in plain for layer in network)
                for network in networks
                if network is not None
            )
        )

    def refresh(self) -> None:
        """Lay the first layers side by side at the next observation, also where no version tells (inference mode)."""
        self._seen = []

    def _lay(self) -> None:
        """Lay the first layers side by side, if that is due."""
        seen = [p._version for p in self._watched]
        if seen == self._seen:
            return
        actor = self.policy.actor
        biases: List[Tensor] = [layer.bias for layer in self._firsts]
        if actor.embedding is not None:
            # One row per option, its bias included, in place of a product with one-hot vectors.
            self._table = (actor.option_layer(actor.embedding.weight) + actor.obs_layer.bias).detach().numpy()
            biases[0] = torch.zeros_like(biases[0])
        self._weight = torch.cat([layer.weight.detach() for layer in self._firsts]).numpy().T
        self._bias = torch.cat([bias.detach() for bias in biases]).numpy()
        self._seen = seen

    def observe(self, obs: Union[np.ndarray, Tensor], image: Optional[np.ndarray]) -> None:
        """See :meth:`ModuleForward.observe`."""
        self._lay()
        raw = obs.numpy() if isinstance(obs, Tensor) else obs
        if not np.isfinite(raw.sum()):  # rare; of numbers that are finite it changes nothing
            raw = np.nan_to_num(raw)
        x = raw - self._mean
        x /= self._std
        np.maximum(x, -self._limit, out=x)  # np.clip does the same and takes longer to begin
        np.minimum(x, self._limit, out=x)
        self._x = torch.from_numpy(x)
        if len(x) != len(self._hidden):
            self._hidden, self._lanes = np.empty((len(x), len(self._bias)), np.float32), np.arange(len(x))
        np.matmul(x, self._weight, out=self._hidden)
        self._hidden += self._bias

    def options(self) -> Tuple[np.ndarray, np.ndarray]:
        """See :meth:`ModuleForward.options`."""
        self._activate(self._hidden[:, self._width :])
        found = [self._run(self._hidden[:, span], layers) for span, layers in zip(self._spans, self._choosers)]
        beta = 1.0 / (1.0 + np.exp(-found[0]))
        if not self._asks_options:
            return self.policy.option_probs(self._x).numpy(), beta
        probs = found[1]
        probs -= np.maximum.reduce(probs, axis=1, keepdims=True)
        np.exp(probs, out=probs)
        probs /= np.add.reduce(probs, axis=1, keepdims=True)
        return probs, beta

    def raw(self, option: np.ndarray) -> Tensor:
        """See :meth:`ModuleForward.raw`."""
        actor = self.policy.actor
        hidden = self._hidden[:, : self._width]
        if actor.embedding is not None:
            hidden += self._table[option]
        self._activate(hidden)
        out = self._run(hidden, self._body)
        if actor.separate:
            out = out.reshape(len(out), actor.num_options, actor.out_size)[self._lanes, option]
        return torch.from_numpy(out)

    def _run(self, x: np.ndarray, layers: List[Tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Layers with activations between them."""
        for number, (weight, bias) in enumerate(layers, 1):
            x = x @ weight
            x += bias
            if number < len(layers):
                self._activate(x)
        return x


def _layers(network: Any) -> List[Tuple[np.ndarray, np.ndarray]]:
    """Weights [in, out] and biases [out] of the linear layers, which share the parameters' memory."""
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    return [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in linear]


def make_forward(policy: Policy, device: torch.device) -> ModuleForward:
    """The faster one that can."""
    return ArrayForward(policy) if ArrayForward.supports(policy, device) else ModuleForward(policy, device)
