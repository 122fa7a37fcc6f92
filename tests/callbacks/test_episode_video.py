"""EpisodeVideo: what a recording leaves, that it changes nothing, and that the run goes on where it cannot be made."""

import logging
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from callbacks import EpisodeVideo, episode_video
from callbacks.episode_drawing import BACKGROUND, annotated, colour, film_strip, time_line
from claw_lightning import cli
from claw_lightning.data import EnvConfig
from claw_lightning.errors import ConfigError, WorkerError
from tests.runs import FAST, fit_lockstep, make_module, tensors

CAMERA = '''
import os
import numpy as np
from claw_lightning.rollout.envs import GymnasiumEnv
from claw_lightning.rollout.envs.base import EnvError

class Camera(GymnasiumEnv):
    """Pendulum with a camera that shows the number of images taken."""

    count = 0
    draws = False

    @classmethod
    def rendering(cls, init_args):
        return dict(init_args, make_kwargs={"render_mode": "rgb_array", "max_episode_steps": 47})

    def render(self, lane):
        self.count += 1
        return np.full((40, 24, 3), self.count, np.uint8)

class Broken(Camera):
    def render(self, lane):
        raise EnvError("no camera here; buy one")

class Deadly(Camera):
    def render(self, lane):
        os._exit(1)
'''

pytestmark = pytest.mark.usefixtures("elsewhere")


def command(camera, *more):
    Path("film_env.py").write_text(CAMERA)
    return [
        *FAST, f"--data.env=film_env.{camera}", "--data.env.task=Pendulum-v1", "--data.max_env_steps=200",
        "--data.env.make_kwargs={max_episode_steps: 47}", "--trainer.check_val_every_n_epoch=100",
        "--trainer.callbacks+=EpisodeVideo", "--trainer.callbacks.share=1", "--trainer.callbacks.height=20", *more,
    ]  # fmt: skip


def recordings():
    return [np.load(file) for file in sorted(Path().glob("runs/version_0/episodes/*.npz"))]


def test_a_recording_holds_the_episode_and_what_the_networks_say():
    assert cli.main(command("Camera", "--data.mode=overlapped")) == 0, Path("error.log").read_text()
    found = recordings()
    assert len(found) >= 1
    steps = found[-1]
    assert {name: steps[name].shape for name in ("obs", "option", "reward", "termination", "option_probs", "q")} == {
        "obs": (47, 3), "option": (47,), "reward": (47,), "termination": (47,), "option_probs": (47, 2),
        "q": (47, 2),
    }  # fmt: skip
    assert np.isnan(steps["termination"]).tolist() == [True] + [False] * 46
    np.testing.assert_allclose(steps["option_probs"].sum(1), 1.0, atol=1e-5)
    assert np.isfinite(steps["q"]).all() and steps["truncated"][-1] and not steps["truncated"][:-1].any()
    # The film: 24 images of 40 pixels' height reduced to 20, spaced evenly from the first step to the last.
    assert steps["frames"].shape == (24, 20, 12, 3)
    assert steps["frame_step"][0] == 0 and steps["frame_step"][-1] == 46 and not steps["frame_episode"].any()
    assert set(np.diff(steps["frame_step"])) == {2}
    assert int(steps["num_options"]) == 2 and float(steps["gamma"]) == 0.99
    name = next(iter(sorted(Path().glob("runs/version_0/episodes/*.npz"), reverse=True))).stem
    assert len(name) == 10 and int(name) == int(steps["env_steps"])
    lines = Path("runs/version_0/worker_events.csv").read_text().splitlines()
    assert lines[0] == "seconds,env_steps,worker,event,detail"
    told = [tuple(line.split(",")[2:4]) for line in lines[1:]]
    assert {("worker_0", "start"), ("worker_0", "ready"), ("worker_0", "stop"), ("evaluator", "ready")} <= set(told)


@pytest.mark.parametrize("camera, reason", [("Broken", "no camera here; buy one"), ("Deadly", "the evaluator")])
def test_without_images_the_steps_are_recorded_and_the_run_goes_on(camera, reason, caplog):
    # One that dies can only be survived in a process of its own.
    assert cli.main(command(camera, f"--data.mode={'overlapped' if camera == 'Deadly' else 'lockstep'}")) == 0
    warnings = [r.getMessage() for r in caplog.records if r.name == "callbacks.episode_video"]
    assert len([text for text in warnings if "no images" in text]) == 1
    assert reason in next(text for text in warnings if "no images" in text)
    steps = recordings()[-1]
    assert len(steps["frames"]) == 0 and len(steps["obs"]) == 47


def test_a_run_is_the_same_to_the_bit_with_and_without(tmp_path):
    env = EnvConfig("GymnasiumEnv", {"task": "Pendulum-v1", "make_kwargs": {"max_episode_steps": 40}})
    settings = {"check_val_every_n_epoch": 1, "data": {"env": env, "max_env_steps": 200}}
    _, plain, _ = fit_lockstep(tmp_path / "a", **settings)
    video = EpisodeVideo(share=1.0, height=64)
    _, filmed, _ = fit_lockstep(tmp_path / "b", callbacks=[video], **settings)
    assert video._evaluations > 1
    for (name, mine), (_, theirs) in zip(tensors(plain), tensors(filmed), strict=True):
        assert torch.equal(mine, theirs), name


class Data:
    """Plays nothing, in a given time."""

    eval_seed = 0

    def __init__(self, seconds=0.0, error=None, fails_always=False):
        self.seconds, self.error, self.calls, self.fails_always = seconds, error, [], fails_always

    def record(self, policy, agent, episodes, seed, frames, film, draws_options):
        self.calls.append(frames)
        if self.error is not None and (frames or self.fails_always):
            raise self.error
        time.sleep(self.seconds)
        return {"step": np.zeros(0), "frame_error": None}


def validate(video, data, times, should_stop=False):
    video._write = lambda *written: None
    state = SimpleNamespace(fn="fit")
    trainer = SimpleNamespace(
        state=state, sanity_checking=False, is_global_zero=True, should_stop=should_stop, datamodule=data
    )
    module = make_module(build=True)
    for _ in range(times):
        video.on_validation_end(trainer, module)


def test_recordings_wait_until_they_cost_no_more_than_their_share():
    data = Data(seconds=0.02)
    video = EpisodeVideo(share=0.01)
    validate(video, data, 3)
    assert data.calls == [1]
    validate(video, data, 1, should_stop=True)  # the last of the run
    assert data.calls == [1, 1]
    assert video._not_before - time.monotonic() > 1.5  # 0.02 s at a share of 0.01: not before 2 s


def test_every_nth_evaluation():
    data = Data()
    validate(EpisodeVideo(every_n_evaluations=3, share=1.0), data, 7)
    assert len(data.calls) == 2


@pytest.mark.parametrize("error", [WorkerError("gone"), ConfigError("wrong")])
def test_a_camera_that_failed_is_not_tried_again(error, caplog):
    caplog.set_level(logging.WARNING)
    data = Data(error=error)
    validate(EpisodeVideo(share=1.0), data, 2)
    assert data.calls == [1, 0, 0]
    assert caplog.text.count("EpisodeVideo: no images") == 1


@pytest.mark.parametrize("error", [WorkerError("gone"), ConfigError("wrong"), OSError(28, "No space left on device")])
def test_a_recording_that_cannot_be_played_ends_no_run(error, caplog):
    data = Data(error=error, fails_always=True)
    validate(EpisodeVideo(share=1.0), data, 3)
    assert len(data.calls) <= 2
    assert caplog.text.count("no more episodes are recorded, the run goes on") == 1


def written(tmp_path, monkeypatch, num_actions=0):
    """What :meth:`EpisodeVideo._write` makes of two steps."""
    monkeypatch.setattr(episode_video, "run_folder", lambda trainer: tmp_path)
    monkeypatch.setattr(episode_video, "judge_episodes", lambda module, steps: {})
    zeros = np.zeros(2, np.int32)
    steps = dict.fromkeys(episode_video.FIELDS, zeros) | {"action": np.array([[2.0], [0.0]], np.float32)}
    steps |= {"frames": np.zeros((0, 0, 0, 3), np.uint8), "frame_episode": zeros[:0], "frame_step": zeros[:0]}
    settings = SimpleNamespace(gamma=0.9, num_options=1, greedy_options=True)
    module = SimpleNamespace(
        env_steps=3, updates=4, settings=settings, spec=SimpleNamespace(num_actions=num_actions, control_frequency=0.0)
    )
    EpisodeVideo()._write(SimpleNamespace(loggers=[]), module, steps)


def test_discrete_actions_are_recorded_as_integers(tmp_path, monkeypatch):
    written(tmp_path, monkeypatch, num_actions=3)
    with np.load(tmp_path / "episodes" / "0000000003.npz") as found:
        assert found["action"].dtype == np.int64 and found["action"].tolist() == [[2], [0]]


def test_a_full_disk_leaves_no_half_recording_and_is_told_by_name(tmp_path, monkeypatch):
    def full(stream, **arrays):
        stream.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match=r"No space left on device: .*0000000003\.npz"):
        written(tmp_path, monkeypatch)
    assert not list((tmp_path / "episodes").iterdir())


@pytest.mark.parametrize(
    "settings", [{"every_n_evaluations": 0}, {"episodes": 0}, {"height": 8}, {"height": 480}, {"share": 0.0}]
)
def test_wrong_settings_are_named(settings):
    with pytest.raises(ConfigError, match=f"EpisodeVideo.{next(iter(settings))}"):
        EpisodeVideo(**settings)


def filmed():
    return {
        "option": np.array([0, 0, 1, 1, 0]), "episode": np.array([0, 0, 0, 0, 1]),
        "frames": np.full((3, 40, 24, 3), 7, np.uint8), "frame_episode": np.array([0, 0, 1]),
        "frame_step": np.array([0, 3, 0]),
    }  # fmt: skip


def test_the_time_line_shows_options_so_far():
    line = time_line(np.array([0, 0, 1]), 4, 8, 2)
    wanted = [colour(0)] * 4 + [colour(1)] * 2 + [BACKGROUND] * 2
    assert [tuple(pixel) for pixel in line[1]] == wanted


def test_images_carry_their_option():
    pytest.importorskip("PIL", reason="extra `video`")
    images = annotated(filmed(), 0)
    assert images.shape == (2, 64, 32, 3)
    assert tuple(images[0, 0, 0]) == colour(0) and tuple(images[1, 0, 0]) == colour(1)
    assert (images[:, 16:56, 4:28] == 7).all()
    assert tuple(images[0, -1, -1]) == BACKGROUND and tuple(images[1, -1, -1]) == colour(1)


def test_a_strip_has_a_frame_of_the_options_colour():
    strip = film_strip(filmed())
    assert tuple(strip[0, 0]) == colour(0) and tuple(strip[0, -1]) == colour(1)
    assert film_strip({**filmed(), "frame_episode": np.full(3, 5)}).shape[0] == 16  # no images: the time line alone


def test_options_beyond_the_palette_have_colours_of_their_own():
    assert len({colour(k) for k in range(16)}) == 16
