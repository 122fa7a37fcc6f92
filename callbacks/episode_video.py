"""EpisodeVideo: what the policy does, recorded while it learns."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np

from callbacks.episode_drawing import annotated, film_strip
from callbacks.rollout_writer import write_video
from claw_lightning.checks import check_types
from claw_lightning.errors import ConfigError, WorkerError
from claw_lightning.inspection import judge_episodes
from claw_lightning.loggers import each_tensorboard
from claw_lightning.module import OptionCritic
from claw_lightning.ranks import run_folder

log = logging.getLogger(__name__)

#: Images of an episode at most.
MOST_FRAMES = 24
#: What is written of the recorded steps.
FIELDS = ("obs", "action", "option", "switched", "reward", "terminated", "truncated", "success", "episode", "step")
FRAME_FIELDS = ("frames", "frame_episode", "frame_step")


class EpisodeVideo(pl.Callback):
    """Records noise-free episodes beside evaluations: every step, what the networks say of it, and a few images.

    They are played in the evaluator's process with the policy that was evaluated, from the same starts. Options end and
    are chosen by chance, as in training; as evaluations choose them (``greedy``), one whose probability of ending stays
    below one half would run for the whole episode. Every recording leaves, in ``episodes/`` of the run's folder, named
    by the environment steps (ten digits):

    * ``<steps>.npz``. Arrays over all S steps of the E episodes, one after the other: ``obs`` [S, O] raw, ``action``
      [S, A] in [-1, 1] (of discrete tasks its number [S, 1], an integer), ``option`` [S], ``switched`` [S], ``reward``
      [S], ``terminated`` [S], ``truncated`` [S], ``success`` [S] (NaN where the task has none), ``episode`` [S] and
      ``step`` [S], both from 0; ``termination`` [S] (probability that the running option ends here; NaN at first steps
      and with one option), ``option_probs`` [S, K]
      and ``q`` [S, K] (value of every option with its own action, for the running option with the action that was
      taken; the smaller critic, in units of the task's reward). ``frames`` [F, H, W, 3] uint8, at most 24 of an
      episode, evenly spaced, without any drawing, ``frame_episode`` [F] and ``frame_step`` [F]. The last image of an
      episode shows what its last step led to, where the simulator still does. ``gamma``, ``num_options``,
      ``env_steps``, ``updates`` and ``greedy``, one number each.
    * ``<steps>.mp4`` (``.gif`` without imageio-ffmpeg), where ``pip install 'claw-lightning[video]'`` was done: the
      images with the running option and the time line of options so far.

    TensorBoard gets ``episode/strip``: images in a row above the episode's options. Where no images can be taken, one
    warning says why, and the arrays are written all the same. Where nothing can be played or written, such as on a full
    disk, one warning says so, and nothing more is recorded; the run goes on.

    A recording takes as long as playing and drawing do. The next one waits until it has cost no more than ``share`` of
    the time; the last evaluation of a run is always recorded.

    Args:
        every_n_evaluations: record at every so many evaluations, at most.
        episodes: E.
        height: of the images in pixels, at most 240. Those of the simulator are reduced by a whole factor.
        share: of wall time that recordings may take, above 0 and at most 1.
        greedy: options as ``model.greedy_options`` says, as in evaluations, in place of drawn ones.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        every_n_evaluations: int = 1,
        episodes: int = 1,
        height: int = 240,
        share: float = 0.01,
        greedy: bool = False,
    ) -> None:
        values = {
            "every_n_evaluations": every_n_evaluations, "episodes": episodes, "height": height, "share": share,
            "greedy": greedy,
        }  # fmt: skip
        check_types("EpisodeVideo", values, EpisodeVideo.__init__)
        for name in ("every_n_evaluations", "episodes"):
            if values[name] < 1:
                raise ConfigError(f"EpisodeVideo.{name} is {values[name]}; it must be at least 1")
        if not 16 <= height <= 240:
            raise ConfigError(f"EpisodeVideo.height is {height}; it must lie between 16 and 240")
        if not 0 < share <= 1:
            raise ConfigError(f"EpisodeVideo.share is {share}; it must lie above 0 and be at most 1")
        self.every_n_evaluations, self.episodes, self.height, self.share = every_n_evaluations, episodes, height, share
        self.greedy = greedy
        self._evaluations = 0
        self._not_before = -math.inf
        self._can_draw = True
        self._can_write = True
        self._can_encode = importlib.util.find_spec("imageio") is not None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record, where it is due."""
        if trainer.state.fn != "fit" or trainer.sanity_checking or not trainer.is_global_zero:
            return
        assert isinstance(pl_module, OptionCritic)
        self._evaluations += 1
        is_due = self._evaluations % self.every_n_evaluations == 0 and time.monotonic() >= self._not_before
        if not self._can_write or not (is_due or trainer.should_stop):
            return
        started = time.monotonic()
        try:
            steps = self._play(trainer, pl_module)
            if steps is None:  # the run is being stopped
                return
            self._write(trainer, pl_module, steps)
        except (OSError, WorkerError, ConfigError) as error:
            log.warning("EpisodeVideo: %s; no more episodes are recorded, the run goes on", error)
            self._can_write = False
        cost = time.monotonic() - started
        self._not_before = started + cost / self.share
        log.info("episode video: %.1f s; the next one in %.0f s at the earliest", cost, cost / self.share - cost)

    def _play(self, trainer: pl.Trainer, module: OptionCritic) -> dict[str, Any] | None:
        """Steps of the episodes, with images if there can be any; None after a stop."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]

        def play(frames: int) -> dict[str, Any] | None:
            film = {"most": MOST_FRAMES, "height": self.height}
            return data.record(
                module.evaluated_policy, module.agent_settings(), self.episodes, data.eval_seed, frames, film,
                not self.greedy,
            )  # fmt: skip

        if self._can_draw:
            try:
                steps = play(self.episodes)
            except (WorkerError, ConfigError) as error:
                self._draw_no_more(str(error))
            else:
                if steps is not None and steps["frame_error"] is not None:
                    self._draw_no_more(steps["frame_error"])
                return steps
        return play(0)

    def _draw_no_more(self, reason: str) -> None:
        self._can_draw = False
        log.warning("EpisodeVideo: no images: %s. Steps are recorded without them", reason.rstrip("."))

    def _write(self, trainer: pl.Trainer, module: OptionCritic, steps: dict[str, Any]) -> None:
        """Write the files and log the strip.

        Raises:
            OSError: the disk is full, or nothing can be written there.
        """
        folder = run_folder(trainer) / "episodes"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{module.env_steps:010d}.npz"
        if file.exists() or not len(steps["step"]):
            log.info("%s: %s", file, "exists, and is left as it is" if file.exists() else "no whole episode was played")
            return
        arrays = {name: steps[name] for name in FIELDS + FRAME_FIELDS} | judge_episodes(module, steps)
        numbers = {
            "gamma": module.settings.gamma, "num_options": module.settings.num_options,
            "env_steps": module.env_steps, "updates": module.updates,
            "greedy": self.greedy and bool(module.settings.greedy_options),
        }  # fmt: skip
        if module.spec is not None and module.spec.num_actions:
            arrays["action"] = arrays["action"].astype(
                np.int64
            )  # lest numbers of actions be taken for their components
        part = file.with_suffix(".part")
        try:
            with part.open("wb") as stream:
                np.savez_compressed(stream, **arrays, **numbers)  # type: ignore[arg-type]
            os.replace(part, file)  # whoever reads meanwhile sees whole files alone
        except OSError as error:  # that of a full disk names no file
            raise OSError(error.errno, error.strerror or str(error), str(file)) from error
        finally:
            part.unlink(missing_ok=True)
        if importlib.util.find_spec("PIL") is None:
            return
        if len(arrays["frames"]):
            self._write_video(file, arrays, module)
        strip = film_strip(arrays, episode=0)
        each_tensorboard(
            trainer, lambda writer: writer.add_image("episode/strip", strip, module.env_steps, dataformats="HWC")
        )

    def _write_video(self, file: Path, arrays: dict[str, np.ndarray], module: OptionCritic) -> None:
        if not self._can_encode:
            return
        suffix = ".mp4" if importlib.util.find_spec("imageio_ffmpeg") is not None else ".gif"
        episodes = [annotated(arrays, episode) for episode in np.unique(arrays["frame_episode"])]
        # As fast as the simulator's own time, as far as that can still be looked at.
        frequency = module.spec.control_frequency if module.spec is not None else 0.0
        rate = len(arrays["frames"]) / len(arrays["step"]) * (frequency or 30.0)
        try:
            write_video(file.with_suffix(suffix), episodes, min(30.0, max(4.0, rate)))
        except Exception as error:  # codecs fail in ways of their own
            self._can_encode = False
            file.with_suffix(suffix).unlink(missing_ok=True)  # what there is of it cannot be played
            log.warning("EpisodeVideo: no videos: %s. The images are in %s", error, file)
