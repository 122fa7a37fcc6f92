"""AllegroHand: the sizes of the real one."""

from isaacgymenvs.tasks.base.joint_reach import JointReach
from isaacgymenvs.utils.torch_jit_utils import *  # noqa: F403  (as the real file does)


class AllegroHand(JointReach):
    """16 joints, all driven."""

    SIZES = {"full_no_vel": 50, "full": 72, "full_state": 88}
    STATES = 88
    ACTIONS = 16
