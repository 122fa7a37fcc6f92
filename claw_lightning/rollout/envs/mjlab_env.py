"""mjlab: manager-based tasks on MuJoCo Warp, as torch tensors on a GPU."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

from claw_lightning.rollout.envs.base import EnvError
from claw_lightning.rollout.envs.gymnasium_env import unknown_task
from claw_lightning.rollout.envs.packages import check_lanes, load, load_extension, numbers, package_version
from claw_lightning.rollout.envs.tensor_env import TensorEnv, check_device

_CURE = "pip install 'mjlab>=1.6,<1.7' into a Python 3.10 to 3.13"


class MjlabEnv(TensorEnv):
    """N lanes of an mjlab task, stepped together on one device.

    Lanes restart in the step that ends them. mjlab itself returns the first observation of the new episode then, and
    the last one of the old is lost. So its own resets are switched off (``auto_reset``), the true final observation is
    taken, and the lanes that ended are reset by hand. Running lanes keep what the step returned.

    Such a reset makes mjlab compute the observations of all lanes once more, which would push the histories and
    delays of running lanes on by one. Tasks whose observations have a history or a delay, and versions without that
    switch, are therefore left to reset themselves: then ``has_final_obs`` is False, and the last step of an episode
    that its time limit cut is left out of the replay, as there is nothing true to bootstrap from; other steps are not.

    mjlab's actions have no bounds: [-1, 1] becomes [-action_bound, action_bound], which the task scales further.
    mjlab ships no task of a hand; others' packages do, see ``import_module``. Seeds are the simulator's, not a lane's.

    Args:
        task: mjlab's id of a registered task.
        num_envs: N.
        seed: of all lanes.
        device: ``cuda:0`` is the first GPU that the worker sees; ``cpu`` is meant for evaluation.
        import_module: dotted module that registers the user's own tasks, imported first.
        action_bound: of actions, in the task's units before its own scale.

    Raises:
        EnvError: mjlab is missing or too old, the task is unknown, there is no GPU, or the task cannot be learnt.
    """

    def __init__(
        self,
        task: str,
        num_envs: int = 1,
        seed: int = 0,
        device: str = "cuda:0",
        import_module: Optional[str] = None,
        action_bound: float = 1.0,
    ) -> None:
        check_lanes(num_envs)
        package = load("mjlab", "MjlabEnv", "mjlab", _CURE)
        version = package_version("mjlab", package)
        if numbers(version) and numbers(version) < (1,):
            raise EnvError("data.env.class_path: MjlabEnv needs mjlab 1.0 or later, not %s; %s" % (version, _CURE))
        load("mjlab.tasks", "MjlabEnv", "mjlab with its tasks", _CURE)
        registry = load("mjlab.tasks.registry", "MjlabEnv", "mjlab with its tasks", _CURE)
        load_extension(import_module)
        if task not in registry.list_tasks():
            raise unknown_task(task, registry.list_tasks(), "mjlab")
        check_device(device, "MjlabEnv", on_cpu=True)

        self.num_envs = num_envs
        config = registry.load_env_cfg(task)
        config.scene.num_envs, config.seed = num_envs, int(seed) % 2**31
        self._resets_by_hand = hasattr(config, "auto_reset") and not _has_memory(config)
        if self._resets_by_hand:
            config.auto_reset = False
        envs = load("mjlab.envs", "MjlabEnv", "mjlab", _CURE)
        self._take(
            envs.ManagerBasedRlEnv(config, device=device),
            task,
            device,
            action_bound,
            {"mjlab": version, **{name: package_version(name) for name in ("mujoco", "mujoco-warp")}},
            is_finite_horizon=bool(getattr(config, "is_finite_horizon", False)),
        )

    def _begin_episodes(
        self, ended: np.ndarray, host: np.ndarray, extras: Dict[str, Any]
    ) -> Tuple[Optional[np.ndarray], np.ndarray]:
        if not self._resets_by_hand:
            return None, np.zeros(self.num_envs, bool)
        finals = host.copy()
        lanes = self._torch.as_tensor(np.flatnonzero(ended), device=self._device)
        host[ended] = self._to_host(self._sim.reset(env_ids=lanes)[0])[ended]
        return finals, ended.copy()


def _has_memory(config: Any) -> bool:
    """Whether observations depend on how often they were computed: by a history or by a delay."""
    for group in config.observations.values():
        terms = getattr(group, "terms", {}) or {}
        for holder in (group, *getattr(terms, "values", tuple)()):
            if (getattr(holder, "history_length", 0) or 0) > 0 or (getattr(holder, "delay_max_lag", 0) or 0) > 0:
                return True
    return False
