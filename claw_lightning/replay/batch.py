"""ReplayBatch: what one ``training_step`` receives, as few packed tensors that move to a device in as many copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from claw_lightning.replay.samplers import Places
from claw_lightning.rollout.normalizer import Moments
from claw_lightning.rollout.ring import (
    BY_CAP,
    FIRST,
    INTEGER_FIELDS,
    SWITCHED,
    TERMINATED,
    TRUNCATED,
    VECTOR_FIELDS,
    RowLayout,
)

#: Attributes of a batch that move to a device.
TENSORS = ("rows", "next_obs", "valid", "weights", "next_images", "images", "next_states")


@dataclass
class ReplayBatch:
    """Rows and their next observations for U updates of B samples each.

    A sample is one row, or a segment of L consecutive rows of one lane. Shapes are written for single rows; a batch of
    segments has [U, B, L, ...] in place of [U, B, ...] everywhere.

    Attributes:
        rows: [U, B, W] or [U, B, L, W] float32, packed rows (see :class:`RowLayout`).
        next_obs: [U, B, O] or [U, B, L, O] raw true next observations.
        layout: where each field lies in a row.
        moments: count, mean and squared deviations of the observations that arrived since the last batch, for the
            running normalisation; with next states those of observations and states side by side, [O + S].
        env_steps: environment steps inserted so far.
        valid: [U, B, L] bool, which steps of a segment belong to it; a prefix of at least one step. The numbers of the
            other steps are finite: zero, but for the observation of the first of them. None for single rows.
        weights: [U, B] float32 importance weights of the samples; None: all one.
        places: where the U x B samples begin, if the sampler wants to be told how wrong the critics were there; else
            None.
        next_images: [U, B, bytes] or [U, B, L, bytes] uint8 pixels that go with ``next_obs``; None without images.
        images: likewise with the observations, where the rows hold them compressed; else None.
        next_states: [U, B, S] or [U, B, L, S] states that go with ``next_obs``; None where critics see none.
    """

    rows: Tensor
    next_obs: Tensor
    layout: RowLayout
    moments: Moments
    env_steps: int = 0
    valid: Tensor | None = None
    weights: Tensor | None = None
    places: Places | None = None
    next_images: Tensor | None = None
    images: Tensor | None = None
    next_states: Tensor | None = None

    def to(self, device: torch.device | str, **kwargs: Any) -> ReplayBatch:
        """Copy to a device (called by Lightning); the batch itself if it is there already."""
        moved = self._map(lambda tensor: tensor.to(device, **kwargs))
        same = all(mine is theirs for mine, theirs in zip(self.tensors(), moved.tensors(), strict=True))
        return self if same else moved

    def pin_memory(self) -> ReplayBatch:
        """Copy in page-locked memory, from where copies to a GPU run beside what else it does."""

        def pinned(tensor: Tensor) -> Tensor:
            # Views of segments are made contiguous on the way: others are not copied beside what else the GPU does.
            return (
                tensor
                if tensor.is_cuda
                else torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
            )

        return self._map(pinned)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of all tensors until a CUDA stream has done what it was given so far, also if they go."""
        for tensor in self.tensors():
            tensor.record_stream(stream)

    def tensors(self) -> list[Tensor]:
        """All tensors that are there, in the order of the attributes."""
        found = (getattr(self, name) for name in TENSORS)
        return [tensor for tensor in found if tensor is not None]

    def _map(self, function: Callable[[Tensor], Tensor]) -> ReplayBatch:
        present = {name: getattr(self, name) for name in TENSORS}
        changed: dict[str, Any] = {name: function(each) for name, each in present.items() if each is not None}
        return replace(self, **changed)

    def __len__(self) -> int:
        """Number of updates U."""
        return self.rows.shape[0]

    def field(self, name: str) -> Tensor:
        """Field of all rows: [U, B, size], or [U, B] for one-word fields (int32 for integers); L comes after B."""
        start, stop = self.layout.span(name)
        part = self.rows[..., start:stop]
        if name == "image":
            return part.view(torch.uint8)[..., : self.layout.image_size]
        if name in INTEGER_FIELDS or name == "image_place":
            part = part.contiguous().view(torch.int32)
        return part if name in VECTOR_FIELDS else part[..., 0]

    @property
    def image(self) -> Tensor | None:
        """[U, B, C, H, W] or [U, B, L, C, H, W] uint8 beside :attr:`obs`; None without images."""
        if self.layout.image_shape is None:
            return None
        pixels = self.field("image") if self.images is None else self.images
        return pixels.unflatten(-1, self.layout.image_shape)

    @property
    def next_image(self) -> Tensor | None:
        """[U, B, C, H, W] or [U, B, L, C, H, W] uint8 beside ``next_obs``; None without images."""
        if self.layout.image_shape is None:
            return None
        assert self.next_images is not None
        return self.next_images.unflatten(-1, self.layout.image_shape)

    @property
    def obs(self) -> Tensor:
        """[U, B, O] or [U, B, L, O] raw observations."""
        return self.field("obs")

    @property
    def obs_moments(self) -> Moments:
        """The part of :attr:`moments` that is of the observations, [O]."""
        count, mean, squares = self.moments
        return count, mean[: self.layout.obs_size], squares[: self.layout.obs_size]

    @property
    def states_moments(self) -> Moments:
        """The part of :attr:`moments` that is of the states, [S]; [0] without next states."""
        count, mean, squares = self.moments
        return count, mean[self.layout.obs_size :], squares[self.layout.obs_size :]

    @property
    def states(self) -> Tensor | None:
        """[U, B, S] or [U, B, L, S] raw states beside :attr:`obs`; None where critics see none."""
        return None if self.next_states is None else self.field("states")

    @property
    def action(self) -> Tensor:
        """[U, B, A] or [U, B, L, A] in [-1, 1]."""
        return self.field("action")

    @property
    def reward(self) -> Tensor:
        """[U, B] or [U, B, L]."""
        return self.field("reward")

    @property
    def option(self) -> Tensor:
        """[U, B] or [U, B, L] int64, option executed."""
        return self.field("option").long()

    @property
    def previous_option(self) -> Tensor:
        """[U, B] or [U, B, L] int64, option that arrived here; -1 at first steps."""
        return self.field("previous_option").long()

    @property
    def option_age(self) -> Tensor:
        """[U, B] or [U, B, L] int32, steps since the option began."""
        return self.field("option_age")

    @property
    def log_prob_action(self) -> Tensor:
        """[U, B] or [U, B, L], of the action under the policy that acted, given the option executed."""
        return self.field("log_prob_action")

    @property
    def log_prob_option(self) -> Tensor:
        """[U, B] or [U, B, L], of the option under the policy that acted, given the previous option."""
        return self.field("log_prob_option")

    @property
    def version(self) -> Tensor:
        """[U, B] or [U, B, L] int32, updates at publication of the policy that acted."""
        return self.field("version")

    @property
    def terminated(self) -> Tensor:
        """[U, B] or [U, B, L] bool."""
        return (self.field("flags") & TERMINATED) != 0

    @property
    def truncated(self) -> Tensor:
        """[U, B] or [U, B, L] bool, a time limit cut the episode after this step."""
        return (self.field("flags") & TRUNCATED) != 0

    @property
    def first(self) -> Tensor:
        """[U, B] or [U, B, L] bool, first step of an episode."""
        return (self.field("flags") & FIRST) != 0

    @property
    def switched(self) -> Tensor:
        """[U, B] or [U, B, L] bool, the option was selected at this step."""
        return (self.field("flags") & SWITCHED) != 0

    @property
    def ended_by_cap(self) -> Tensor:
        """[U, B] or [U, B, L] bool, the previous option ended by the duration cap, not by its termination."""
        return (self.field("flags") & BY_CAP) != 0
