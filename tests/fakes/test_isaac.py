"""The stand-in for Isaac Gym refuses and imitates what the real one does, under Python 3.8 and under this one.

Most of it is in ``isaac_cases.py``, which runs once per interpreter: a simulation needs a process of its own, where
isaacgym is imported before torch.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.isaac import isaac_closed_form as form
from tests.fakes.isaac_config import NEEDS, bidex_config, task_config, worker_environment
from tests.pythons import python_or_skip

SCRIPT = Path(__file__).with_name("isaac_cases.py")
CASES = [
    node.name
    for node in ast.parse(SCRIPT.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


def configurations():
    found = {task: task_config(task) for task in ("ShadowHand", "ShadowHandOpenAI_FF", "AllegroHand", "Encoded")}
    found["ShadowHand_as_shipped"] = task_config("ShadowHand", pipeline="gpu", sim_device="cuda:0")
    for task in ("AllegroKuka", "AllegroKukaTwoArms"):
        found[task] = task_config(task)
        found[task + "_regrasping"] = task_config(task, subtask="regrasping")
    found["ShadowHandOver"] = bidex_config("ShadowHandOver", 4)
    found["AllegroKuka_throw"] = task_config("AllegroKuka", subtask="throw")
    return found


@pytest.fixture(scope="module", params=["3.8", "this"])
def python(request):
    """An interpreter to run the stand-in under."""
    return python_or_skip(request.param)


@pytest.fixture(scope="module")
def results(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("isaac")
    (folder / "configs.json").write_text(json.dumps(configurations()))
    command = [python, "-W", "ignore", str(SCRIPT), str(folder / "configs.json"), str(folder / "results.json")]
    environment = worker_environment(ISAAC_NEEDS=str(NEEDS))
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_case(results, case):
    assert not results[case], results[case]


def say(python, code, **environment):
    command = [python, "-W", "ignore", "-c", code]
    return subprocess.run(
        command, env=worker_environment(**environment), capture_output=True, text=True, timeout=120, cwd="/"
    )


@pytest.mark.parametrize("module", ["isaacgym", "isaacgym.gymapi", "isaacgym.gymtorch", "isaacgym.gymutil"])
def test_torch_must_come_second(python, module):
    # A module of that name is enough: the check asks whether it is there. IsaacGymEnvs#175.
    code = "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); import "
    run = say(python, code + module)
    assert run.returncode == 1
    assert "ImportError: PyTorch was imported before isaacgym modules" in run.stderr


def test_another_python_is_refused():
    run = say(sys.executable, "import isaacgym", CLAW_FAKE_ISAAC_ANY_PYTHON="0")
    assert run.returncode == 1
    assert "RuntimeError: no gym module" in run.stderr


def test_the_import_prints_and_leaves_torch_alone(python):
    run = say(python, "import isaacgym.gymapi, sys; sys.stderr.write(str('torch' in sys.modules))")
    assert run.returncode == 0
    assert run.stderr == "False"
    assert run.stdout.startswith("Importing module 'gym_3")


def test_the_bridge_compiles_for_as_long_as_asked(python):
    code = "import isaacgym, sys, time; time.sleep = lambda s: sys.stderr.write(str(s)); import isaacgym.gymtorch"
    run = say(python, code, CLAW_FAKE_ISAAC_SLOW_IMPORT="90")
    assert run.returncode == 0
    assert run.stderr == "90.0"
    assert "Loading extension module gymtorch" in run.stdout


def test_the_helpers_need_an_alias_that_numpy_has_dropped(python):
    # IsaacGymEnvs#183.
    code = (
        "import numpy as np; vars(np).pop('float', None)\n"
        "if np.__version__ < '2': vars(np).pop('__getattr__', None)  # which still knows the alias\n"
        "import isaacgym.torch_utils"
    )
    run = say(python, code)
    assert run.returncode == 1
    assert "has no attribute 'float'" in run.stderr


class TestTheClosedForm:
    def test_a_step_is_worth_one_and_a_success_its_bonus(self):
        cfg = task_config("ShadowHand", env={"episodeLength": 12})
        assert form.optimal_return(cfg) == 10.0
        cycle = form.SUCCESS_STEPS + 1.0 + form.surprise()
        assert form.optimal_return(cfg, steps=form.SUCCESS_STEPS) == form.SUCCESS_STEPS + 1.0
        assert form.optimal_return(cfg, steps=2 * form.SUCCESS_STEPS + 2) == pytest.approx(2 * cycle)

    def test_what_it_does_not_cover_is_refused(self):
        with pytest.raises(ValueError, match="closed form"):
            form.optimal_return(task_config("ShadowHandOpenAI_FF"))

    def test_seconds_become_steps(self):
        assert form.episode_length(task_config("ShadowHandOpenAI_FF")) == 160
