"""Categorical critics: a return is a distribution over fixed atoms instead of a number.

Notation: B = batch, K = options, C = critics, Z = atoms, equally spaced from z[0] to z[Z-1]. `probs` are probabilities
of the atoms, never logits. Nothing is cast.

One target, for executed options o [B], in the order of the scalar critics (twins per option first, options second):

    twins   = logits.softmax(-1)                                        [C, B, K, Z] of the target critics at s'
    z_omega = lower_twin(twins, z)                                      [B, K, Z]    the less optimistic critic
    z_u     = mix_options_with_cost(z_omega, option_probs, beta, z, c)  [B, K, Z]    distribution of U(s', .)
    target  = project(z_u[rows, o], reward, gamma * ~terminated, z)     [B, Z]
    loss    = cross_entropy(logits of the critics at (s, o, a), target, weight)

Mixing each critic by itself and choosing the twin of U afterwards is another quantity, never smaller in the mean: an
option overrated by one critic would then keep that value inside V wherever the critic is low on the other options, and
the target's V would not be the V of A = Q_Omega - V.

Sources:
    [C51]      Bellemare, Dabney, Munos, A Distributional Perspective on Reinforcement Learning, arXiv 1707.06887
    [FastTD3]  Seo et al., FastTD3: Simple, Fast, and Capable Reinforcement Learning for Humanoid Control,
               arXiv 2505.22642
    [OC]       Bacon, Harb, Precup, The Option-Critic Architecture, arXiv 1609.05140
    [DC]       Harb, Bacon, Klissarov, Precup, When Waiting is not an Option: learning options with a deliberation cost,
               arXiv 1709.04571
"""

from __future__ import annotations

import torch
from torch import Tensor

from claw_lightning.losses import Scalar, _same_shape, weighted_mean

__all__ = ["cross_entropy", "lower_twin", "mean", "mix_options", "mix_options_with_cost", "project", "support"]


def support(
    low: float,
    high: float,
    atoms: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Equally spaced atoms, [Z].

    z_i = low + i (high - low) / (Z - 1)                                                                      [C51]

    Raises ValueError with fewer than two atoms, or unless low < high.
    """
    if atoms < 2 or not low < high:
        raise ValueError(f"a support needs two atoms and low < high, got {atoms} atoms from {low} to {high}")
    return torch.linspace(low, high, atoms, dtype=dtype, device=device)


def mean(probs: Tensor, z: Tensor) -> Tensor:
    """Expected return, [..., Z], [Z] -> [...]; differentiable in probs.

    Q = sum_i p_i z_i                                                                                         [C51]
    """
    _check_atoms(probs, z)
    return (probs * z).sum(dim=-1)


@torch.no_grad()
def project(probs: Tensor, reward: Tensor, discount: Tensor, z: Tensor) -> Tensor:
    """Distribution of r + discount * Z on the atoms, [..., Z], [...], [...], [Z] -> [..., Z], a constant.

    p'_i = sum_j p_j max(0, 1 - |clip(r + discount z_j, z_0, z_{Z-1}) - z_i| / dz)                            [C51]

    Each moved atom is shared between its two neighbours in inverse proportion to the distances: mass is kept, and so is
    the mean as long as no moved atom with mass leaves the support (mass outside is put on the outermost atom).

    discount: gamma (1 - terminated), or gamma^n of an n-step return. Where it is 0, probs are not looked at: what is
        stored after an end may be anything, also NaN.
    """
    _check_atoms(probs, z)
    _same_shape(rows_of_probs=probs[..., 0], reward=reward, discount=discount)
    num_atoms = z.shape[0]
    certain = torch.zeros_like(z)
    certain[0] = 1
    probs = torch.where((discount == 0).unsqueeze(-1), certain, probs)

    # Position of each moved atom in units of the spacing; the clamp after the division also absorbs its rounding.
    moved = reward.unsqueeze(-1) + discount.unsqueeze(-1) * z
    position = ((moved - z[0]) / (z[-1] - z[0]) * (num_atoms - 1)).clamp(0, num_atoms - 1)
    # With the last interval's upper atom included, no position falls on a single atom with its mass lost.
    lower = position.floor().clamp_max(num_atoms - 2)
    to_upper = position - lower

    # One flat index: index_add is deterministic on accelerators too.
    rows = torch.arange(reward.numel(), device=z.device).view(*reward.shape, 1) * num_atoms
    # A reward that is NaN makes the whole row NaN, which can be seen, instead of an index out of range, which on an
    # accelerator ends the process.
    index = (rows + lower.nan_to_num(0.0).long()).flatten()
    result = torch.zeros_like(probs).flatten()
    result.index_add_(0, index, (probs * (1 - to_upper)).flatten())
    result.index_add_(0, index + 1, (probs * to_upper).flatten())
    return result.view_as(probs)


@torch.no_grad()
def mix_options(probs: Tensor, option_probs: Tensor, beta: Tensor) -> Tensor:
    """Distribution of the arrival value, [B, K, Z], [B, K], [B, K] -> [B, K, Z], a constant.

    Z_U(s, o) = (1 - beta_o(s)) Z(s, o) + beta_o(s) sum_o' pi_Omega(o'|s) Z(s, o')                             [OC]

    as a mixture of distributions; its mean is `losses.arrival_value` of the means, without cost. `probs` are of one
    critic per option: apply `lower_twin` before.
    """
    chosen = _chosen(probs, option_probs, beta)
    return torch.lerp(probs, chosen.expand_as(probs), beta.unsqueeze(-1))


@torch.no_grad()
def mix_options_with_cost(
    probs: Tensor, option_probs: Tensor, beta: Tensor, z: Tensor, deliberation_cost: Scalar
) -> Tensor:
    """As `mix_options`, with the deliberation cost inside U, [B, K, Z], [B, K], [B, K], [Z], number -> [B, K, Z].

    Z_U(s, o) = (1 - beta_o(s)) Z(s, o) + beta_o(s) (sum_o' pi_Omega(o'|s) Z(s, o') - c)                    [OC, DC]

    The cost moves the atoms of the switched part down by c; as they then lie between those of the support, that part is
    projected back before it is mixed in. The mean is that of `losses.arrival_value`, except for mass nearer than c to
    the lower end, where it cannot move by the whole of c: leave room below. The projection widens that part by at most
    dz^2 / 4 in variance.

    deliberation_cost: number or [].
    """
    _check_atoms(probs, z)
    chosen = _chosen(probs, option_probs, beta)
    zero = torch.zeros_like(chosen[..., 0])
    chosen = project(chosen, zero - deliberation_cost, zero + 1, z)
    return torch.lerp(probs, chosen.expand_as(probs), beta.unsqueeze(-1))


def lower_twin(probs: Tensor, z: Tensor) -> Tensor:
    """Of several critics the whole distribution with the smallest mean, [C, ..., Z], [Z] -> [..., Z].

    i* = argmin_i sum_j p_ij z_j for each element of [...]                                                [FastTD3]

    The mean of the result is the minimum of the scalar critics; an atom-wise minimum would not be a distribution. Give
    it all options, [C, B, K, Z], and mix afterwards: the twin is chosen per option. Differentiable in the chosen probs.
    """
    lowest = mean(probs, z).argmin(dim=0)
    index = lowest[None, ..., None].expand(1, *probs.shape[1:])
    return probs.gather(0, index)[0]


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """Loss of all critics, [C, B, Z], [B, Z], [B] or None -> scalar; no gradient into `target`.

    L = sum_i mean_w -sum_j target_j log softmax(logits_i)_j                                             [C51, FastTD3]
    """
    _same_shape(logits=logits[0], target=target)
    return weighted_mean(-(target.detach() * logits.log_softmax(dim=-1)).sum(dim=-1).sum(dim=0), weight)


# ---------------------------------------------------------------------------------------------------------------------


def _chosen(probs: Tensor, option_probs: Tensor, beta: Tensor) -> Tensor:
    """Distribution of the value before an option is chosen, [B, 1, Z]."""
    _same_shape(rows_of_probs=probs[..., 0], option_probs=option_probs, beta=beta)
    return (option_probs.unsqueeze(-1) * probs).sum(dim=-2, keepdim=True)


def _check_atoms(probs: Tensor, z: Tensor) -> None:
    if z.dim() != 1 or probs.shape[-1:] != z.shape:
        raise ValueError(f"shapes differ: probs {list(probs.shape)}, atoms {list(z.shape)}")
