"""Film: which steps are shown, how images are reduced, and that a broken camera ends nothing but the film."""

from types import SimpleNamespace

import numpy as np
import pytest

from claw_lightning.rollout.envs.base import EnvError
from claw_lightning.rollout.recorder import Film, reduced


class Camera:
    """Shows the number of images taken."""

    def __init__(self, horizon=0, autoreset="next_step", error=None):
        self.spec = SimpleNamespace(max_episode_steps=horizon, autoreset=autoreset, task="T")
        self.taken, self.error = 0, error

    def render(self, lane):
        if self.error is not None:
            raise EnvError(self.error)
        self.taken += 1
        return np.full((4, 4, 3), self.taken, np.uint8)


def film_of(camera, length, most=5):
    film = Film(camera, 1, most, 240)
    for step in range(length):
        film.look(0, step, 0)
        film.look(1, step, 1)  # an episode of which no images are wanted
    film.end(0, length - 1, 0)
    return film


@pytest.mark.parametrize("length, steps", [(9, [0, 2, 4, 6, 8]), (6, [0, 2, 4, 5])])
def test_steps_of_a_task_of_known_length(length, steps):
    camera = Camera(horizon=9)
    arrays = film_of(camera, length).arrays()
    assert arrays["frame_step"].tolist() == steps and arrays["frame_episode"].tolist() == [0] * len(steps)
    # The last image was taken after the last step.
    assert arrays["frames"][-1, 0, 0, 0] == camera.taken
    assert camera.taken <= 6


def test_steps_of_a_task_of_unknown_length_stay_evenly_spaced_and_few():
    for length in range(1, 60):
        steps = film_of(Camera(), length).arrays()["frame_step"]
        assert steps[0] == 0 and steps[-1] == length - 1 and len(steps) <= 6
        assert len(set(np.diff(steps[:-1]))) <= 1


def test_where_the_simulator_has_reset_already_the_last_image_is_of_an_earlier_step():
    assert film_of(Camera(9, "same_step"), 6).arrays()["frame_step"].tolist() == [0, 2, 4]


def test_a_broken_camera_is_told_and_asked_no_more():
    film = film_of(Camera(error="no driver"), 9)
    assert film.error == "no driver" and film.arrays()["frames"].shape == (0, 0, 0, 3)


def test_reduced_by_means_of_blocks():
    image = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    small = reduced(image, 2)
    assert small.shape == (2, 3, 3)
    np.testing.assert_array_equal(small[0, 0], image[:2, :2].reshape(4, 3).mean(0).astype(np.uint8))
    np.testing.assert_array_equal(reduced(image, 4), image)
