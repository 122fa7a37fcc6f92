"""Recorder: whole episodes step by step, and what a camera sees of some of them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np

from claw_lightning.rollout.envs.base import EnvError, VectorEnv

#: One array per step in the file that :meth:`Recorder.save` writes; ``image`` only where the task has images.
FIELDS = ("obs", "action", "option", "switched", "reward", "terminated", "truncated", "success", "next_obs", "image")


class Recorder:
    """Collects the steps of N lanes and writes them episode by episode.

    Episodes are numbered round by round: the first of all lanes, then the second of all lanes. Only whole ones are
    kept.

    Args:
        env: what is played on.
        path: .npz file to write.
        frames: images are taken of the first so many episodes. They go to ``<path>.<episode>.raw`` as they come, uint8.
    """

    def __init__(self, env: VectorEnv, path: str, frames: int = 0) -> None:
        self.env, self.path, self.frames = env, path, frames
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
            if episode >= self.frames:
                continue
            image = self.env.render(int(lane))
            if image is None:
                raise EnvError(
                    "task %s: this adapter gives no images for a video; take GymnasiumEnv, or implement render in your "
                    "own adapter" % self.env.spec.task
                )
            shape = [int(size) for size in image.shape]
            if image.dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or shape != (self.frame_shape or shape):
                raise EnvError("task %s: render gave %s of %s" % (self.env.spec.task, tuple(shape), image.dtype))
            self.frame_shape = shape
            with open("%s.%d.raw" % (self.path, episode), "ab") as file:
                file.write(np.ascontiguousarray(image).tobytes())

    def add(
        self, obs: np.ndarray, image: Optional[np.ndarray], decision: Any, result: Any, counted: np.ndarray
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
            self._open[lane].append(step)
            if result.terminated[lane] or result.truncated[lane]:
                self._done[self._episode(int(lane))] = self._open[lane]
                self._open[lane] = []
                self._played[lane] += 1

    def save(self) -> Dict[str, Any]:
        """Write all whole episodes; returns the shape of the images, or None."""
        episodes = [self._done[number] for number in sorted(self._done)]
        steps = [step for episode in episodes for step in episode]
        names = [name for name in FIELDS if steps and name in steps[0]]
        arrays = {name: np.stack([step[name] for step in steps]) for name in names}
        lengths = [len(episode) for episode in episodes]
        arrays["episode"] = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        arrays["step"] = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths] or [np.zeros(0, np.int32)])
        with open(self.path, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        return {"frame_shape": self.frame_shape}
