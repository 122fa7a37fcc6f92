"""What the components of an action move, for tasks whose actuators are known."""

from __future__ import annotations

FINGER = ("sideways", "knuckle", "bend")
#: Of the Shadow Hand in gymnasium-robotics (its file shared.xml: A_WRJ1, A_WRJ0, A_FFJ3 ... A_THJ0), in order; also of
#: EnvPool's tasks of the same names.
SHADOW_HAND = (
    "wrist sideways", "wrist up and down",
    *(f"{finger} finger {joint}" for finger in ("index", "middle", "ring") for joint in FINGER),
    "palm below the little finger", *(f"little finger {joint}" for joint in FINGER),
    "thumb turn", "thumb base", "thumb sideways", "thumb knuckle", "thumb bend",
)  # fmt: skip


def component_names(task: str, size: int, is_discrete: bool = False) -> list[str]:
    """Names of all components of an action, such as ``thumb bend``; their numbers where they are not known."""
    if task.startswith(("HandReach", "HandManipulate")) and size == len(SHADOW_HAND):
        return list(SHADOW_HAND)
    return [f"{'action' if is_discrete else 'component'} {number}" for number in range(size)]
