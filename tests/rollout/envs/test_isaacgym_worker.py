"""Isaac Gym's adapter in a worker's process, under Python 3.8 and the present one, with the stand-in."""

import os
import signal
import sys

import numpy as np
import pytest

from claw_lightning.configs import IMPORT_FOLDERS
from claw_lightning.errors import WorkerError
from claw_lightning.rollout import control as phases
from claw_lightning.rollout.ring import BORDER, FIRST, TERMINATED, TRUNCATED
from tests.builders import Rig
from tests.pythons import python_or_skip
from tests.rollout.envs.isaac import ANY_PYTHON, STAND_IN, yaml_folder

LANE, EPISODE, STEP = 0, 1, 2
SIZES = {"sizes": (211, 20), "layout": {"obs_size": 211, "action_size": 20, "states_size": 211}}


@pytest.fixture(params=["this", "3.8"])
def python(request):
    return python_or_skip(request.param)


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """Builds rigs whose worker finds the stand-in where a user's own files are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    IMPORT_FOLDERS.extend([str(STAND_IN), yaml_folder(tmp_path)])
    made = []

    def build(python, mode="collect", fault=None, task="Encoded", any_python=True, **options):
        monkeypatch.setenv(ANY_PYTHON, "1" if any_python else "0")
        overrides = {"+env.fault": fault} if fault else {}
        settings = {"task": task, "overrides": overrides, "reward_scale": 1.0}
        options = {**SIZES, "num_envs": 4, **options, "init_args": {**settings, **options.pop("init_args", {})}}
        made.append(Rig(tmp_path, "IsaacGymEnv", mode, python=python, **options))
        return made[-1]

    yield build
    for one in made:
        one.pool.close(grace=5.0)


def rows(rig, first, last):
    view, ring = rig.ring.layout.view, rig.ring
    chosen = ring.rows[first:last]
    return {name: view(chosen, name).copy() for name in ("obs", "states", "action", "reward", "flags")}


def check_rows(found):
    """Rows [T, N] of the encoded task: each leads to the next row of its episode, or says that it does not."""
    obs, flags = found["obs"], found["flags"]
    same = obs[1:, :, EPISODE] == obs[:-1, :, EPISODE]
    border = flags[:-1] & BORDER != 0
    assert (border == ~same).all()
    assert (obs[1:, :, STEP] == np.where(same, obs[:-1, :, STEP] + 1, 1)).all()
    assert (obs[..., LANE] == np.arange(obs.shape[1])).all()
    code = (200 * obs[1:, :, LANE] + obs[1:, :, EPISODE]) * 1000 + obs[1:, :, STEP]
    assert (found["reward"][:-1] == np.where(same, code, 0)).all()
    done = flags[:-1] & (TERMINATED | TRUNCATED) != 0
    assert (border[1:] == done[:-1])[~border[:-1]].all() and done.any() and border.any()
    opens = flags[1:] & FIRST != 0
    assert (opens == border).all()  # nothing crosses into the episode behind a border
    np.testing.assert_allclose(obs[1:, :, -20:], found["action"][:-1], atol=1e-6)
    assert (found["states"][..., :6] == obs[..., :6] + 0.5).all()


def test_a_life_with_a_kill_and_a_hang(rig, python):
    rig = rig(python, fault={"hang": 30, "noise": 1}, failure={"deadlines": {"step": 2.0}})
    control = rig.worker.control
    rig.pool.start()
    control.steps_allowed = 20
    rig.until(lambda: rig.ring.head == 20 and control.phase == phases.WAIT)
    check_rows(rows(rig, 0, 20))
    assert rig.pool.restarts == 0

    os.kill(rig.worker.pid, signal.SIGKILL)
    control.steps_allowed = 40
    rig.until(lambda: rig.ring.head == 40 and control.phase == phases.WAIT)
    assert rig.pool.restarts == 1
    assert (rows(rig, 20, 21)["flags"] & FIRST != 0).all()  # nothing crosses the gap
    check_rows(rows(rig, 20, 40))

    control.steps_allowed = 63  # the second process hangs at its 30th step
    rig.until(lambda: rig.pool.restarts == 2)
    control.steps_allowed = 0
    text = rig.log_path.read_text()
    assert "torch" in text and "isaacgym unknown" in text


def started(rig):
    with pytest.raises(WorkerError) as caught:
        rig.pool.start()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_set_up_that_quits_is_an_error_with_the_last_lines_of_the_log(rig, python):
    message = started(rig(python, fault="quit"))
    assert "ended the process while it set up Encoded" in message and "*** No sim could be created" in message


def test_an_interpreter_without_bindings_is_named(rig):
    message = started(rig(sys.executable, any_python=False))
    assert "data.worker_python: Isaac Gym has no bindings for" in message and "take Python 3.8" in message


def test_a_task_that_is_not_there_is_named(rig):
    assert "did you mean ShadowHand" in started(rig(sys.executable, task="ShadowHnad"))


def test_an_interpreter_without_isaac_gym_is_told_how_to_get_it(rig):
    rig = rig(sys.executable)
    IMPORT_FOLDERS.remove(str(STAND_IN))
    assert "Isaac Gym runs under Python 3.8 at most" in started(rig)
