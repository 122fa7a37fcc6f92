"""Scripts as modules; they are no package."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load_script(name):
    """The module of ``scripts/<name>.py``."""
    sys.path.insert(0, str(ROOT / "scripts"))  # it imports compare_sb3 from beside itself
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module
