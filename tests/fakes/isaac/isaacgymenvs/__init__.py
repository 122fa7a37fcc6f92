"""Stand-in for IsaacGymEnvs 1.5.1: what a worker meets of it, with a task that is solved in closed form.

Nothing here can be imported without hydra and omegaconf, and a second run of this file in one process fails: the
names of its resolvers are taken.
"""

from __future__ import annotations

from typing import Any, Optional

import hydra
from hydra import compose, initialize
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from isaacgymenvs.utils.reformat import omegaconf_to_dict

OmegaConf.register_new_resolver("eq", lambda x, y: x.lower() == y.lower())
OmegaConf.register_new_resolver("contains", lambda x, y: x.lower() in y.lower())
OmegaConf.register_new_resolver("if", lambda condition, a, b: a if condition else b)
OmegaConf.register_new_resolver("resolve_default", lambda default, given: default if given == "" else given)


def make(
    seed: int,
    task: str,
    num_envs: int,
    sim_device: str,
    rl_device: str,
    graphics_device_id: int = -1,
    headless: bool = False,
    multi_gpu: bool = False,
    virtual_screen_capture: bool = False,
    force_render: bool = True,
    cfg: Optional[Any] = None,
) -> Any:
    """A task object. ``seed`` is not used, and ``num_envs`` only where ``cfg`` is None, as in the real one.

    Without ``cfg`` the devices of the composed configuration stay those of config.yaml: a GPU, whatever
    ``sim_device`` says.
    """
    from isaacgymenvs.utils.rlgames_utils import get_rlgames_env_creator

    if cfg is None:
        if HydraConfig.initialized():
            task = HydraConfig.get().runtime.choices["task"]
            hydra.core.global_hydra.GlobalHydra.instance().clear()
        with initialize(config_path="./cfg"):
            composed = compose(config_name="config", overrides=["task=%s" % task])
            task_config = omegaconf_to_dict(composed.task)
        task_config["env"]["numEnvs"] = num_envs
    else:
        task_config = omegaconf_to_dict(cfg.task)
    create = get_rlgames_env_creator(
        seed=seed,
        task_config=task_config,
        task_name=task_config["name"],
        sim_device=sim_device,
        rl_device=rl_device,
        graphics_device_id=graphics_device_id,
        headless=headless,
        multi_gpu=multi_gpu,
        virtual_screen_capture=virtual_screen_capture,
        force_render=force_render,
    )
    return create()
