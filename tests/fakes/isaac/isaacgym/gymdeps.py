"""What the bindings check when any module of the package is first imported."""

from __future__ import annotations

import os
import sys

BUILT_FOR = ((3, 6), (3, 7), (3, 8))
#: Lets tests of the stand-in itself run under a newer Python, which the real bindings would refuse.
ANY_PYTHON = "CLAW_FAKE_ISAAC_ANY_PYTHON"


def check_interpreter() -> None:
    """Raises RuntimeError where no binding was built for this Python."""
    version = sys.version_info[:2]
    if version not in BUILT_FOR and os.environ.get(ANY_PYTHON) != "1":
        raise RuntimeError("no gym module of isaacgym for the active version of Python (%d.%d)" % version)


def check_order() -> None:
    """Raises ImportError where torch came first: both bring their own CUDA libraries."""
    if "torch" in sys.modules:
        raise ImportError("PyTorch was imported before isaacgym modules; the order must be isaacgym, then torch")


def announce() -> None:
    """The real bindings print where they live, so stdout can carry nothing else."""
    print("Importing module 'gym_%d%d' (stand-in)" % sys.version_info[:2])
    print("GYM_USD_PLUG_INFO_PATH = %s" % os.path.dirname(os.path.abspath(__file__)))
    sys.stdout.flush()
