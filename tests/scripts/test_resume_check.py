"""The check of resumes: which values are compared, the test over seeds, and its runs with stand-ins for trainings."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.scripts.loading import load_script

#: Stands in for a training: 40 updates in 40 steps, or up to the break; then it waits to be ended, as often as need be.
TRAINING = """
import json, pathlib, signal, sys, time
arguments, ended = sys.argv[1:], []
signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
run = pathlib.Path("runs/version_0")
checkpoints = run / "checkpoints"
(checkpoints / "replay").mkdir(parents=True)
(checkpoints / "last.ckpt").write_text("state")
is_broken, begin, stop, jump = pathlib.Path.cwd().name == "broken_off", 0, 40, 0.0
if "--ckpt_path" in arguments:
    path = pathlib.Path(arguments[arguments.index("--ckpt_path") + 1])
    assert path.read_text() == "state"
    begin, jump = 20, 0.0 if (path.parent / "replay").is_dir() else JUMP
with (run / "metrics.csv").open("w") as file:
    print("time/updates,time/env_steps,val/return,loss/critic,rate/samples_per_insert", file=file)
    for update in range(begin + 1, 21 if is_broken else stop + 1):
        print(f"{update},{update},{update % 3 - 100},{1 + update / 10 + jump},32", file=file)
marker = checkpoints / "last.ckpt.done"
marker.with_name("aside").write_text(json.dumps({"env_steps": 20 if is_broken else 40, "updates": 20}))
marker.with_name("aside").replace(marker)
while is_broken and not ended:
    time.sleep(0.01)
sys.exit(STATUS if is_broken else 0)
"""


@pytest.fixture(scope="module")
def check():
    return load_script("resume_check")


def seeds_of(check, shift=0.0, count=5):
    """Values that rise everywhere by about ten; resumed ones by so much more."""
    rise = {"unbroken": 10.0, "resumed": 10.0 + shift, "without replay": 10.0}
    return [
        {arm: dict.fromkeys(check.NAMES, (100.0, 100.0 + rise[arm] + seed)) for arm in check.ARMS}
        for seed in range(count)
    ]


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_the_permutation_test_counts_all_ways_to_deal(check):
    assert check.permutation_test([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert check.permutation_test([4, 5, 6], [1, 2, 3]) == pytest.approx(2 / 20)
    assert check.permutation_test([1, 1, 1], [1, 1, 1]) == 1.0
    assert check.permutation_test([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]) == 1.0
    # The least number of seeds can show a difference, one fewer cannot.
    least = list(range(check.LEAST_SEEDS))
    assert check.permutation_test(least, [100 + x for x in least]) < check.LIMIT
    assert check.permutation_test(least[1:], [100 + x for x in least[1:]]) > check.LIMIT


def test_many_ways_to_deal_are_drawn(check, monkeypatch):
    exact = check.permutation_test([1, 5, 2, 7, 3], [4, 9, 6, 8, 5])
    monkeypatch.setattr(check, "SHUFFLES", 200)
    drawn = check.permutation_test([1, 5, 2, 7, 3], [4, 9, 6, 8, 5])
    assert drawn == check.permutation_test([1, 5, 2, 7, 3], [4, 9, 6, 8, 5])
    assert drawn == pytest.approx(exact, abs=0.1)


def test_a_rise_that_unbroken_runs_have_too_is_no_fault(check):
    """What the check once took for a jump: the break lies where the policy learns fastest."""
    text, is_alike = check.table(seeds_of(check))
    assert is_alike and "differs" not in text and text.count("alike") == 2 * len(check.NAMES)


@pytest.mark.parametrize("shift, expected", [(50.0, False), (-50.0, False), (1.0, True)])
def test_a_step_that_they_do_not_have_is_one(check, shift, expected):
    text, is_alike = check.table(seeds_of(check, shift))
    assert is_alike is expected and ("differs" in text) is not expected


def test_a_difference_that_is_sure_but_small_is_none(check):
    """Rates are kept so exactly that their last digits would decide."""
    unbroken, resumed = [0.001 * x for x in range(5)], [0.1 + 0.001 * x for x in range(5)]
    assert check.permutation_test(unbroken, resumed) < check.LIMIT
    assert check.judge(unbroken, resumed, level=32.0).is_alike
    assert not check.judge(unbroken, resumed, level=1.0).is_alike


def test_sides_are_those_of_the_same_updates(check):
    curve = dict.fromkeys(check.NAMES, [(update, float(update)) for update in range(1, 41)])
    found = check.sides(20, 5, curve, curve)
    assert set(found.values()) == {(18.0, 23.0)}  # 16 to 20, 21 to 25
    with pytest.raises(check.CheckError, match="no val/return within 5 updates of update 40"):
        check.sides(40, 5, curve, curve)


def test_the_rate_is_that_between_two_lines(check, tmp_path):
    """A burst behind the break must show at once."""
    (tmp_path / "runs/version_0").mkdir(parents=True)
    lines = [
        "time/updates,time/env_steps,loss/critic,val/return",
        "8,100,1,",
        "16,108,2,",
        "16,108,,-7",
        "40,112,3,",
        ",,,",
    ]
    (tmp_path / "runs/version_0/metrics.csv").write_text("\n".join(lines) + "\n")
    found = check.curves(SimpleNamespace(folder=tmp_path))
    assert found["updates per step"] == [(16, 1.0), (40, 6.0)]
    assert found["val/return"] == [(16, -7.0)] and [x for _, x in found["loss/critic"]] == [1.0, 2.0, 3.0]


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments, word", [(["--seeds", "4"], "--seeds 4"), (["--folder", "."], "is not empty")])
def test_bad_input_is_told(check, arguments, word, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    with pytest.raises(SystemExit) as caught:
        check.parse_args(arguments)
    assert caught.value.code == 2 and word in capsys.readouterr().err


def test_what_the_user_gives_comes_last(check):
    arguments = check.parse_args(["--config", "pendulum", "--", "--data.batch_size", "16"])
    found = check.command(arguments, 3, "--ckpt_path", "x")
    assert found[-4:] == ["--data.batch_size", "16", "--ckpt_path", "x"]
    assert found[found.index("--seed_everything") + 1] == "3" and "--model.num_options" in found


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trainings(check, monkeypatch):
    """Real processes that stand in for the command: with a jump where there is no replay, and so a status."""

    def use(jump=0.0, status=143):
        code = TRAINING.replace("JUMP", str(jump)).replace("STATUS", str(status))

        def fork(folder, arguments, output, mark):
            process = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=folder, stdout=output[0],
                                       stderr=output[1])  # fmt: skip
            process.returncode = 0  # the check waits for it
            return process.pid

        monkeypatch.setattr(check, "fork_command", fork)
        monkeypatch.setattr(check, "import_command", lambda: None)

    return use


def test_runs_that_go_on_pass_and_are_written_down(check, trainings, tmp_path, capsys):
    trainings()
    arguments = ["--steps", "40", "--window", "10", "--seeds", "5", "--folder", str(tmp_path / "runs")]
    assert check.main([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert "pendulum: 5 seeds, broken off at updates 20-20" in out and "differs" not in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["updates"] == [20] * 5
    before, behind = found["before and behind"][0]["resumed"]["loss/critic"]
    assert (before, behind) == (pytest.approx(2.55), pytest.approx(3.55))


def test_a_check_that_was_ended_goes_on_with_the_seeds_that_are_missing(check, trainings, tmp_path, capsys):
    trainings()
    file = tmp_path / "found.json"
    arguments = ["--steps", "40", "--window", "10", "--json", str(file)]
    assert check.main([*arguments, "--seeds", "5"]) == 0
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, **{name: whole[name][:3] for name in ("updates", "before and behind")}}))
    capsys.readouterr()
    assert check.main([*arguments, "--seeds", "5"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["seed 3", "seed 4"]
    assert json.loads(file.read_text()) == whole
    assert check.main([*arguments, "--seeds", "5", "--", "--model.gamma", "0.9"]) == 1
    assert "holds seeds with other settings" in capsys.readouterr().err
    file.write_text("[]")
    assert check.main([*arguments, "--seeds", "5"]) == 1
    assert "holds no seeds of this check" in capsys.readouterr().err


def test_a_jump_without_the_replay_is_found(check, trainings, tmp_path, capsys):
    trainings(jump=5.0)
    assert check.main(["--steps", "40", "--window", "10", "--seeds", "5"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "differs" in line]
    assert len(lines) == 1 and lines[0].startswith("| loss/critic | without replay |")


def test_a_run_that_ends_otherwise_is_told_in_one_line(check, trainings, tmp_path, capsys):
    trainings(status=1)
    assert check.main(["--steps", "40", "--window", "10"]) == 1
    assert capsys.readouterr().err.startswith("resume_check: broken_off: exit status 1, expected 143: ")
