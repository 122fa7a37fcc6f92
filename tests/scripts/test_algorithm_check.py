"""The check by whole runs: folders, resumption, figures, bars and exit status; the runs are fakes."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.scripts.loading import ROOT, load_script

check = load_script("algorithm_check")
SCALARS = {
    "option/usage_entropy": 0.5, "option/share_0": 0.75, "option/share_1": 0.25, "option/decision_rate": 0.1,
    "option/beta_extreme": 0.02,
}  # fmt: skip


def write_events(folder, scalars, steps=12):
    """TensorBoard events as a run leaves them; the first steps, which do not count, hold something else."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / "runs" / "version_0") as writer:
        for step in range(steps):
            for tag, value in scalars.items():
                writer.add_scalar(tag, value if step >= steps - check.HEALTH_POINTS else 9.0, step)


def write_episodes(folder, lengths, first=1):
    path = folder / "runs" / "version_0" / "episodes.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{first + i},{10 * i},0.5,{length},1" for i, length in enumerate(lengths)]
    path.write_text("\n".join(["episode,env_steps,return,length,success", *rows]) + "\n")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Runs are a trivial process; ``returns`` gives what the evaluation finds, ``commands`` what a run executes."""

    class Fake:
        started, returns, commands = [], {}, {}

        def call(self, *arguments):
            words = ["pendulum", "--arms", "td3", "--seeds", "0", "1", *arguments]
            return check.main([*words, "--out", str(tmp_path / "out"), "--json", str(tmp_path / "x.json")])

        def folder(self, arm, seed, suite="pendulum"):
            return tmp_path / "out" / suite / f"{arm}-seed{seed}"

        @property
        def stored(self):
            return json.loads((tmp_path / "x.json").read_text())

    made = Fake()
    made.started, made.returns, made.commands = [], {}, {}

    def build(run, parallel):
        made.started.append((run.arm.name, run.seed, parallel))
        if run.arm.options:
            write_events(run.folder, SCALARS)
        return made.commands.get((run.arm.name, run.seed), [sys.executable, "-c", "print('fine')"])

    def evaluate(run, student=False):
        value = made.returns.get((run.arm.name, run.seed, student), made.returns.get((run.arm.name, run.seed), -150.0))
        return {"return": value, "return_sd": 80.0, "env_steps": run.suite.steps, "updates": 7}

    monkeypatch.setattr(check, "build_command", build)
    monkeypatch.setattr(check, "evaluate", evaluate)
    return made


# -- runs -------------------------------------------------------------------------------------------------------------


def test_figures_bar_and_json(fake, capsys):
    fake.returns = {("td3", 0): -140.0, ("td3", 1): -160.0}
    assert fake.call() == 0
    out = capsys.readouterr().out
    assert "| td3 | return | -140.0 | -160.0 | -150.0 | 14.1 | -150.0 | each at least -170 | met |" in out
    assert "spread by about 80" in out
    assert fake.stored["status"] == 0 and [r["seed"] for r in fake.stored["records"]] == [0, 1]
    record = json.loads((fake.folder("td3", 1) / "result.json").read_text())
    assert record["figures"] == {"return": -160.0} and record["updates"] == 7 and record["health"] is None


def test_a_missed_bar_is_status_2(fake, capsys):
    fake.returns = {("td3", 0): -300.0}
    assert fake.call() == 2
    assert "**missed**" in capsys.readouterr().out


def test_finished_runs_are_not_repeated(fake, capsys):
    assert fake.call() == 0
    fake.started.clear()
    assert fake.call("--seeds", "0", "1", "2") == 0
    assert fake.started == [("td3", 2, 1)]
    assert "2 of 3 runs had finished before" in capsys.readouterr().err


def test_a_failed_run_is_status_1_told_and_repeated(fake, capsys):
    fake.commands["td3", 0] = [sys.executable, "-c", "print('no such hand'); raise SystemExit(3)"]
    fake.returns = {("td3", 1): -300.0}
    assert fake.call() == 1  # although a bar could be missed as well
    out = capsys.readouterr().out
    assert "failed: td3, seed 0: exit status 3: no such hand" in out
    assert "| td3 | return | failed | -300.0 |" in out and "not judged" in out
    assert not (fake.folder("td3", 0) / "result.json").exists()
    fake.commands.clear()
    fake.returns.clear()
    fake.started.clear()
    (fake.folder("td3", 0) / "leftover").touch()
    assert fake.call() == 2  # seed 1 keeps its -300
    assert fake.started == [("td3", 0, 1)]
    assert not (fake.folder("td3", 0) / "leftover").exists()


def test_an_evaluation_that_fails_is_a_failed_run(fake, monkeypatch, capsys):
    def broken(run, student=False):
        raise KeyError("policy")

    monkeypatch.setattr(check, "evaluate", broken)
    assert fake.call() == 1
    assert "KeyError: 'policy'" in capsys.readouterr().out


def test_a_run_that_ended_early_has_failed(fake, monkeypatch, capsys):
    short = {"return": -1.0, "return_sd": 0.0, "env_steps": 500, "updates": 7}
    monkeypatch.setattr(check, "evaluate", lambda run, student=False: short)
    assert fake.call() == 1
    assert "500 of 20,000 environment steps" in capsys.readouterr().out


def test_figures_that_are_not_finite_have_failed(fake, capsys):
    fake.returns = {("td3", 0): float("nan")}
    assert fake.call() == 1
    assert "not finite" in capsys.readouterr().out


def test_a_hung_run_is_killed(fake, monkeypatch, capsys):
    quick = dataclasses.replace(check.PENDULUM, seconds=0.5)
    monkeypatch.setitem(check.SUITES, "pendulum", quick)
    fake.commands["td3", 0] = ["sleep", "60"]
    started = time.monotonic()
    assert fake.call() == 1
    assert time.monotonic() - started < 20
    assert "killed" in capsys.readouterr().err


def test_results_of_other_settings_are_refused(fake, monkeypatch, capsys):
    assert fake.call() == 0
    monkeypatch.setitem(check.SUITES, "pendulum", dataclasses.replace(check.PENDULUM, episodes=7))
    assert fake.call() == 1
    err = capsys.readouterr().err
    assert "another episodes" in err and "--out" in err


def test_runs_of_two_states_of_the_code_are_told(fake, monkeypatch, capsys):
    assert fake.call("--seeds", "0") == 0
    monkeypatch.setattr(check, "source_digest", lambda: "other")
    assert fake.call() == 0
    assert "2 states of the code" in capsys.readouterr().out


def test_a_folder_of_somebody_else_is_not_touched(fake, capsys):
    fake.folder("td3", 1).mkdir(parents=True)
    (fake.folder("td3", 1) / "thesis.tex").touch()
    assert fake.call() == 1
    assert "holds files that are not of this check" in capsys.readouterr().err
    assert (fake.folder("td3", 1) / "thesis.tex").exists()
    assert fake.started == []


def test_a_folder_in_use_is_refused(fake, capsys):
    fake.folder("td3", 0).mkdir(parents=True)
    other = subprocess.Popen(["sleep", "60"])
    try:
        owner = {"pid": other.pid, "created": psutil.Process(other.pid).create_time(), "source": ""}
        (fake.folder("td3", 0) / "started.json").write_text(json.dumps(owner))
        assert fake.call() == 1
        assert f"in use by process {other.pid}" in capsys.readouterr().err
    finally:
        other.kill()
        other.wait()
    assert fake.call() == 0


def test_parallel_runs_overlap(fake):
    nap = [sys.executable, "-c", "import time; time.sleep(1.5)"]
    fake.commands.update({("td3", seed): nap for seed in range(2)})
    started = time.monotonic()
    assert fake.call("--parallel", "2") == 0
    assert time.monotonic() - started < 2.9
    assert fake.started == [("td3", 0, 2), ("td3", 1, 2)]


def test_an_interruption_ends_the_children_and_the_next_call_goes_on(fake, capsys):
    fake.commands["td3", 1] = ["sh", "-c", "sleep 61 & sleep 61"]

    def interrupt():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and len(fake.started) < 2:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert fake.call() == 130
    assert "goes on from here" in capsys.readouterr().err
    left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not any("sleep" in p.name() for p in left)
    fake.commands.clear()
    fake.started.clear()
    assert fake.call() == 0
    assert fake.started == [("td3", 1, 1)]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_health_is_the_mean_of_the_last_logging_steps(fake, capsys):
    assert fake.call("--arms", "options") == 0
    out = capsys.readouterr().out
    assert "| arm | seed | usage entropy | largest share | decision rate | beta outside [0.01, 0.99] |" in out
    assert "| options | 0 | 0.500 | 0.750 | 0.100 | 0.020 |" in out
    assert "replay samples" in out


def test_a_run_without_its_health_has_failed(fake, monkeypatch, capsys):
    monkeypatch.delitem(SCALARS, "option/beta_extreme")
    assert fake.call("--arms", "options") == 1
    assert "option/beta_extreme" in capsys.readouterr().out


def test_the_student_is_compared_with_its_own_teacher(fake, capsys):
    fake.returns = {("student", 0, True): -156.0, ("student", 1, True): -157.0}
    assert fake.call("--arms", "student") == 0
    assert fake.stored["records"][0]["figures"] == {"return": -150.0, "student return": -156.0}
    out = capsys.readouterr().out
    assert "| each at least `return` of student (slack 5%) | met |" in out


def test_a_student_too_far_below_is_missed(fake):
    fake.returns = {("student", seed, True): -160.0 for seed in range(2)}
    assert fake.call("--arms", "student") == 2


@pytest.mark.parametrize("first", [0, 1])
def test_lengths_over_windows_of_episodes(tmp_path, first):
    lengths = [10.0] * 900 + [20.0] * 100 + [90.0] * 100 + [60.0] * 200 + [30.0] * 200 + [5.0] * 400 + [7.0] * 100
    write_episodes(tmp_path, [*lengths, 999.0], first)
    assert check.read_lengths(tmp_path, check.FOUR_ROOMS.windows) == {
        "length 900-1000": 20.0,
        "length 1900-2000": 7.0,
        "after 100": 90.0,
        "after 300": pytest.approx(70.0),
        "after 500": pytest.approx(54.0),
    }


def test_too_few_episodes_are_told(tmp_path):
    write_episodes(tmp_path, [1.0] * 1999)
    with pytest.raises(check.CompareError, match="holds 1999 episodes; 2000 are needed"):
        check.read_lengths(tmp_path, check.FOUR_ROOMS.windows)


def test_a_gap_in_the_episodes_is_told(tmp_path):
    write_episodes(tmp_path, [1.0] * 2000, first=2)
    with pytest.raises(check.CompareError, match="one by one"):
        check.read_lengths(tmp_path, check.FOUR_ROOMS.windows)


# -- bars -------------------------------------------------------------------------------------------------------------


def bar(side="at least", **changes):
    return check.Bar("x", side, **changes)


@pytest.mark.parametrize(
    "tested, values, expected",
    [
        (bar(limit=1.0), {0: 0.0, 1: 2.0}, True),
        (bar(limit=1.0, over="each"), {0: 0.0, 1: 2.0}, False),
        (bar(limit=1.1), {0: 0.0, 1: 2.0}, False),
        (bar("at most", limit=1.0), {0: 0.0, 1: 2.0}, True),
        (bar("at most", limit=0.9), {0: 0.0, 1: 2.0}, False),
        (bar(limit=1.0), {0: 5.0}, None),
        (bar(beside=("b", "y")), {0: 10.0, 1: 10.0}, True),
        (bar(beside=("b", "y")), {0: 9.9, 1: 10.0}, False),
        (bar(beside=("b", "y"), slack=0.1), {0: 9.0, 1: 9.0}, True),
        (bar("at most", beside=("b", "y"), slack=0.1), {0: 11.0, 1: 11.1}, False),
        (bar(beside=("b", "none")), {0: 9.0, 1: 9.0}, None),
    ],
)
def test_judgement(tested, values, expected):
    figures = {("a", "x"): values, ("b", "y"): {0: 10.0, 1: 10.0}}
    assert check.judge(tested, "a", [0, 1], figures) is expected


def test_median_ignores_a_single_bad_seed():
    figures = {("a", "x"): {0: 1.0, 1: 1.0, 2: 99.0}}
    assert check.judge(bar("at most", limit=2.0, over="median"), "a", [0, 1, 2], figures)
    assert not check.judge(bar("at most", limit=2.0), "a", [0, 1, 2], figures)


def test_bars_of_the_table_name_arms_and_figures_that_exist():
    for suite in check.SUITES.values():
        figures = {arm.name: set(suite.windows) or {"return"} | ({"student return"} if arm.student else set())
                   for arm in suite.arms}  # fmt: skip
        for arm in suite.arms:
            for b in arm.bars:
                assert b.figure in figures[arm.name]
                assert (b.limit is None) != (b.beside is None)
                assert b.beside is None or b.beside[1] in figures[b.beside[0]]


# -- commands ---------------------------------------------------------------------------------------------------------


def run_of(suite, name, seed=3):
    arm = next(arm for arm in suite.arms if arm.name == name)
    return check.Run(suite, arm, seed, Path("/nowhere"))


def test_command_of_the_product():
    command = check.claw_command(run_of(check.PENDULUM, "sac"), 1)
    assert Path(command[0]).name == "lightning" and command[1] == "fit"
    assert command[command.index("--model.actor") + 1] == "gaussian"
    assert command[command.index("--seed_everything") + 1] == "3"
    assert command[command.index("--data.max_env_steps") + 1] == "20000"
    assert command.index("--trainer.callbacks+=RunCheckpoint") < command.index("--trainer.callbacks.dirpath=/nowhere")
    assert "--data.learner_threads" not in command
    command = check.claw_command(run_of(check.PENDULUM, "sac"), 2)
    assert command[command.index("--data.learner_threads") + 1] == "1"


def test_command_of_stable_baselines3_is_understood():
    args = check.parse_args(check.sb3_command(run_of(check.HALF_CHEETAH, "sb3"), 2)[2:])
    assert (args.suite.name, args.arms[0].name, args.seeds, args.threads) == ("half_cheetah", "sb3", [3], 1)
    assert args.train_sb3 == Path("/nowhere/sb3.json")


def test_recipe_is_read_from_the_configuration():
    recipe = check.recipe(ROOT / check.HALF_CHEETAH.config)
    assert recipe["gradient_steps"] == recipe["lanes"]  # one update of 256 per environment step
    assert recipe["model"]["policy_delay"] == 2 and recipe["data"]["warmup_steps"] == 5_000


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["half_hand"], "half_hand"),
        (["pendulum", "--arms", "ppo"], "ppo"),
        (["pendulum", "--arms", "td3", "td3"], "twice"),
        (["pendulum", "--seeds", "-1"], "--seeds"),
        (["pendulum", "--parallel", "0"], "--parallel"),
        (["pendulum", "--json", "no/such/x.json"], "x.json"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, word, capsys):
    with pytest.raises(SystemExit) as caught:
        check.parse_args(arguments)
    assert caught.value.code == 1  # 2 is a missed bar
    text = capsys.readouterr().err
    assert text.startswith("algorithm_check: error: ") and text.count("\n") == 1 and word in text


def test_missing_stable_baselines3_is_told_before_anything_starts(fake, monkeypatch, capsys):
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    assert check.main(["half_cheetah", "--out", str(fake.folder("td3", 0))]) == 1
    text = capsys.readouterr().err
    assert "make compare" in text and "--arms" in text and text.count("\n") == 1
    assert fake.started == []


def test_an_arm_of_another_library_that_is_not_installed_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)
    assert check.main([next(iter(check.SUITES)), "--train-sb3", str(tmp_path / "sb3.json"), "--seeds", "0"]) == 1
    said = capsys.readouterr()
    assert check.MISSING_SB3 in said.out + said.err
