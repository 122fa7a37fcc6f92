"""Augmentation of images in learning."""

from __future__ import annotations

import torch
from torch import Tensor


def random_shift(images: Tensor, pixels: int) -> Tensor:
    """Each image moved by up to ``pixels`` in both directions, its border repeated: [..., C, H, W], any dtype.

    The augmentation of DrQ (Kostrikov, Yarats, Fergus, arXiv 2004.13649) by whole pixels. 0: the images themselves.
    """
    if pixels == 0:
        return images
    flat = images.flatten(0, -4) if images.dim() > 3 else images.unsqueeze(0)
    for axis in (2, 3):
        size = flat.shape[axis]
        shift = torch.randint(-pixels, pixels + 1, (len(flat), 1), device=flat.device)
        index = (torch.arange(size, device=flat.device) + shift).clamp_(0, size - 1)
        shape = (len(flat), 1, size, 1) if axis == 2 else (len(flat), 1, 1, size)
        flat = flat.gather(axis, index.view(shape).expand(flat.shape))
    return flat.view_as(images)
