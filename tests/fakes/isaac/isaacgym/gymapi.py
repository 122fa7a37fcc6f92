"""Stand-in for the native module: parameters that check their types, and a sim that only counts frames."""

from __future__ import annotations

import os
from typing import Any, Dict, Optional

SIM_PHYSX = 0
SIM_FLEX = 1
UP_AXIS_Y = 0
UP_AXIS_Z = 1
KEY_ESCAPE = 256
#: "1": pretend that the machine has a GPU for physics (tensors stay where torch can put them).
PRETEND_GPU = "CLAW_FAKE_ISAAC_GPU"


class ContactCollection(int):
    """Which contacts are kept: 0 never, 1 last substep, 2 all substeps.

    Raises:
        ValueError: another number.
    """

    def __new__(cls, value: int) -> ContactCollection:
        if value not in (0, 1, 2):
            raise ValueError("%r is not a ContactCollection" % (value,))
        return super().__new__(cls, value)


class Vec3:
    """Three floats."""

    def __init__(self, x: float = 0.0, y: float = 0.0, z: float = 0.0) -> None:
        self.x, self.y, self.z = float(x), float(y), float(z)


class _Params:
    """A bound C++ struct: unknown names raise AttributeError, wrong types TypeError."""

    _fields: Dict[str, Any] = {}

    def __init__(self) -> None:
        for name, default in self._fields.items():
            object.__setattr__(self, name, default() if isinstance(default, type) else default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._fields:
            raise AttributeError("'%s' object has no attribute '%s'" % (type(self).__name__, name))
        before = getattr(self, name)
        if isinstance(before, bool):
            fits = isinstance(value, bool)
        elif isinstance(before, int):
            fits = isinstance(value, int) and not isinstance(value, bool)
        elif isinstance(before, float):
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        else:
            fits = isinstance(value, type(before))
        if not fits:
            raise TypeError("%s.%s: incompatible value %r" % (type(self).__name__, name, value))
        object.__setattr__(self, name, value)


class PhysXParams(_Params):
    """Settings of PhysX."""

    use_gpu: bool

    _fields = {
        "num_threads": 0,
        "solver_type": 1,
        "use_gpu": False,
        "num_position_iterations": 4,
        "num_velocity_iterations": 1,
        "max_gpu_contact_pairs": 1048576,
        "num_subscenes": 0,
        "contact_offset": 0.02,
        "rest_offset": 0.001,
        "bounce_threshold_velocity": 0.2,
        "max_depenetration_velocity": 100.0,
        "default_buffer_size_multiplier": 2.0,
        "contact_collection": 2,
    }


class SimParams(_Params):
    """Settings of the whole simulation."""

    _fields = {
        "dt": 1.0 / 60.0,
        "substeps": 2,
        "up_axis": UP_AXIS_Y,
        "use_gpu_pipeline": False,
        "num_client_threads": 0,
        "gravity": Vec3,
        "physx": PhysXParams,
    }

    dt: float
    use_gpu_pipeline: bool
    physx: PhysXParams


class CameraProperties:
    """Only named, never used: there is no viewer."""


class Sim:
    """Handle of the one simulation of a process."""

    def __init__(self, params: SimParams) -> None:
        self.params = params
        self.frames = 0
        self.prepared = False


def _has_gpu() -> bool:
    if os.environ.get(PRETEND_GPU) == "1":
        return True
    import torch

    return bool(torch.cuda.is_available())


class Gym:
    """The part of the real class that tasks call around their own tensors."""

    def create_sim(self, compute_device: int, graphics_device: int, engine: int, params: SimParams) -> Optional[Sim]:
        """None where the sim cannot be made: the real one prints the reason and raises nothing."""
        if engine != SIM_PHYSX:
            print("[Error] only PhysX in this stand-in")
            return None
        if (params.physx.use_gpu or params.use_gpu_pipeline) and not _has_gpu():
            print("[Error] no CUDA device %d for GPU PhysX" % compute_device)
            return None
        print("Physics Engine: PhysX")
        print("Physics Device: %s" % ("cuda:%d" % compute_device if params.physx.use_gpu else "cpu"))
        print("GPU Pipeline: %s" % ("enabled" if params.use_gpu_pipeline else "disabled"))
        return Sim(params)

    def prepare_sim(self, sim: Sim) -> bool:
        """Must come before the first frame."""
        sim.prepared = True
        return True

    def create_viewer(self, sim: Sim, camera: CameraProperties) -> None:
        """Raises RuntimeError: a server has no display."""
        raise RuntimeError("cannot open a viewer: no display on this machine (headless=False)")

    def simulate(self, sim: Sim) -> None:
        """One physics frame."""
        if not sim.prepared:
            raise RuntimeError("simulate() before prepare_sim()")
        sim.frames += 1

    def fetch_results(self, sim: Sim, wait: bool) -> None:
        """Does nothing: results are in the task's own tensors."""

    def get_frame_count(self, sim: Sim) -> int:
        """Physics frames so far."""
        return sim.frames


_GYM = Gym()


def acquire_gym() -> Gym:
    """The one Gym object of the process."""
    return _GYM
