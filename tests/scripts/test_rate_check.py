"""The check of rate and memory: command line, arithmetic, the slow sides, and one tiny real run."""

import importlib.util
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest

from claw_lightning.data import EnvConfig, ReplayDataModule
from claw_lightning.module import OptionCritic
from tests.runs import fit_lockstep

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def check():
    """The script as a module; it imports its neighbours."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location("rate_check", SCRIPTS / "rate_check.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPTS))


# -- the command line -------------------------------------------------------------------------------------------------


def test_defaults(check):
    args = check.parse_args([])
    assert args.steps == 60_000 and args.json is None
    assert args.arms == ["even", "slow-simulator", "slow-learner"]


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--steps", "10"], "--steps"),
        (["--arms", "fast"], "fast"),
        (["--set", "data.capacity"], "KEY=VALUE"),
        (["--json", "no/such/folder/x.json"], "x.json"),
    ],
)
def test_bad_input_is_told_in_one_line(check, arguments, word, capsys):
    with pytest.raises(SystemExit) as caught:
        check.parse_args(arguments)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("rate_check: error: ") and text.count("\n") == 1 and word in text


def test_each_arm_slows_its_side_five_times(check):
    factors = {}
    for arm in check.ARMS:
        command = check.arm_command(arm, 5_000, Path("x.json"), ["data.capacity=7"])
        named = dict(a.removeprefix("--").split("=", 1) for a in command if "=" in a)
        factors[arm] = (named["data.env.init_args.factor"], named["trainer.callbacks.factor"])
        assert named["data.max_env_steps"] == "5000" and named["data.capacity"] == "7"
    assert factors == {"even": ("1.0", "1.0"), "slow-simulator": ("5.0", "1.0"), "slow-learner": ("1.0", "5.0")}


# -- arithmetic -------------------------------------------------------------------------------------------------------


def look(inserted, sampled, seconds, learner_mb=100.0, mark=None, **waits):
    found = {
        "inserted": inserted, "sampled": sampled, "seconds": seconds, "learner_wait": 0.0, "worker_wait": 0.0,
        "worker_busy": seconds, "memory": {"learner": learner_mb * 1e6}, **waits,
    }  # fmt: skip
    return found if mark is None else dict(found, mark=mark)


def hand_made(check, sampled_half=16_000, sampled=36_000, end_mb=100.0):
    """10,000 steps of which 1,000 are warm-up, at four samples per insert."""
    return check.summarise(
        [
            look(1_000, 0, 10.0),
            look(2_000, 4_000, 12.0, mark=0.2),
            look(5_000, sampled_half, 15.0, mark=0.5),
            look(10_000, sampled, 20.0, end_mb, mark=1.0, learner_wait=2.5, worker_wait=1.0),
        ],
        4.0,
        1_000,
    )


def test_rates_of_the_whole_run_and_of_its_second_half(check):
    found = hand_made(check)
    assert (found["whole"], found["second_half"]) == (4.0, 4.0)
    assert (found["error_whole"], found["error_second_half"]) == (0.0, 0.0)
    assert check.faults(found) == []
    found = hand_made(check, sampled_half=15_000, sampled=36_900)
    assert found["whole"] == pytest.approx(4.1) and found["second_half"] == pytest.approx(21_900 / 5_000)
    assert found["error_whole"] == pytest.approx(0.025) and found["error_second_half"] == pytest.approx(0.095)
    assert [fault.split(" are off")[0] for fault in check.faults(found)] == [
        "samples per insert of the whole run",
        "samples per insert of the second half",
    ]


def test_waits_are_shares_of_the_time_since_learning_began(check):
    found = hand_made(check)
    assert found["seconds"] == 10.0
    assert found["learner_wait"] == 0.25 and found["worker_wait"] == 0.1


def test_growth_is_counted_from_a_fifth_of_the_run(check):
    figures = hand_made(check, end_mb=108.0)["memory"]["learner"]
    assert (figures["warm_mb"], figures["end_mb"], figures["growth_mb"]) == (100.0, 108.0, 8.0)
    assert figures["growth_mb_per_10k_steps"] == 10.0
    assert figures["course_mb"] == [100.0, 100.0, 108.0]


@pytest.mark.parametrize("warm_mb, growth_mb, is_fault", [(100, 19, False), (100, 21, True), (1000, 29, False)])
def test_growth_counts_above_twenty_megabytes_and_three_percent(check, warm_mb, growth_mb, is_fault):
    memory = {"worker_0": {"warm_mb": warm_mb, "growth_mb": growth_mb}}
    found = check.faults({"error_whole": 0.0, "error_second_half": 0.0, "memory": memory})
    assert found == (["worker_0 has grown by 21 MB"] if is_fault else [])


def test_the_table_has_a_row_per_arm_and_per_process(check):
    lines = check.build_table([{"arm": "even", **hand_made(check, end_mb=108.0)}]).splitlines()
    assert lines[2] == "| even | 4 | 4.000 (+0.00 %) | 4.000 (+0.00 %) | 25 % | 10 % | 10 |"
    assert lines[-1] == "| even | learner | 100.0 | 108.0 | +8.0 | +10.00 |"


@pytest.mark.parametrize("wrong, status", [(0, 0), (5_000, 1)])
def test_exit_status_says_whether_all_was_well(check, wrong, status, monkeypatch, tmp_path, capsys):
    result = {"arm": "even", **hand_made(check, sampled=36_000 + wrong)}
    monkeypatch.setattr(check, "run_arm", lambda arm, steps, extra: result)
    file = tmp_path / "rate.json"
    assert check.main(["--arms", "even", "--json", str(file)]) == status
    assert json.loads(file.read_text())["records"] == [result]
    assert ("are off by" in capsys.readouterr().err) == bool(wrong)


# -- the slow sides ---------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only in steps and sleeps."""

    def __init__(self):
        self.now, self.slept = 0.0, []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_a_slow_simulator_waits_four_times_its_own_time(check, monkeypatch):
    clock = Clock()
    inner = SimpleNamespace(spec="spec", step=lambda action: setattr(clock, "now", clock.now + 0.5) or "result")
    monkeypatch.setattr(check, "make_env", lambda *arguments: inner)
    monkeypatch.setattr(check, "time", clock)
    assert check.SlowEnv("EnvPoolEnv", "a task", 5.0, num_envs=3).step(np.zeros(3)) == "result"
    assert clock.slept == [2.0]
    check.SlowEnv("EnvPoolEnv", "a task").step(np.zeros(1))
    assert clock.slept == [2.0]


def test_a_slow_learner_waits_four_times_each_update(check, monkeypatch, tmp_path):
    clock = Clock()
    monkeypatch.setattr(check, "time", clock)
    recorder = check.Recorder(str(tmp_path / "x.json"), 5.0)
    monkeypatch.setattr(recorder, "look", lambda trainer: {})
    recorder.on_batch_sampled(None, None, None)
    for seconds in (1.0, 2.0):
        clock.now += seconds
        recorder.on_update_end(None, None)
    assert clock.slept == [4.0, 8.0]


def test_settings_of_the_runs_exist(check):
    known = {"model": OptionCritic, "data": ReplayDataModule, "trainer": pl.Trainer}
    for name in check.SETTINGS:
        room, key = name.split(".")[:2]
        assert key in inspect.signature(known[room]).parameters, name


def test_a_tiny_real_run_counts_what_it_was_asked_for(check, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))  # for the worker, which imports the script
    env = EnvConfig("rate_check.SlowEnv", {"adapter": "GymnasiumEnv", "task": "Pendulum-v1", "factor": 5.0})
    data = {"env": env, "mode": "overlapped", "samples_per_insert": 4, "warmup_steps": 100, "max_env_steps": 600}
    recorder = check.Recorder(str(tmp_path / "looks.json"))
    _, module, _ = fit_lockstep(tmp_path, callbacks=[recorder], model={"num_options": 1}, data=data)
    found = check.summarise(json.loads((tmp_path / "looks.json").read_text()), 4.0, 100)
    assert found["inserted"] == 600
    # The last request of 2 x 16 samples may be left open.
    assert 4 * 500 - 32 < found["sampled"] == 16 * module.updates <= 4 * 500
    assert abs(found["error_whole"]) < 32 / 2_000
    assert 0.0 <= found["learner_wait"] <= 1.0 and 0.0 <= found["worker_wait"] <= 1.0
    for name in ("learner", "worker_0"):
        assert found["memory"][name]["warm_mb"] > 20.0 and len(found["memory"][name]["course_mb"]) >= 3
