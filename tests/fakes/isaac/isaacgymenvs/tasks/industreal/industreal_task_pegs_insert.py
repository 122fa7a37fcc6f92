"""Here for its imports only: packages that few machines have."""

from __future__ import annotations

import pysdf  # noqa: F401
import trimesh  # noqa: F401
import urdfpy  # noqa: F401
import warp  # noqa: F401
from isaacgymenvs.tasks.base.vec_task import VecTask


class IndustRealTaskPegsInsert(VecTask):
    """No part of the stand-in."""
