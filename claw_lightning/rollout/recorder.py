"""Recorder: whole episodes step by step, and what a camera sees of some of them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np

from claw_lightning.rollout.envs.base import NEXT_STEP, EnvError, VectorEnv

#: One array per step in the file that :meth:`Recorder.save` writes; the last two only where the task has them.
FIELDS = (
    "obs", "action", "option", "switched", "reward", "terminated", "truncated", "success", "next_obs", "image",
    "states",
)  # fmt: skip


class Film:
    """A few small images of each of some episodes, evenly spaced over their steps, the first and the last included.

    Images show the states that are acted on. The last one shows what the last step led to, where the simulator still
    does (next-step autoreset). A camera that cannot be used ends the film, not the episodes: see :attr:`error`.

    Args:
        env: what is played on.
        episodes: of how many, counted from the first.
        most: images of an episode at most, at least 2. Where the task has no known length, half as many may be left.
        height: pixels at most; larger images are reduced by whole factors.

    Attributes:
        error: why there are no more images; None: there was no reason.
    """

    def __init__(self, env: VectorEnv, episodes: int, most: int, height: int) -> None:
        self.env, self.episodes, self.most, self.height = env, episodes, most, height
        self.error: Optional[str] = None
        self._images: Dict[int, List[np.ndarray]] = {}
        self._steps: Dict[int, List[int]] = {}
        self._stride: Dict[int, int] = {}
        horizon = env.spec.max_episode_steps
        self._wanted = set(np.linspace(0, horizon - 1, most).round().astype(int).tolist()) if horizon else None

    def look(self, episode: int, step: int, lane: int) -> None:
        """Take an image of a lane, if one of this step is wanted."""
        if episode >= self.episodes or self.error is not None:
            return
        stride = self._stride.setdefault(episode, 1)
        if step not in self._wanted if self._wanted is not None else step % stride:
            return
        self._take(episode, step, lane)
        steps = self._steps.get(episode, [])
        if len(steps) > self.most:
            self._images[episode], self._steps[episode] = self._images[episode][::2], steps[::2]
            self._stride[episode] = 2 * stride

    def end(self, episode: int, step: int, lane: int) -> None:
        """Take the last image of an episode, after its last step."""
        if episode >= self.episodes or self.error is not None or self.env.spec.autoreset != NEXT_STEP:
            return
        if self._steps.get(episode, [])[-1:] == [step]:
            self._steps[episode].pop()
            self._images[episode].pop()
        self._take(episode, step, lane)

    def _take(self, episode: int, step: int, lane: int) -> None:
        try:
            image = checked_image(self.env, lane)
        except EnvError as error:
            self.error = str(error)
            return
        self._images.setdefault(episode, []).append(reduced(image, self.height))
        self._steps.setdefault(episode, []).append(step)

    def arrays(self) -> Dict[str, np.ndarray]:
        """``frames`` [F, H, W, 3] uint8, ``frame_episode`` and ``frame_step`` [F] int32; all empty after an error."""
        episodes = sorted(self._images) if self.error is None else []
        images = [image for episode in episodes for image in self._images[episode]]
        return {
            "frames": np.stack(images) if images else np.zeros((0, 0, 0, 3), np.uint8),
            "frame_episode": np.repeat(
                np.array(episodes, np.int32), np.array([len(self._steps[each]) for each in episodes], np.int64)
            ),
            "frame_step": np.array([step for each in episodes for step in self._steps[each]], np.int32),
        }


def checked_image(env: VectorEnv, lane: int) -> np.ndarray:
    """What the camera sees of a lane, [H, W, 3] uint8.

    Raises:
        EnvError: there is no camera, or it gives something else.
    """
    image = env.render(lane)
    if image is None:
        raise EnvError(
            "task %s: this adapter gives no images for a video; take GymnasiumEnv, or implement render in your "
            "own adapter" % env.spec.task
        )
    shape = [int(size) for size in image.shape]
    if image.dtype != np.uint8 or len(shape) != 3 or shape[2] != 3:
        raise EnvError("task %s: render gave %s of %s" % (env.spec.task, tuple(shape), image.dtype))
    return image


def reduced(image: np.ndarray, height: int) -> np.ndarray:
    """An image of at most ``height`` pixels: means of blocks of a whole number of pixels, [H, W, 3] uint8."""
    factor = -(-image.shape[0] // height)
    if factor == 1:
        return image.copy()
    rows, columns = image.shape[0] // factor, image.shape[1] // factor
    blocks = image[: rows * factor, : columns * factor].reshape(rows, factor, columns, factor, 3)
    return blocks.mean(axis=(1, 3)).astype(np.uint8)


class Recorder:
    """Collects the steps of N lanes and writes them episode by episode.

    Episodes are numbered round by round: the first of all lanes, then the second of all lanes. Only whole ones are
    kept.

    Args:
        env: what is played on.
        path: .npz file to write.
        frames: images are taken of the first so many episodes. They go to ``<path>.<episode>.raw`` as they come, uint8.
        film: of these episodes take a :class:`Film` instead, which goes into the file; its ``most`` and ``height``.
        draws_options: of the agent that plays (:class:`OptionAgent`).
    """

    def __init__(
        self, env: VectorEnv, path: str, frames: int = 0, film: Optional[Dict[str, int]] = None,
        draws_options: bool = False,
    ) -> None:  # fmt: skip
        self.env, self.path, self.frames, self.draws_options = env, path, frames, draws_options
        self.film = None if film is None else Film(env, frames, **film)
        lanes = env.num_envs
        self._open: List[List[Dict[str, Any]]] = [[] for _ in range(lanes)]
        self._played = [0] * lanes
        self._done: Dict[int, List[Dict[str, Any]]] = {}
        self.frame_shape: Optional[List[int]] = None

    def _episode(self, lane: int) -> int:
        return self._played[lane] * self.env.num_envs + lane

    def look(self, counted: np.ndarray) -> None:
        """Take images of the states that are acted on; ``counted`` [N] bool, lanes whose step belongs to an episode.

        Raises:
            EnvError: the simulator gives none.
        """
        for lane in np.flatnonzero(counted):
            episode = self._episode(int(lane))
            if self.film is not None:
                self.film.look(episode, len(self._open[lane]), int(lane))
            if self.film is not None or episode >= self.frames:
                continue
            image = checked_image(self.env, int(lane))
            shape = [int(size) for size in image.shape]
            if shape != (self.frame_shape or shape):
                raise EnvError("task %s: render gave %s of %s" % (self.env.spec.task, tuple(shape), image.dtype))
            self.frame_shape = shape
            with open("%s.%d.raw" % (self.path, episode), "ab") as file:
                file.write(np.ascontiguousarray(image).tobytes())

    def add(
        self,
        obs: np.ndarray,
        image: Optional[np.ndarray],
        decision: Any,
        result: Any,
        counted: np.ndarray,
        states: Optional[np.ndarray] = None,
    ) -> None:
        """Add one vector step."""
        success = result.info.get("success")
        for lane in np.flatnonzero(counted):
            final = result.has_final_obs is not None and result.has_final_obs[lane]
            step = {
                "obs": obs[lane].copy(),
                "action": decision.action[lane].copy(),
                "option": np.int32(decision.option[lane]),
                "switched": np.bool_(decision.switched[lane]),
                "reward": np.float32(result.reward[lane]),
                "terminated": np.bool_(result.terminated[lane]),
                "truncated": np.bool_(result.truncated[lane]),
                "success": np.float32(np.nan if success is None else success[lane]),
                "next_obs": (result.final_obs if final else result.obs)[lane].copy(),
            }
            if image is not None:
                step["image"] = image[lane].copy()
            if states is not None:
                step["states"] = states[lane].copy()
            self._open[lane].append(step)
            if result.terminated[lane] or result.truncated[lane]:
                if self.film is not None:
                    self.film.end(self._episode(int(lane)), len(self._open[lane]) - 1, int(lane))
                self._done[self._episode(int(lane))] = self._open[lane]
                self._open[lane] = []
                self._played[lane] += 1

    def save(self) -> Dict[str, Any]:
        """Write all whole episodes; returns the shape of the images, or None, and why a film has none, or None."""
        episodes = [self._done[number] for number in sorted(self._done)]
        steps = [step for episode in episodes for step in episode]
        names = [name for name in FIELDS if steps and name in steps[0]]
        arrays = {name: np.stack([step[name] for step in steps]) for name in names}
        lengths = [len(episode) for episode in episodes]
        arrays["episode"] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        arrays["step"] = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths] or [np.zeros(0, np.int32)])
        if self.film is not None:
            arrays.update(self.film.arrays())
        with open(self.path, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        return {"frame_shape": self.frame_shape, "frame_error": None if self.film is None else self.film.error}
