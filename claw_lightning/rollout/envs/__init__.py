"""Simulators behind one contract.

Importing this package imports numpy alone; an adapter imports its simulator when it is built.
"""

from claw_lightning.rollout.envs.base import EnvError, EnvSpec, StepResult, VectorEnv, make_env
from claw_lightning.rollout.envs.diagnostic import CodedEnv, FaultyEnv
from claw_lightning.rollout.envs.envpool_env import EnvPoolEnv
from claw_lightning.rollout.envs.four_rooms import FourRoomsEnv
from claw_lightning.rollout.envs.gymnasium_env import GymnasiumEnv
from claw_lightning.rollout.envs.isaacgym import IsaacGymEnv
from claw_lightning.rollout.envs.isaaclab_env import IsaacLabEnv
from claw_lightning.rollout.envs.mjlab_env import MjlabEnv
from claw_lightning.rollout.envs.playground_env import PlaygroundEnv

__all__ = [
    "CodedEnv",
    "EnvError",
    "EnvPoolEnv",
    "EnvSpec",
    "FaultyEnv",
    "FourRoomsEnv",
    "GymnasiumEnv",
    "IsaacGymEnv",
    "IsaacLabEnv",
    "MjlabEnv",
    "PlaygroundEnv",
    "StepResult",
    "VectorEnv",
    "make_env",
]
