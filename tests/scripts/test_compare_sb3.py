"""The comparison script: command line, order, tables and the autoreset shim; nothing is trained here."""

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from claw_lightning.rollout.envs.base import StepResult

ROOT = Path(__file__).resolve().parents[2]


def load_script(name="compare_sb3"):
    spec = importlib.util.spec_from_file_location(name.rpartition("/")[2], ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare = load_script()
play_actor = load_script("peers/serve").play_actor


# -- the command line -------------------------------------------------------------------------------------------------


def test_defaults():
    args = compare.parse_args([])
    assert args.arms == ["claw", "sb3"]
    assert args.seeds == [0, 1, 2]
    assert args.minutes == [3.0, 6.0]
    assert args.episodes == 50
    assert args.num_options == 1


def test_quick_is_one_mark_at_twenty_seconds():
    assert compare.parse_args(["--quick"]).minutes == [pytest.approx(1 / 3)]


def test_marks_are_sorted():
    assert compare.parse_args(["--minutes", "15", "6"]).minutes == [6.0, 15.0]


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--minutes", "3", "3"], "twice"),
        (["--minutes", "soon"], "soon"),
        (["--quick", "--minutes", "3"], "not both"),
        (["--seeds", "-1"], "--seeds"),
        (["--seeds", "1", "1"], "twice"),
        (["--seeds"], "--seeds"),
        (["--episodes", "0"], "--episodes"),
        (["--num-options", "0"], "--num-options"),
        (["--arms", "ppo"], "ppo"),
        (["--arm", "sb3"], "--out"),
        (["--json", "no/such/folder/x.json"], "x.json"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments, word, capsys):
    with pytest.raises(SystemExit) as caught:
        compare.parse_args(arguments)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("compare_sb3: error: ") and text.count("\n") == 1 and word in text


def test_missing_stable_baselines3_is_told_in_one_line(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        compare.importlib.util, "find_spec", lambda name: None if name == "stable_baselines3" else find_spec(name)
    )
    assert compare.main(["--arms", "sb3"]) == 1
    text = capsys.readouterr().err
    assert "make compare" in text and "pip install -e '.[compare]' -c constraints.txt" in text
    assert text.count("\n") == 1


def test_missing_config_is_told_in_one_line(capsys):
    assert compare.main(["--arms", "claw", "--config", "conf/none.yaml"]) == 1
    text = capsys.readouterr().err
    assert "conf/none.yaml" in text and text.count("\n") == 1


# -- order and commands -----------------------------------------------------------------------------------------------


def test_arms_take_turns():
    runs = compare.schedule(["claw", "sb3"], [0, 1, 2])
    assert runs == [("claw", 0), ("sb3", 0), ("sb3", 1), ("claw", 1), ("claw", 2), ("sb3", 2)]
    assert compare.schedule(["claw"], [5, 6]) == [("claw", 5), ("claw", 6)]


def test_command_of_the_product(tmp_path):
    command = compare.claw_command("conf/hand_reach_dense.yaml", 7, [3.0, 66.5], 4, tmp_path)
    assert Path(command[0]).name == "lightning" and command[1] == "fit"
    assert command[command.index("--model.num_options") + 1] == "4"
    assert command[command.index("--seed_everything") + 1] == "7"
    assert command[command.index("--trainer.max_time") + 1] == "00:01:06:30"
    assert command.index("--trainer.callbacks+=RunCheckpoint") < command.index(
        "--trainer.callbacks.at_minutes=[3.0, 66.5]"
    )


def test_command_of_the_other_arm_is_understood(tmp_path):
    args = compare.parse_args(["--quick", "--episodes", "7"])
    again = compare.parse_args(compare.sb3_command(args, 2, tmp_path / "x.json")[2:])
    assert (again.arm, again.seed, again.out) == ("sb3", 2, tmp_path / "x.json")
    assert (again.minutes, again.episodes) == (args.minutes, 7)


def test_recipe_makes_four_updates_per_vector_step():
    assert compare.GRADIENT_STEPS == 4


def test_shipped_configuration_has_the_recipe():
    path = ROOT / compare.RECIPE_CONFIG
    if not path.is_file():
        pytest.skip(f"no {compare.RECIPE_CONFIG}")
    config = yaml.safe_load(path.read_text())
    model, data = config["model"], config["data"]
    assert data["env"]["init_args"]["task"] == compare.TASK
    expected = [
        (data, "envs_per_worker", compare.LANES),
        (data, "samples_per_insert", compare.SAMPLES_PER_INSERT),
        (data, "batch_size", compare.BATCH_SIZE),
        (data, "capacity", compare.CAPACITY),
        (data, "warmup_steps", compare.WARMUP_STEPS),
        (model, "gamma", compare.GAMMA),
        (model, "hidden_sizes", list(compare.HIDDEN_SIZES)),
        (model, "policy_delay", compare.POLICY_DELAY),
        (model, "target_noise", compare.TARGET_NOISE),
        (model, "target_noise_clip", compare.TARGET_NOISE_CLIP),
        (model, "obs_clip", compare.OBS_CLIP),
        (model, "critic_lr", compare.LEARNING_RATE),
        (model, "actor_lr", compare.LEARNING_RATE),
    ]
    assert {key: section[key] for section, key, _ in expected if key in section} == {
        key: value for section, key, value in expected if key in section
    }


# -- child processes --------------------------------------------------------------------------------------------------


def test_failed_child_is_told_with_its_last_line(tmp_path):
    with pytest.raises(compare.CompareError, match="exit status 3: no hand"):
        compare.run_child([sys.executable, "-c", "print('hello\\nno hand'); raise SystemExit(3)"], tmp_path, 30.0)


def test_children_and_grandchildren_are_gone_after_an_exception(tmp_path):
    family = []

    def interrupted():
        with compare.child(["sh", "-c", "sleep 60 & sleep 60"], tmp_path, tmp_path / "log") as process:
            deadline = time.monotonic() + 10
            while len(family) < 2 and time.monotonic() < deadline:
                family[:] = psutil.Process(process.pid).children()
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(family) == 2
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_hung_child_is_killed(tmp_path):
    with pytest.raises(compare.CompareError, match="killed"):
        compare.run_child(["sleep", "60"], tmp_path, 0.2)


# -- results ----------------------------------------------------------------------------------------------------------


def record(arm, seed, minutes, ret, success=0.5, env_steps=1000, updates=4000):
    return {
        "arm": arm, "seed": seed, "minutes": minutes, "return": ret, "success": success,
        "env_steps": env_steps, "updates": updates,
    }  # fmt: skip


def test_table():
    records = [
        record("sb3 TD3", 0, 3.0, -2.0),
        record("claw K=1", 0, 3.0, -1.0, env_steps=12345, updates=49380),
        record("claw K=1", 1, 3.0, -3.0, success=1.0, env_steps=12347, updates=49380),
    ]
    assert compare.build_table(records).splitlines() == [
        "| seed | minutes | arm | return | success | env steps | updates |",
        "|---|---|---|---:|---:|---:|---:|",
        "| 0 | 3 | claw K=1 | -1.00 | 0.50 | 12,345 | 49,380 |",
        "| 0 | 3 | sb3 TD3 | -2.00 | 0.50 | 1,000 | 4,000 |",
        "| 1 | 3 | claw K=1 | -3.00 | 1.00 | 12,347 | 49,380 |",
        "| mean of 2 | 3 | claw K=1 | -2.00 | 0.75 | 12,346 | 49,380 |",
    ]


def test_minutes_are_short():
    assert [compare.format_minutes(m) for m in (3.0, 1 / 3, 7.5, 10.0)] == ["3", "0.33", "7.5", "10"]


def test_results_go_to_json_after_every_run(tmp_path, monkeypatch, capsys):
    target = tmp_path / "x.json"
    seen = []

    def run(args, seed, folder):
        seen.append(json.loads(target.read_text())["records"] if target.exists() else [])
        return [{"minutes": 3.0, "seconds": 180.0, "return": -1.0, "success": 0.0, "env_steps": 1, "updates": 2}]

    monkeypatch.setattr(compare, "run_claw", run)
    monkeypatch.setattr(compare, "run_sb3", run)
    monkeypatch.setattr(compare, "check_arms", lambda args: None)
    arguments = ["--seeds", "0", "--minutes", "3", "--json", str(target), "--folder", str(tmp_path / "f")]
    assert compare.main(arguments) == 0
    assert [len(records) for records in seen] == [0, 1]
    stored = json.loads(target.read_text())
    assert [r["arm"] for r in stored["records"]] == ["claw K=1", "sb3 TD3"]
    assert stored["settings"]["task"] == compare.TASK
    assert "| 0 | 3 | sb3 TD3 |" in capsys.readouterr().out
    assert [p.name for p in tmp_path.glob(".x.json*")] == []
    # Snapshots of an earlier call are never mistaken for new ones.
    assert compare.main(arguments) == 1
    assert "--folder" in capsys.readouterr().err


# -- autoreset --------------------------------------------------------------------------------------------------------


class Counter:
    """Two lanes that show their step number; next-step autoreset after ``lengths`` steps."""

    class spec:
        obs_size, action_size = 1, 2

    def __init__(self, lengths=(3, 3), terminates=False):
        self.num_envs, self.lengths, self.terminates = len(lengths), np.array(lengths), terminates
        self.reset()

    def reset(self, seed=None):
        self.t = np.zeros(self.num_envs, int)
        return self.t[:, None].astype(np.float32)

    def step(self, action):
        border = self.t == self.lengths
        self.t = np.where(border, 0, self.t + 1)
        ended = self.t == self.lengths
        no = np.zeros(self.num_envs, bool)
        return StepResult(
            obs=self.t[:, None].astype(np.float32),
            reward=np.where(border, 0, self.t).astype(np.float32),
            terminated=ended if self.terminates else no,
            truncated=ended,
            final_obs=None,
            has_final_obs=None,
            is_border=border,
            info={},
        )

    def close(self):
        pass


@pytest.mark.parametrize("terminates", [False, True])
def test_border_steps_are_hidden(terminates):
    stepper = compare.SameStepReset(Counter(terminates=terminates))
    for _ in range(2):
        for t in (1, 2):
            obs, reward, done, infos = stepper.step(np.zeros((2, 2), np.float32))
            assert obs.ravel().tolist() == [t, t] and not done.any() and infos == [{}, {}]
        obs, reward, done, infos = stepper.step(np.zeros((2, 2), np.float32))
        assert obs.ravel().tolist() == [0, 0] and done.all() and reward.tolist() == [3, 3]
        assert [info["terminal_observation"].tolist() for info in infos] == [[3], [3]]
        assert [info["TimeLimit.truncated"] for info in infos] == [not terminates] * 2


def test_lanes_that_end_apart_are_refused():
    stepper = compare.SameStepReset(Counter(lengths=(1, 2)))
    with pytest.raises(RuntimeError, match="1 of 2 lanes"):
        stepper.step(np.zeros((2, 2), np.float32))


def test_vec_env_of_stable_baselines3():
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.vec_env import VecNormalize

    env = VecNormalize(compare.make_vec_env(Counter()), norm_reward=False)
    assert env.num_envs == 2 and env.action_space.shape == (2,)
    env.reset()
    for _ in range(3):
        _, reward, done, infos = env.step(np.zeros((2, 2), np.float32))
    assert done.all() and reward.tolist() == [3, 3] and "terminal_observation" in infos[0]
    assert env.get_original_obs().ravel().tolist() == [0, 0]


def test_agent_of_the_other_arm_clips_normalised_observations():
    import torch

    agent = compare.Sb3Agent(torch.nn.Identity(), np.array([1.0]), np.array([4.0]), 0.0)
    decision = agent.act(np.array([[3.0], [100.0]], np.float32), np.array([True, False]))
    assert decision.action.ravel().tolist() == [1.0, 5.0] and decision.action.dtype == np.float32
    assert decision.option.tolist() == [0, 0]


def test_both_agents_of_other_packages_play_the_shared_evaluation():
    import torch

    def actor(x):
        return torch.zeros(len(x), 1)

    agent = compare.Sb3Agent(actor, np.zeros(3), np.ones(3), 1e-8)
    found = compare.play(agent, 2, "Pendulum-v1")
    assert found["episodes"] == 2 and found["return"] < -100.0
    assert play_actor(actor, "Pendulum-v1", 2) == found["return"]


def test_help_starts_without_the_other_library():
    script = ROOT / "scripts" / "compare_sb3.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--num-options" in done.stdout
