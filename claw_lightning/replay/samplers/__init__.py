"""Samplers: plug-ins that choose which stored rows are learned from."""

from claw_lightning.replay.samplers.base import Arrivals, Places, Sampler, Stored, Uniform
from claw_lightning.replay.samplers.by_option import ByOption
from claw_lightning.replay.samplers.mixture import Mixture
from claw_lightning.replay.samplers.options import OptionSegments
from claw_lightning.replay.samplers.prioritized import Prioritized
from claw_lightning.replay.samplers.recent import Fresh, Recent

__all__ = [
    "Arrivals",
    "ByOption",
    "Fresh",
    "Mixture",
    "OptionSegments",
    "Places",
    "Prioritized",
    "Recent",
    "Sampler",
    "Stored",
    "Uniform",
]
