"""RolloutWriter: what `predict` plays, as a file of arrays and, if asked, as a video."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import BasePredictionWriter

from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError
from claw_lightning.files import expand
from claw_lightning.module import OptionCritic
from claw_lightning.ranks import run_folder

log = logging.getLogger(__name__)


class RolloutWriter(BasePredictionWriter):
    """Writes the rollouts of ``lightning predict`` to an .npz file, in which each array has one entry per step.

    Arrays over all S steps of all episodes, which follow one another: ``obs`` [S, O] raw, ``action`` [S, A] in [-1, 1]
    (or the number of a discrete action), ``option`` [S], ``switched`` [S] (the option was chosen at this step),
    ``reward`` [S], ``terminated`` [S], ``truncated`` [S], ``success`` [S] (NaN where the task has none), ``next_obs``
    [S, O], ``episode`` [S] and ``step`` [S], both from 0, and where the task has them ``image`` [S, C, H, W] and the
    privileged ``states`` [S, P]. Besides ``env_steps`` and ``updates`` of the policy, each of one number.

    Args:
        path: the file; None: ``rollouts.npz`` in the folder of the run. One that exists is never replaced.
        video: a file ending in .mp4 (needs ``pip install 'claw-lightning[video]'``) or .gif, with what a camera of the
            simulator sees; None: no video.
        video_episodes: of how many episodes, counted from the first.
        fps: images per second of the video; None: as many as the simulator makes steps, at most 60.
    """

    def __init__(
        self, path: str | None = None, video: str | None = None, video_episodes: int = 3, fps: float | None = None
    ) -> None:
        super().__init__("batch")
        values = {"path": path, "video": video, "video_episodes": video_episodes, "fps": fps}
        check_types("RolloutWriter", values, RolloutWriter.__init__)
        if path is not None and not path.endswith(".npz"):
            raise ConfigError(f"RolloutWriter.path is {path}; give a name that ends in .npz")
        if video is not None and not video.endswith((".mp4", ".gif")):
            raise ConfigError(f"RolloutWriter.video is {video}; give a name that ends in .mp4 or .gif")
        if video_episodes < 1:
            raise ConfigError(f"RolloutWriter.video_episodes is {video_episodes}; it must be at least 1")
        if fps is not None and not 0 < fps <= 1000:
            raise ConfigError(f"RolloutWriter.fps is {fps}; it must lie between 0 and 1000")
        self.path, self.video, self.video_episodes, self.fps = expand(path), expand(video), video_episodes, fps

    @property
    def frames_of(self) -> int:
        """Episodes of which images are wanted."""
        return self.video_episodes if self.video is not None else 0

    def file(self, trainer: pl.Trainer) -> Path:
        """Where the arrays go."""
        return Path(self.path) if self.path is not None else run_folder(trainer) / "rollouts.npz"

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse before anything is played what could not be written afterwards.

        Raises:
            ConfigError: a file exists already, or videos of this kind cannot be written here.
        """
        files = [self.file(trainer)] + ([Path(self.video)] if self.video is not None else [])
        for name, file in zip(("path", "video"), files, strict=False):
            if file.exists():
                raise ConfigError(f"RolloutWriter.{name}: {file} exists; give another name or move it away")
        if self.video is not None:
            check_video_support(self.video)

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write what one evaluation has played."""
        if not isinstance(prediction, dict) or not isinstance(pl_module, OptionCritic) or not trainer.is_global_zero:
            return
        frames = prediction.pop("frames", None)
        file = self.file(trainer)
        file.parent.mkdir(parents=True, exist_ok=True)
        counters = {"env_steps": pl_module.env_steps, "updates": pl_module.updates}
        with file.open("xb") as stream:  # never over another file, also if two runs write at once
            np.savez_compressed(stream, **prediction, **counters)  # type: ignore[arg-type]
        episodes = int(prediction["episode"][-1]) + 1 if len(prediction["episode"]) else 0
        log.info("%s: %d episodes, %d steps", file, episodes, len(prediction["episode"]))
        if self.video is not None:
            assert frames is not None  # asked for by frames_of
            assert pl_module.spec is not None
            rate = self.fps or min(60.0, pl_module.spec.control_frequency or 30.0)
            write_video(Path(self.video), frames, rate)
            log.info("%s: %d images, %g per second", self.video, sum(len(part) for part in frames), rate)


def check_video_support(name: str) -> None:
    """Raise :class:`ConfigError` where videos of this kind cannot be written."""
    wanted = ("imageio", "imageio_ffmpeg") if name.endswith(".mp4") else ("imageio", "PIL")
    missing = [package for package in wanted if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"RolloutWriter.video: {name} needs {' and '.join(missing)}: pip install 'claw-lightning[video]'"
            + (", or give a name that ends in .gif" if missing == ["imageio_ffmpeg"] else "")
        )


def write_video(file: Path, episodes: Sequence[np.ndarray], fps: float) -> None:
    """Write the images of episodes, each [T, H, W, 3] uint8, one after another; one image is in memory at a time."""
    import imageio.v2

    file.parent.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"duration": 1000.0 / fps, "loop": 0} if file.suffix == ".gif" else {"fps": fps}
    with imageio.v2.get_writer(file, **settings) as writer:
        for episode in episodes:
            for image in episode:
                writer.append_data(image)  # type: ignore[attr-defined]
