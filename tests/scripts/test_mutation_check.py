"""The table of faults fits the source, and one fault goes all the way."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("mutation_check", ROOT / "scripts" / "mutation_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutation_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutation_check = load_script()


def test_every_fault_can_be_applied():
    assert mutation_check.misfits(mutation_check.MUTATIONS) == []


def test_names_are_unique_and_faults_change_something():
    names = [mutation.name for mutation in mutation_check.MUTATIONS]
    assert len(set(names)) == len(names)
    assert all(mutation.old != mutation.new for mutation in mutation_check.MUTATIONS)


@pytest.fixture
def tiny(tmp_path):
    """A source tree of one function with a test of it."""
    root = tmp_path / "tree"
    (root / "claw_lightning").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "claw_lightning" / "__init__.py").touch()  # else the installed package would go before this folder
    (root / "claw_lightning" / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (root / "tests" / "test_sums.py").write_text(
        "from claw_lightning.sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
    )
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: long"]\n')
    return root


def fault(old, new, tests=("tests/test_sums.py",)):
    return mutation_check.Mutation("fault", "claw_lightning/sums.py", old, new, tests)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation, fine, words",
    [
        (fault("a + b", "a - b"), True, "noticed "),
        (fault("a + b", "b + a"), False, "SURVIVES"),
        (fault("a + b", "a +"), False, "did not run"),  # a file that cannot be imported shows nothing
        (fault("a * b", "a + b"), False, "0 times"),
        (fault("a", "b"), False, "not once"),
        (fault("a + b", "a - b", ("tests/test_gone.py",)), False, "no tests/test_gone.py"),
        (fault("a + b", "a - b", ("tests/test_sums.py", "-k", "nothing")), False, "did not run"),
    ],
)
def test_verdicts(tiny, mutation, fine, words, capsys):
    before = (tiny / "claw_lightning" / "sums.py").read_text()
    assert mutation_check.check([mutation], tiny) is fine
    assert words in capsys.readouterr().out
    assert (tiny / "claw_lightning" / "sums.py").read_text() == before


@pytest.mark.slow
def test_tests_that_fail_anyway_show_nothing(tiny, capsys):
    (tiny / "tests" / "test_sums.py").write_text("def test_add():\n    assert False\n")
    assert not mutation_check.check([fault("a + b", "a - b")], tiny)
    assert "unchanged copy" in capsys.readouterr().out


@pytest.mark.slow
def test_one_fault_goes_all_the_way(capsys):
    assert mutation_check.main(["--only", "termination-sign"]) == 0
    assert "noticed   termination-sign" in capsys.readouterr().out
