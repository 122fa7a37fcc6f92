"""Networks that act: option policy, termination, action policy and the normaliser in front of them.

One class, :class:`Policy`, is built from the same plain settings in learner and worker, whatever their torch versions;
what travels between them is its flat float32 vector (:meth:`Policy.flatten`).

Shapes: B batch, O observation, F features of an image, A action, K options, H hidden units. Networks of tasks with
images take observation and features side by side: where one of them is said to take [B, O], it takes [B, O + F] then.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, TypeVar, Union

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from claw_lightning.rollout.distributions import squashed_gaussian_log_prob
from claw_lightning.rollout.normalizer import Normalizer

ACTIVATIONS: Dict[str, Callable[[], nn.Module]] = {
    "relu": partial(nn.ReLU, inplace=True),
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}
LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0  # bounds of Gaussian actors, as in SAC
ACTION_INSIDE = 1.0 - 1e-6  # stored actions at the bound have no finite inverse tanh


Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def init_linear(layer: Layer, gain: float, scheme: str = "orthogonal") -> Layer:
    """Initialise in place: ``orthogonal``, ``xavier`` or ``he`` (biases zero), or ``torch`` (as PyTorch does)."""
    if scheme == "torch":
        return layer
    if scheme == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
    elif scheme == "xavier":
        nn.init.xavier_uniform_(layer.weight, gain)
    elif scheme == "he":
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        if gain < 1:  # small last layers stay small
            layer.weight.data.mul_(gain)
    else:
        raise ValueError("model.init: %s is unknown; use orthogonal, xavier, he or torch" % scheme)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


def mlp(sizes: Sequence[int], activation: str, last_gain: float, scheme: str = "orthogonal") -> nn.Sequential:
    """Multi-layer perceptron over ``sizes`` (input, hidden ..., output), linear at the end."""
    layers: List[nn.Module] = []
    for i in range(len(sizes) - 1):
        last = i == len(sizes) - 2
        layers.append(init_linear(nn.Linear(sizes[i], sizes[i + 1]), last_gain if last else 2**0.5, scheme))
        if not last:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


class NetworkError(ValueError):
    """A user's network block cannot be used; the message names the setting and the cure."""


class NetworkBlock(nn.Module):
    """Base class of a user's network block (``model.network``).

    It takes the place of what follows the first linear layer, up to the outputs: in the actor, in option policy,
    termination, option value and state value, and in each critic. Workers import it too: its module may import what
    their interpreter has, torch and numpy.

    Parameters are float32. A block sees a batch of any leading shape, and must not mix its rows.

    Args:
        input_size: units of the first layer (the first of ``hidden_sizes`` or ``option_hidden_sizes``).
        output_size: numbers that the network is to give.
    """

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size

    def forward(self, x: Tensor) -> Tensor:
        """[..., input_size], before any activation -> [..., output_size], linear at the end."""
        raise NotImplementedError


class Shift(nn.Module):
    """Adds a learned vector, of which the beginning is given."""

    def __init__(self, size: int, value: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((size,), value))

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return x + self.bias


def make_block(network: Dict[str, Any], input_size: int, output_size: int) -> NetworkBlock:
    """The block that ``model.network`` names: ``class_path`` and ``init_args``.

    Raises:
        NetworkError: it cannot be imported, built or called, is no :class:`NetworkBlock`, or gives another shape.
    """
    class_path = network["class_path"]
    module_name, _, class_name = class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise NetworkError("model.network.class_path: cannot import %s (%s)" % (class_path, error)) from error
    except (Exception, SystemExit) as error:  # a user's own module, which may do anything
        raise NetworkError("model.network.class_path: cannot import %s (%s)" % (class_path, _what(error))) from error
    if not (isinstance(cls, type) and issubclass(cls, NetworkBlock)):
        raise NetworkError(
            "model.network.class_path: %s is not a claw_lightning.rollout.networks.NetworkBlock" % class_path
        )
    try:
        block = cls(input_size, output_size, **(network.get("init_args") or {}))
    except TypeError as error:
        raise NetworkError("model.network.init_args: %s" % error) from error
    except (Exception, SystemExit) as error:
        raise NetworkError("model.network: constructor of %s failed (%s)" % (class_path, _what(error))) from error
    try:
        with torch.no_grad():
            shape = tuple(block(torch.zeros(2, 3, input_size)).shape)
    except (Exception, SystemExit) as error:
        raise NetworkError(
            "model.network: %s fails for inputs (2, 3, %d) (%s)" % (class_path, input_size, _what(error))
        ) from error
    if shape != (2, 3, output_size):
        raise NetworkError(
            "model.network: %s gives shape %s for inputs (2, 3, %d), expected (2, 3, %d)"
            % (class_path, shape, input_size, output_size)
        )
    others = sorted({str(p.dtype) for p in block.parameters()} - {"torch.float32"})
    if others:  # workers receive one vector of float32
        raise NetworkError("model.network: %s has parameters of %s; use float32" % (class_path, ", ".join(others)))
    return block


def _what(error: BaseException) -> str:
    """An error of a user's code in one line: its kind, and what it says."""
    if isinstance(error, SystemExit):
        return "it called exit(%s)" % ("" if error.code is None else " ".join(str(error.code).split()))
    return " ".join(("%s: %s" % (type(error).__name__, error)).split()).rstrip(":")


def make_network(
    network: Optional[Dict[str, Any]], sizes: Sequence[int], activation: str, last_gain: float, scheme: str,
) -> nn.Sequential:  # fmt: skip
    """:func:`mlp` over ``sizes``, or a linear layer to the first hidden size and the user's block."""
    if network is None:
        return mlp(sizes, activation, last_gain, scheme)
    first = init_linear(nn.Linear(sizes[0], sizes[1]), 2**0.5, scheme)
    return nn.Sequential(first, make_block(network, sizes[1], sizes[-1]))


class ImageEncoder(nn.Module):
    """Features of images: three layers of 32 channels, 3 x 3, then a linear one, layer normalisation and tanh.

    The encoder of SAC-AE (Yarats et al., arXiv 1910.01741) and DrQ-v2 (arXiv 2107.09645), for images of any size: a
    layer has stride 2 as long as the smaller side of what it sees is above :data:`SMALL_SIDE`, else 1.

    Args:
        shape: (channels, height, width).
        features: F.
    """

    CHANNELS, SMALL_SIDE = 32, 12

    def __init__(self, shape: Sequence[int], features: int, scheme: str = "orthogonal") -> None:
        super().__init__()
        self.shape = tuple(shape)
        channels, height, width = shape
        layers: List[nn.Module] = []
        for _ in range(3):
            stride = 2 if min(height, width) > self.SMALL_SIDE else 1
            layers += [init_linear(nn.Conv2d(channels, self.CHANNELS, 3, stride, 1), 2**0.5, scheme), nn.ReLU()]
            channels, height, width = self.CHANNELS, (height - 1) // stride + 1, (width - 1) // stride + 1
        self.layers = nn.Sequential(*layers)
        self.last = init_linear(nn.Linear(channels * height * width, features), 1.0, scheme)
        self.norm = nn.LayerNorm(features)

    def forward(self, image: Tensor) -> Tensor:
        """Pixels uint8 [..., C, H, W] -> features float32 [..., F] in (-1, 1)."""
        lead = image.shape[:-3]
        pixels = image.reshape((-1,) + self.shape).float() / 255.0 - 0.5
        features = self.norm(self.last(self.layers(pixels).flatten(1)).float()).tanh()
        return features.view(lead + features.shape[-1:])


class OptionActor(nn.Module):
    """Action policy conditioned on the option.

    Kinds: ``deterministic``, ``mu_o(s) = tanh(f(s, o))``; ``gaussian``, mean and log standard deviation before the
    tanh; ``categorical``, logits of A discrete actions. Raw outputs have R = A, 2A or A numbers.

    Heads: ``embedding``, a learned vector per option added into the first layer (with K options the observation's part
    of that layer is computed once for all of them); ``separate``, one last layer per option on a shared body.
    """

    def __init__(
        self, obs_size: int, action_size: int, num_options: int, kind: str, hidden: Sequence[int], activation: str,
        embedding_size: int, scheme: str, heads: str = "embedding", network: Optional[Dict[str, Any]] = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind = kind
        self.num_options = num_options
        self.action_size = action_size
        self.out_size = action_size * (2 if kind == "gaussian" else 1)
        self.separate = heads == "separate" and num_options > 1
        self.obs_layer = init_linear(nn.Linear(obs_size, hidden[0]), 2**0.5, scheme)
        out_size = self.out_size * (num_options if self.separate else 1)
        self.body: nn.Module
        if network is None:
            self.body = mlp([*hidden, out_size], activation, 0.01, scheme)
            self.activation = ACTIVATIONS[activation]()
        else:
            self.body, self.activation = make_block(network, hidden[0], out_size), nn.Identity()
        self.embedding: Optional[nn.Embedding] = None
        if num_options > 1 and not self.separate:
            self.embedding = nn.Embedding(num_options, embedding_size)
            nn.init.orthogonal_(self.embedding.weight, embedding_size**0.5)
            self.option_layer = init_linear(nn.Linear(embedding_size, hidden[0]), 1.0, scheme)

    def forward(self, obs: Tensor, option: Tensor) -> Tensor:
        """Raw outputs of the given options: obs [B, O], option [B] int64 -> [B, R]."""
        if self.separate:
            raw = self.forward_all(obs)
            return (raw * F.one_hot(option, self.num_options).unsqueeze(-1).to(raw.dtype)).sum(-2)
        h = self.obs_layer(obs)
        if self.embedding is not None:
            # A product with one-hot rows: the backward pass of indexing adds row by row and outlasts the network.
            one_hot = F.one_hot(option, self.num_options).to(h.dtype)
            h = h + one_hot @ self.option_layer(self.embedding.weight).to(h.dtype)
        return self.body(self.activation(h))

    def forward_all(self, obs: Tensor) -> Tensor:
        """Raw outputs of all options: obs [..., O] -> [..., K, R]."""
        h = self.obs_layer(obs)
        if self.separate:
            return self.body(self.activation(h)).unflatten(-1, (self.num_options, self.out_size))
        h = h.unsqueeze(-2)
        if self.embedding is not None:
            h = h + self.option_layer(self.embedding.weight)
        return self.body(self.activation(h))

    def mean_action(self, raw: Tensor) -> Tensor:
        """Noise-free action from raw outputs: [..., A] in [-1, 1], or the likeliest action's number [..., 1]."""
        if self.kind == "categorical":
            return raw.argmax(-1, keepdim=True).to(torch.float32)
        return torch.tanh(raw[..., : self.action_size])

    def gaussian(self, raw: Tensor) -> Tuple[Tensor, Tensor]:
        """Mean and standard deviation before the tanh, each [..., A], from raw outputs of a Gaussian actor."""
        mean, log_std = raw.float().chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX).exp()

    def sample(self, raw: Tensor) -> Tuple[Tensor, Tensor]:
        """Reparameterised action [..., A] in (-1, 1) of a Gaussian actor and its log-probability [...]."""
        mean, std = self.gaussian(raw)
        pre_tanh = mean + std * torch.randn_like(mean)
        return torch.tanh(pre_tanh), squashed_gaussian_log_prob(pre_tanh, mean, std)

    def log_prob(self, raw: Tensor, action: Tensor) -> Tensor:
        """Log-probability of given actions, raw [..., R], action [..., A] (or [..., 1]) -> [...]; not deterministic.

        Stored actions lie in [-1, 1] in float32; the inverse of the tanh is taken just inside.
        """
        if self.kind == "categorical":
            return raw.float().log_softmax(-1).gather(-1, action.long()).squeeze(-1)
        mean, std = self.gaussian(raw)
        return squashed_gaussian_log_prob(torch.atanh(action.clamp(-ACTION_INSIDE, ACTION_INSIDE)), mean, std)


class Policy(nn.Module):
    """Everything a worker needs to act, K = ``num_options`` >= 1. With K = 1 there is no option machinery.

    Inputs of the networks are *normalised* observations: call :attr:`normalizer` first, then, where the task has
    images, :meth:`perceive`.

    Attributes:
        input_size: numbers that the networks take: O, with images O + F.
        encoder: features of images (:class:`ImageEncoder`), shared by all networks; None without images.
        option_value: network of Q_Omega(s, .); what interruption asks (:class:`OptionAgent`).
        student: flat policy without options into which the options are distilled, or None.
        exploration: [2] float32, multiplier of the exploration noise and probability of a uniform action.
        switch_cost: [] float32, the deliberation cost (the learner may tune it).
    """

    exploration: Tensor
    switch_cost: Tensor

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        num_options: int = 1,
        actor: str = "deterministic",
        hidden_sizes: Sequence[int] = (256, 256),
        option_hidden_sizes: Sequence[int] = (128, 128),
        activation: str = "relu",
        embedding_size: int = 16,
        init: str = "orthogonal",
        normalize: bool = True,
        obs_clip: float = 5.0,
        initial_termination: float = 0.1,
        option_heads: str = "embedding",
        option_selection: Union[str, int] = "learned",
        student_hidden_sizes: Optional[Sequence[int]] = None,
        image_shape: Optional[Sequence[int]] = None,
        image_features: int = 50,
        network: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__()
        self._places: Optional[List[Tuple[Dict[str, Any], str]]] = None
        self.num_options = num_options
        self.option_selection = option_selection
        self.normalizer = Normalizer(obs_size, obs_clip if normalize else float("inf"))
        self.encoder: Optional[ImageEncoder] = None
        if image_shape is not None:
            self.encoder = ImageEncoder(image_shape, image_features, init)
            obs_size += image_features
        self.input_size = obs_size
        self.actor = OptionActor(
            obs_size, action_size, num_options, actor, hidden_sizes, activation, embedding_size, init, option_heads,
            network,
        )  # fmt: skip
        self.option_policy: Optional[nn.Sequential] = None
        self.termination: Optional[nn.Sequential] = None
        self.option_value: Optional[nn.Sequential] = None
        self.student: Optional[OptionActor] = None
        if num_options > 1:
            sizes = [obs_size, *option_hidden_sizes, num_options]
            self.option_policy = make_network(network, sizes, activation, 0.01, init)
            self.termination = make_network(network, sizes, activation, 0.01, init)
            # Options begin long: beta = sigmoid(bias) at the start. Near 1/2 nothing temporal could be learned.
            last, logit = self.termination[-1], float(np.log(initial_termination / (1.0 - initial_termination)))
            if isinstance(last, nn.Linear):
                nn.init.constant_(last.bias, logit)
            else:
                self.termination.append(Shift(num_options, logit))
            self.option_value = make_network(network, sizes, activation, 0.01, init)
        if student_hidden_sizes is not None:
            self.student = OptionActor(
                obs_size, action_size, 1, actor, student_hidden_sizes, activation, embedding_size, init,
                network=network,
            )  # fmt: skip
        self.register_buffer("exploration", torch.tensor([1.0, 1.0]))
        self.register_buffer("switch_cost", torch.tensor(0.0))

    def perceive(self, obs: Tensor, image: Tensor) -> Tensor:
        """Normalised observations [..., O] and their images uint8 [..., C, H, W] -> [..., O + F], with gradient."""
        assert self.encoder is not None
        return torch.cat((obs, self.encoder(image)), -1)

    def option_probs(self, obs: Tensor) -> Tensor:
        """pi_Omega(.|s): [..., O] -> [..., K]. Not learned where ``option_selection`` is ``random`` or one option."""
        if self.option_policy is None:
            return torch.ones(*obs.shape[:-1], 1, device=obs.device)
        if self.option_selection == "random":
            return torch.full((*obs.shape[:-1], self.num_options), 1.0 / self.num_options, device=obs.device)
        if isinstance(self.option_selection, int):
            chosen = F.one_hot(torch.tensor(self.option_selection, device=obs.device), self.num_options)
            return chosen.to(torch.float32).expand(*obs.shape[:-1], -1)
        return self.option_policy(obs).float().softmax(-1)

    def beta(self, obs: Tensor) -> Tensor:
        """Termination probabilities beta_o(s) of all options: [..., O] -> [..., K]."""
        if self.termination is None:
            return torch.zeros(*obs.shape[:-1], 1, device=obs.device)
        return self.termination(obs).float().sigmoid()

    def option_values(self, obs: Tensor) -> Tensor:
        """Q_Omega(s, .) by the network of its own: [..., O] -> [..., K]; only with K > 1."""
        assert self.option_value is not None
        return self.option_value(obs).float()

    def _tensors(self) -> List[Tensor]:
        """Parameters and buffers of float32 in the order of the state dict, which itself takes longer than the copy."""
        if self._places is None:
            self._places = [
                (owner, name)
                for module in self.modules()
                for owner in (module._parameters, module._buffers)
                for name, t in owner.items()
                if t is not None and t.dtype == torch.float32 and name not in module._non_persistent_buffers_set
            ]
        return [owner[name] for owner, name in self._places]

    @property
    def flat_size(self) -> int:
        """Number of float32 values of :meth:`flatten`."""
        return sum(t.numel() for t in self._tensors())

    @torch.no_grad()
    def flatten(self, out: Optional[np.ndarray] = None) -> np.ndarray:
        """All parameters and statistics as one float32 vector, in the order of the state dict; written into ``out``."""
        parts = [t.reshape(-1) for t in self._tensors()]
        if out is None:
            return torch.cat(parts).cpu().numpy()
        target = torch.from_numpy(out)
        if parts[0].is_cpu:
            torch.cat(parts, out=target)
        else:
            target.copy_(torch.cat(parts))  # one transfer
        return out

    @torch.no_grad()
    def load_flat(self, values: np.ndarray) -> None:
        """Inverse of :meth:`flatten`, in place. Raises ValueError on another size."""
        if values.size != self.flat_size:
            raise ValueError("policy has %d values, received %d" % (self.flat_size, values.size))
        vector, offset = torch.from_numpy(values), 0
        for t in self._tensors():
            t.copy_(vector[offset : offset + t.numel()].view_as(t))
            offset += t.numel()


def build_policy(settings: Dict[str, Any]) -> Policy:
    """Policy from the plain settings that travel to workers."""
    return Policy(**settings)
