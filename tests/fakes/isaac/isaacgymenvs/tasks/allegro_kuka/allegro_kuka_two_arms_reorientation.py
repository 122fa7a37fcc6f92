"""AllegroKukaTwoArmsReorientation: the sizes of the real one."""

from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_base import AllegroKukaBase


class AllegroKukaTwoArmsReorientation(AllegroKukaBase):
    """Two arms, four keypoints."""

    SIZES = {"full_state": 196}
    STATES = 196
    ACTIONS = 46
