"""Every task of the package, so that importing it asks for what the rarest of them needs."""

from __future__ import annotations

from typing import Any, Dict

from isaacgymenvs.tasks.allegro_hand import AllegroHand
from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_regrasping import AllegroKukaRegrasping
from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_reorientation import AllegroKukaReorientation
from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_throw import AllegroKukaThrow
from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_two_arms_regrasping import AllegroKukaTwoArmsRegrasping
from isaacgymenvs.tasks.allegro_kuka.allegro_kuka_two_arms_reorientation import AllegroKukaTwoArmsReorientation
from isaacgymenvs.tasks.encoded import Encoded
from isaacgymenvs.tasks.industreal.industreal_task_pegs_insert import IndustRealTaskPegsInsert
from isaacgymenvs.tasks.shadow_hand import ShadowHand


def resolve_allegro_kuka(cfg: Dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The class that the subtask names; ``cfg`` first, as in every task."""
    subtasks = {
        "reorientation": AllegroKukaReorientation,
        "throw": AllegroKukaThrow,
        "regrasping": AllegroKukaRegrasping,
    }
    return subtasks[cfg["env"]["subtask"]](cfg, *args, **kwargs)


def resolve_allegro_kuka_two_arms(cfg: Dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The same for two arms."""
    subtasks = {
        "reorientation": AllegroKukaTwoArmsReorientation,
        "regrasping": AllegroKukaTwoArmsRegrasping,
    }
    return subtasks[cfg["env"]["subtask"]](cfg, *args, **kwargs)


isaacgym_task_map: Dict[str, Any] = {
    "AllegroHand": AllegroHand,
    "AllegroKuka": resolve_allegro_kuka,
    "AllegroKukaTwoArms": resolve_allegro_kuka_two_arms,
    "Encoded": Encoded,
    "IndustRealTaskPegsInsert": IndustRealTaskPegsInsert,
    "ShadowHand": ShadowHand,
}
