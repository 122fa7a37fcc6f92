"""AllegroKukaTwoArmsRegrasping: the sizes of the real one."""

from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_base import AllegroKukaBase


class AllegroKukaTwoArmsRegrasping(AllegroKukaBase):
    """Two arms, one keypoint."""

    SIZES = {"full_state": 169}
    STATES = 169
    ACTIONS = 46
