"""The detour through rl_games, which is why ``make`` needs that package."""

from __future__ import annotations

import os
from typing import Any, Callable, Dict

from isaacgymenvs.tasks import isaacgym_task_map
from rl_games.common import env_configurations, vecenv  # noqa: F401


def get_rlgames_env_creator(
    seed: int,
    task_config: Dict[str, Any],
    task_name: str,
    sim_device: str,
    rl_device: str,
    graphics_device_id: int,
    headless: bool,
    multi_gpu: bool = False,
    post_create_hook: Any = None,
    virtual_screen_capture: bool = False,
    force_render: bool = False,
) -> Callable[[], Any]:
    """A function that builds the task. With ``multi_gpu`` both devices become the GPU of LOCAL_RANK."""

    def create() -> Any:
        sim, rl = sim_device, rl_device
        if multi_gpu:
            sim = rl = "cuda:%s" % os.getenv("LOCAL_RANK", "0")
        return isaacgym_task_map[task_name](
            cfg=task_config,
            rl_device=rl,
            sim_device=sim,
            graphics_device_id=graphics_device_id,
            headless=headless,
            virtual_screen_capture=virtual_screen_capture,
            force_render=force_render,
        )

    return create
