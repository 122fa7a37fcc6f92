"""AllegroKukaReorientation: the sizes of the real one."""

from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_base import AllegroKukaBase


class AllegroKukaReorientation(AllegroKukaBase):
    """Four keypoints."""

    SIZES = {"full_state": 117}
    STATES = 117
    ACTIONS = 23
