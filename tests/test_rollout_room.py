"""The walls of the rollout room: what a worker imports runs under Python 3.8 with numpy and torch, and nothing else.

A worker may live in another interpreter (Isaac Gym: Python 3.6 to 3.8) where Lightning cannot be installed. The first
tests read the source and run everywhere; the last one imports the room under a real Python 3.8 where there is one.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pythons import python_38

ROOT = Path(__file__).resolve().parents[1]
ROOM = ROOT / "claw_lightning" / "rollout"
ROOM_NAME = "claw_lightning.rollout"
TREE = [ROOT / name for name in ("claw_lightning", "callbacks", "scripts", "tests")]

#: In the standard library of this interpreter, but not of Python 3.8.
TOO_NEW = {"graphlib", "tomllib", "zoneinfo"}
ALLOWED = (set(sys.stdlib_module_names) - TOO_NEW) | {"numpy", "torch"}
#: The learner's side: not even a lazy import inside a function may reach it from the room.
LEARNER_ONLY = {"callbacks", "jsonargparse", "lightning", "omegaconf", "pytorch_lightning", "torchmetrics"}
#: Subscripting these at run time needs Python 3.9.
BUILTIN_GENERICS = {"dict", "frozenset", "list", "set", "tuple", "type"}
NEW_METHODS = {"removeprefix", "removesuffix", "is_relative_to", "with_stem"}
NEW_ARGUMENTS = {"zip": {"strict"}, "dataclass": {"slots", "kw_only", "match_args"}}


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


ROOM_FILES = sources(ROOM)


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(node: ast.AST, path: Path) -> Iterator[str]:
    """Absolute dotted names that an import statement asks for; ``from a import b`` gives ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        yield from (f"{base}.{alias.name}" for alias in node.names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def module_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: everything outside functions and ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if is_type_checking(node):
            for statement in node.orelse:
                yield statement
                yield from module_level(statement)
            continue
        yield node
        yield from module_level(node)


def is_inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imports_outside_the_room(path: Path, source: str) -> list[str]:
    tree = ast.parse(source)
    faults = [
        f"{node.lineno}: {name} at module level"
        for node in module_level(tree)
        for name in imported(node, path)
        if name.split(".")[0] not in ALLOWED and not is_inside(name, ROOM_NAME)
    ]
    for node in ast.walk(tree):
        for name in imported(node, path):
            own_but_outside = is_inside(name, "claw_lightning") and not is_inside(name, ROOM_NAME)
            if own_but_outside or name.split(".")[0] in LEARNER_ONLY:
                faults.append(f"{node.lineno}: {name} leads out of the room")
    return faults


def annotations(tree: ast.AST) -> list[ast.AST]:
    found: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node.returns)
    return [node for node in found if node is not None]


def too_new_at_run_time(source: str) -> list[str]:
    """What parses under Python 3.8 but fails there when it runs."""
    tree = ast.parse(source)
    future = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and "annotations" in [alias.name for alias in node.names]
        for node in tree.body
    )
    inert = {id(node) for annotation in annotations(tree) for node in ast.walk(annotation)}
    faults = []
    if not future:
        for annotation in annotations(tree):
            for node in ast.walk(annotation):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                    faults.append(f"{node.lineno}: `{ast.unparse(node)}` needs `from __future__ import annotations`")
        inert = set()
    for node in ast.walk(tree):
        if id(node) in inert:
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in BUILTIN_GENERICS:
            faults.append(f"{node.lineno}: `{ast.unparse(node)}` cannot be subscripted")
        elif isinstance(node, ast.Attribute) and node.attr in NEW_METHODS:
            faults.append(f"{node.lineno}: .{node.attr} is newer")
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for keyword in node.keywords:
                if keyword.arg in NEW_ARGUMENTS.get(called, ()):
                    faults.append(f"{node.lineno}: {called}({keyword.arg}=...) is newer")
    return faults


def in_room(path: Path) -> str:
    return path.relative_to(ROOM).as_posix()


def test_the_room_is_not_empty():
    assert ROOM_FILES, f"no source below {ROOM}: the tests of this file would all pass on nothing"


@pytest.mark.parametrize("path", ROOM_FILES, ids=in_room)
def test_file_parses_as_python_38(path):
    ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 8))


@pytest.mark.parametrize("path", ROOM_FILES, ids=in_room)
def test_file_imports_nothing_outside_the_room(path):
    assert imports_outside_the_room(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", ROOM_FILES, ids=in_room)
def test_file_evaluates_nothing_that_python_38_lacks(path):
    assert too_new_at_run_time(path.read_text(encoding="utf-8")) == []


class TestTheChecksThemselves:
    """A wall that lets everything through would pass as well."""

    @pytest.mark.parametrize(
        "source",
        [
            "import lightning.pytorch",
            "import gymnasium",
            "import tomllib",
            "from claw_lightning import losses",
            "from claw_lightning.replay import gather",
            "from .. import losses",
            "from ..replay.gather import rows",
            "try:\n    import envpool\nexcept ImportError:\n    pass",
            "class A:\n    import envpool",
            "def f():\n    from claw_lightning.module import OptionCritic",
            "def f():\n    import torchmetrics",
        ],
    )
    def test_an_arrow_out_of_the_room_is_seen(self, source):
        assert imports_outside_the_room(ROOM / "ring.py", source)

    @pytest.mark.parametrize(
        "source",
        [
            "import numpy as np\nimport torch.nn.functional as F\nfrom os import path",
            "from claw_lightning.rollout.ring import LaneRing",
            "from claw_lightning.rollout import ring",
            "from .ring import LaneRing\nfrom . import ring",
            "def f():\n    import envpool",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import gymnasium",
        ],
    )
    def test_what_is_allowed_passes(self, source):
        assert imports_outside_the_room(ROOM / "worker.py", source) == []

    @pytest.mark.parametrize(
        "source",
        [
            "def f(x: int | None): ...",
            "def f() -> int | None: ...",
            "class A:\n    x: int | None = None",
            "def f(x: list[int]): ...",
            "Pair = tuple[int, int]",
            "from __future__ import annotations\nPair = tuple[int, int]",
            "list(zip(a, b, strict=True))",
            "@dataclass(slots=True)\nclass A: ...",
            "name.removeprefix('a')",
        ],
    )
    def test_what_fails_at_run_time_is_seen(self, source):
        assert too_new_at_run_time(source)

    @pytest.mark.parametrize(
        "source",
        [
            "from __future__ import annotations\ndef f(x: int | None) -> list[int]: ...",
            "flags = a | b\ndef f(x: Optional[int]): ...",
        ],
    )
    def test_what_works_passes(self, source):
        assert too_new_at_run_time(source) == []


def test_the_package_itself_imports_nothing_heavy():
    code = (
        "import sys, claw_lightning\n"
        "heavy = {'torch', 'lightning', 'numpy', 'jsonargparse', 'torchmetrics'} & set(sys.modules)\n"
        "sys.exit(f'import claw_lightning loaded {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_only_one_of_the_two_lightning_packages_is_imported():
    # A callback that subclasses the class of the other package is silently not recognised (pytorch-lightning#20797).
    faults = []
    for path in sources(*TREE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported(node, path):
                if name.split(".")[0] == "pytorch_lightning":
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert faults == []


# --- a real Python 3.8 -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1500)  # the first call may download a torch
def test_every_module_of_the_room_imports_under_python_38(tmp_path):
    python, reason = python_38()
    if python is None:
        pytest.skip(reason)
    modules = [module_name(path) for path in ROOM_FILES if path.name != "__main__.py"]
    code = (
        "import importlib, sys, traceback\n"
        "failed = []\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except BaseException:\n"
        "        failed.append(name)\n"
        "        traceback.print_exc()\n"
        "sys.exit('failed under Python %d.%d: %s' % (*sys.version_info[:2], failed) if failed else 0)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment.update(PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    run = subprocess.run(
        [python, "-c", code, *modules], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
