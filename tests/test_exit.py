"""How whole runs end: signals, death, errors of plug-ins; nothing may be left behind. Real processes."""

import json
import os
import signal

import psutil
import pytest

from tests.runs import ENDLESS, FAST, alive, checkpoint, descendants, learning, run, start, wait_until

pytestmark = pytest.mark.slow
START, END = 60.0, 30.0  # seconds


def error_line(folder):
    """The last line on the screen; nothing on it may be a traceback."""
    err = (folder / "err.txt").read_text()
    assert "Traceback" not in err
    return err.strip().splitlines()[-1]


@pytest.fixture
def endless(tmp_path):
    """A run in the background that has begun to learn, with its processes; ended after the test in any case."""
    process = start(tmp_path, *ENDLESS, "--trainer.check_val_every_n_epoch=1")
    children = []
    try:
        wait_until(lambda: learning(tmp_path) or process.poll() is not None, START, "the run never began")
        assert process.poll() is None, (tmp_path / "err.txt").read_text()
        children = descendants(process)
        assert len(children) >= 2  # a worker and the evaluator
        yield process, children, tmp_path
    finally:
        process.kill()
        for child in alive(children):
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_resumes(endless, number):
    process, children, folder = endless
    process.send_signal(number)
    assert process.wait(END) == 128 + number
    assert not alive(children)
    assert "Traceback" not in (folder / "err.txt").read_text()
    stored = checkpoint(folder)
    assert stored["claw"]["updates"] > 0
    if number == signal.SIGINT:
        return
    last = next(folder.glob("runs/*/checkpoints/last.ckpt"))
    steps = stored["claw"]["env_steps"] + 300
    status, out, err = run(folder, *FAST, f"--ckpt_path={last}", f"--data.max_env_steps={steps}")
    assert status == 0, err
    resumed = checkpoint(folder)
    assert resumed["claw"]["env_steps"] == steps // 2 * 2
    assert resumed["claw"]["updates"] > stored["claw"]["updates"]
    assert resumed["global_step"] > stored["global_step"]


def test_death_of_the_learner_leaves_no_process_and_no_shared_memory(endless):
    process, children, _ = endless
    before = set(os.listdir("/dev/shm"))
    process.kill()
    process.wait(END)
    wait_until(lambda: not alive(children), 5.0, "workers outlived the learner")
    assert set(os.listdir("/dev/shm")) <= before


def test_an_error_in_a_plug_in_is_one_line_and_keeps_the_checkpoint(tmp_path):
    (tmp_path / "plugin.py").write_text(
        "import json, os, psutil\n"
        "from claw_lightning.hooks import UpdateCallback\n"
        "class Broken(UpdateCallback):\n"
        "    def on_update_end(self, trainer, module):\n"
        "        if module.updates == 5:\n"
        "            children = [p.pid for p in psutil.Process().children(recursive=True)]\n"
        "            open('children.json', 'w').write(json.dumps(children))\n"
        "            raise RuntimeError('my plug-in broke')\n"
    )
    status, _, _ = run(tmp_path, *ENDLESS, "--trainer.callbacks+=plugin.Broken")
    assert status == 1
    assert error_line(tmp_path).startswith("lightning: error: RuntimeError: my plug-in broke (traceback: ")
    assert "plugin.py" in (tmp_path / "error.log").read_text()
    assert checkpoint(tmp_path)["claw"]["updates"] == 5
    children = json.loads((tmp_path / "children.json").read_text())
    assert children and not [pid for pid in children if psutil.pid_exists(pid)]


def test_a_simulator_that_cannot_be_imported_is_one_line(tmp_path):
    (tmp_path / "broken_sim.py").write_text(
        "from claw_lightning.rollout.envs.base import VectorEnv\n"
        "class Sim(VectorEnv):\n"
        "    def __init__(self, task: str, num_envs: int = 1, seed: int = 0) -> None:\n"
        "        import no_such_simulator\n"
    )
    status, _, _ = run(tmp_path, *ENDLESS, "--data.env.class_path=broken_sim.Sim")
    assert status == 1
    line = error_line(tmp_path)
    assert line.startswith("lightning: error: ") and "no_such_simulator" in line and "describe.log" in line
    ours = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not alive(ours)
    assert (tmp_path / "error.log").is_file()
