"""Random shifts: whole pixels, borders repeated, each image its own."""

import numpy as np
import pytest
import torch

from claw_lightning.augmentation import random_shift

IMAGE = torch.arange(1 * 5 * 6, dtype=torch.uint8).view(1, 5, 6)


def shifted(image, dy, dx):
    """The image moved by index arithmetic of NumPy alone."""
    rows = np.clip(np.arange(image.shape[1]) + dy, 0, image.shape[1] - 1)
    columns = np.clip(np.arange(image.shape[2]) + dx, 0, image.shape[2] - 1)
    return image.numpy()[:, rows][:, :, columns]


def test_every_shift_within_bounds_and_none_beyond():
    torch.manual_seed(0)
    images = random_shift(IMAGE.expand(2000, 1, 5, 6), 2)
    assert images.dtype == torch.uint8 and images.shape == (2000, 1, 5, 6)
    possible = {shifted(IMAGE, dy, dx).tobytes(): (dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)}
    found = [possible[image.tobytes()] for image in images.numpy()]
    counts = {shift: found.count(shift) for shift in possible.values()}
    assert len(counts) == 25 and min(counts.values()) > 40  # 80 expected


@pytest.mark.parametrize("lead", [(), (4,), (2, 3)])
def test_leading_axes_and_channels_move_together(lead):
    images = torch.stack([IMAGE[0], IMAGE[0] + 100]).expand(*lead, 2, 5, 6)
    moved = random_shift(images, 1)
    assert moved.shape == images.shape
    assert torch.equal(moved[..., 1, :, :], moved[..., 0, :, :] + 100)


def test_no_shift_is_the_image_itself_and_draws_nothing():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert random_shift(IMAGE, 0) is IMAGE
    assert torch.equal(before, torch.get_rng_state())
