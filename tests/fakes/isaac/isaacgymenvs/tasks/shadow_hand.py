"""ShadowHand: the sizes of the real one."""

from isaacgymenvs.tasks.base.joint_reach import JointReach
from isaacgymenvs.utils.torch_jit_utils import *  # noqa: F403  (as the real file does)


class ShadowHand(JointReach):
    """24 joints, 20 of them driven; privileged states always in full."""

    SIZES = {"openai": 42, "full_no_vel": 77, "full": 157, "full_state": 211}
    STATES = 211
    ACTIONS = 20
