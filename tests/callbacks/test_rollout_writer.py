"""RolloutWriter: what `predict` leaves, and what it refuses before anything is played."""

from pathlib import Path

import numpy as np
import pytest

from callbacks import RolloutWriter
from callbacks.rollout_writer import check_video_support, write_video
from claw_lightning import cli
from claw_lightning.errors import ConfigError
from tests.runs import FAST

imageio = pytest.importorskip("imageio.v2", reason="extra `video`")

CAMERA = '''
import numpy as np
from claw_lightning.rollout.envs import GymnasiumEnv

class Camera(GymnasiumEnv):
    """Pendulum whose camera shows the lane and the number of images taken."""

    count = 0

    @classmethod
    def rendering(cls, init_args):
        return init_args

    def render(self, lane):
        self.count += 1
        return np.full((16, 24, 3), self.count % 256, np.uint8)
'''


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize("mode", ["lockstep", "overlapped"])
def test_predict_writes_every_step_and_never_over_a_file(mode, capsys):
    Path("camera_env.py").write_text(CAMERA)
    command = [
        "predict", *FAST[1:], f"--data.mode={mode}", "--data.env=camera_env.Camera", "--data.env.task=Pendulum-v1",
        "--data.eval_episodes=3", "--trainer.callbacks+=RolloutWriter", "--trainer.callbacks.path=steps.npz",
        "--trainer.callbacks.video=film.gif", "--trainer.callbacks.video_episodes=2",
    ]  # fmt: skip
    assert cli.main(command) == 0, Path("error.log").read_text()
    assert "rollouts: steps.npz, film.gif" in capsys.readouterr().out
    with np.load("steps.npz") as file:
        steps = dict(file)
    assert steps["obs"].shape == (600, 3) and steps["action"].shape == (600, 1) and steps["updates"] == 0
    np.testing.assert_array_equal(steps["episode"], np.repeat([0, 1, 2], 200))
    np.testing.assert_array_equal(steps["step"], np.tile(np.arange(200), 3))
    np.testing.assert_array_equal(steps["truncated"], steps["step"] == 199)
    inside = steps["step"] < 199
    np.testing.assert_array_equal(steps["next_obs"][inside], steps["obs"][1:][inside[:-1]])
    assert np.abs(steps["action"]).max() <= 1 and set(steps["option"]) <= {0, 1} and steps["switched"][0]
    angle = np.arctan2(steps["obs"][:, 1], steps["obs"][:, 0])
    cost = angle**2 + 0.1 * steps["obs"][:, 2] ** 2 + 0.001 * (2 * steps["action"][:, 0]) ** 2
    np.testing.assert_allclose(steps["reward"], -cost, atol=1e-4)
    assert len(imageio.mimread("film.gif", memtest=False)) == 400
    assert not list(Path().rglob("rollouts-*"))

    before = Path("steps.npz").read_bytes()
    assert cli.main(command) == 1
    assert "RolloutWriter.path: steps.npz exists" in capsys.readouterr().err
    assert Path("steps.npz").read_bytes() == before


def test_an_adapter_without_a_camera_is_named(capsys):
    command = [
        "predict", *FAST[1:], "--data.env={class_path: FourRoomsEnv, init_args: {task: FourRooms}}",
        "--model.actor=categorical", "--trainer.logger=false",
        "--trainer.callbacks+=RolloutWriter", "--trainer.callbacks.video=film.gif",
    ]  # fmt: skip
    assert cli.main(command) == 1
    assert "this adapter gives no images for a video" in capsys.readouterr().err


def test_what_cannot_be_written_is_refused(monkeypatch):
    for settings in ({"path": "a.csv"}, {"video": "a.avi"}, {"video_episodes": 0}, {"fps": 0.0}):
        with pytest.raises(ConfigError, match=f"RolloutWriter.{next(iter(settings))}"):
            RolloutWriter(**settings)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "imageio_ffmpeg" else object())
    check_video_support("a.gif")
    with pytest.raises(ConfigError, match=r"claw-lightning\[video\].*ends in .gif"):
        check_video_support("a.mp4")


def test_a_video_of_several_episodes():
    shades = [np.arange(2), np.arange(10, 13)]
    episodes = [
        np.broadcast_to(shade[:, None, None, None].astype(np.uint8) * 9, (len(shade), 8, 8, 3)) for shade in shades
    ]
    write_video(Path("deep/a.gif"), episodes, 20.0)
    assert len(imageio.mimread("deep/a.gif")) == 5
