"""Isaac Lab: the Shadow and Allegro hands of NVIDIA's current simulator, as torch tensors on a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any, Dict, Optional, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import GOAL_IN_OBS, ContractError
from claw_lightning.rollout.envs.gymnasium_env import unknown_task
from claw_lightning.rollout.envs.packages import check_lanes, load, load_extension, numbers, package_version
from claw_lightning.rollout.envs.tensor_env import TensorEnv, check_device

_CURE = "install Isaac Lab 2.3 (Python 3.11) or 3.0 (Python 3.12)"
_WHAT = "Isaac Lab 2.0 or later"
#: The first version that can do without the application of Isaac Sim.
_WITHOUT_APP = (3,)


class IsaacLabEnv(TensorEnv):
    """N lanes of an Isaac Lab task (direct or manager-based), stepped together on one GPU.

    Lanes restart in the step that ends them. From version 3.0 on the true final observations are asked for
    (``compute_final_obs``). Before, Isaac Lab overwrites them: ``has_final_obs`` is False, and the last step of an
    episode that its time limit cut is left out of the replay, as there is nothing true to bootstrap from.

    Hands draw a new goal after the reward, within the step: the next observation is ahead of it
    (``spec.goal_in_reward`` is "obs"). Ending by the largest number of successes counts as a time limit in Isaac Lab.
    ``success`` marks steps in which a lane's own counter of successes rose, where the task has one.

    The application is started once per process, headless, and ends with it; where only Isaac Lab 3 without Isaac Sim is
    installed, it runs without an application. Seeds are the simulator's, not a lane's.

    Args:
        task: Isaac Lab's id, such as ``Isaac-Repose-Cube-Shadow-Direct-v0``.
        num_envs: N.
        seed: of all lanes.
        device: ``cuda:0`` is the first GPU that the worker sees.
        import_module: dotted module that registers the user's own tasks, imported after ``isaaclab_tasks``.
        action_bound: of actions where the task gives none.
        launcher: further arguments of ``AppLauncher``.

    Raises:
        EnvError: Isaac Lab is missing or too old, the task is unknown, there is no GPU, or the task cannot be learnt.
    """

    def __init__(
        self,
        task: str,
        num_envs: int = 1,
        seed: int = 0,
        device: str = "cuda:0",
        import_module: Optional[str] = None,
        action_bound: float = 1.0,
        launcher: Optional[Dict[str, Any]] = None,
    ) -> None:
        check_lanes(num_envs)
        package = load("isaaclab", "IsaacLabEnv", _WHAT, _CURE)
        version = package_version("isaaclab", package)
        check_device(device, "IsaacLabEnv", on_cpu=False)
        if importlib.util.find_spec("isaacsim") is not None or numbers(version) < _WITHOUT_APP:
            # Before anything else of it is imported: its modules load extensions of the running application.
            app = load("isaaclab.app", "IsaacLabEnv", _WHAT, _CURE)
            app.AppLauncher(headless=True, device=device, **(launcher or {}))
        load("isaaclab_tasks", "IsaacLabEnv", "Isaac Lab with its tasks (isaaclab_tasks)", _CURE)
        load_extension(import_module)
        gym = load("gymnasium", "IsaacLabEnv", "Gymnasium", "pip install gymnasium")
        if task not in gym.registry:
            raise unknown_task(task, [name for name in gym.registry if "Isaac" in name] or gym.registry, "Isaac Lab")

        self.num_envs = num_envs
        parsing = load("isaaclab_tasks.utils", "IsaacLabEnv", _WHAT, _CURE)
        config = parsing.parse_env_cfg(task, device=device, num_envs=num_envs)
        config.seed = int(seed) % 2**31
        # Rather than the version: checkouts of the repository number this package in another way than releases.
        self._asks_for_finals = hasattr(config, "compute_final_obs")
        if self._asks_for_finals:
            config.compute_final_obs = True
        # Wrappers of Gymnasium (order enforcement, checks) are written for a single environment.
        sim = gym.make(task, cfg=config, disable_env_checker=True).unwrapped
        self._successes: Any = None
        self._take(
            sim,
            task,
            device,
            action_bound,
            {"isaaclab": version, "isaacsim": package_version("isaacsim")},
            is_finite_horizon=bool(getattr(config, "is_finite_horizon", False)),
            goal_in_reward=GOAL_IN_OBS,
        )
        self._success()

    def _begin_episodes(
        self, ended: np.ndarray, host: np.ndarray, extras: Dict[str, Any]
    ) -> Tuple[Optional[np.ndarray], np.ndarray]:
        groups = extras.get("final_obs") if self._asks_for_finals else None
        if groups is None:
            return None, np.zeros(self.num_envs, bool)
        if not hasattr(groups, "items"):
            raise ContractError(
                "task %s returned final_obs as %s, expected the groups of an observation"
                % (self._task, type(groups).__name__)
            )
        return self._to_host(groups), ended.copy()

    def _success(self) -> Any:
        counts = getattr(self._sim, "successes", None)
        if counts is None or getattr(counts, "shape", None) != (self.num_envs,):
            return None
        before, self._successes = self._successes, counts.clone()
        return counts * 0 if before is None else counts > before
