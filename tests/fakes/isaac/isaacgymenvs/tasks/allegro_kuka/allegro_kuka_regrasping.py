"""AllegroKukaRegrasping: the sizes of the real one."""

from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_base import AllegroKukaBase


class AllegroKukaRegrasping(AllegroKukaBase):
    """One keypoint."""

    SIZES = {"full_state": 99}
    STATES = 99
    ACTIONS = 23
