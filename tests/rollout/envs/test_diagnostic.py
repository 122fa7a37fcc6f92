"""Simulators that test the package: what the coded one proves, and what the faulty one does, and when."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout.envs import EnvError, make_env
from claw_lightning.rollout.envs.diagnostic import (
    ACTION,
    EPISODE,
    FAULTS,
    LANE,
    PROCESS,
    SEED,
    STEP,
    CodedEnv,
    FaultyEnv,
    check_rows,
)
from tests.builders import collector_of

ROOT = Path(__file__).resolve().parents[3]
MODES = ("next_step", "same_step")
FAULTLESS = ("torn", "cross_episode", "wrong_step", "wrong_reward", "wrong_action", "wrong_end")
CODED = {"adapter": "CodedEnv", "adapter_args": {"min_length": 3, "max_length": 9}}


def sampled(collector, size=2000, length=1):
    """Arguments of check_rows: a sample of what a collector has written."""
    batch = ReplayMemory([collector.ring], 0).sample(1, size, length)
    found = (batch.obs, batch.next_obs, batch.reward, batch.terminated, batch.truncated, batch.action)
    return [array.numpy() for array in found] + [None if batch.valid is None else batch.valid.numpy()]


def coded_sample(mode="next_step", num_steps=60, **sample):
    collector, _, _ = collector_of(CodedEnv(num_envs=4, seed=5, max_length=6, autoreset=mode))
    for _ in range(num_steps):
        collector.step()
    return sampled(collector, **sample)


# -- coded rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 4])
def test_what_a_collector_writes_is_whole(mode, length):
    arrays = coded_sample(mode, length=length)
    counts = check_rows(*arrays)
    assert counts["rows"] == (2000 if length == 1 else arrays[-1].sum())
    assert {name: counts[name] for name in (*FAULTLESS, "without_final")} == dict.fromkeys(
        (*FAULTLESS, "without_final"), 0
    )
    terminated, truncated = arrays[3], arrays[4]
    assert terminated.any() and truncated.any() and not (terminated & truncated).any()


def test_a_run_longer_than_the_ring_is_whole_too():
    assert not any(check_rows(*coded_sample(num_steps=500))[name] for name in FAULTLESS)


@pytest.mark.parametrize("word", range(16))
def test_any_changed_word_is_seen(word):
    obs, *rest = coded_sample(size=100)
    obs[..., word] += 1.0
    counts = check_rows(obs, *rest)
    assert counts["torn"] == 100


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 0.5])
def test_numbers_that_no_row_holds_are_seen(value):
    obs, *rest = coded_sample(size=50)
    obs[..., STEP] = value
    assert check_rows(obs, *rest)["torn"] == 50


@pytest.mark.parametrize("cut", [1, 8, 15])
def test_two_halves_of_different_rows_are_seen(cut):
    obs, *rest = coded_sample(size=200)
    other = np.roll(obs, 1, axis=1)  # [1, B, O]
    mixed = np.concatenate([obs[..., :cut], other[..., cut:]], axis=-1)
    torn = (mixed != obs).any(axis=-1) & (mixed != other).any(axis=-1)
    assert check_rows(mixed, *rest)["torn"] == torn.sum() > 100


def test_whole_rows_that_do_not_follow_each_other_are_seen():
    obs, next_obs, reward, terminated, truncated, action, _ = coded_sample(size=300)
    shuffled = np.roll(next_obs, 1, axis=1)
    counts = check_rows(obs, shuffled, reward, terminated, truncated, action)
    assert counts["torn"] == 0
    assert counts["cross_episode"] + counts["wrong_step"] + counts["without_final"] > 200
    assert check_rows(obs, obs, reward, terminated, truncated)["wrong_step"] == 300


def test_rewards_actions_and_ends_are_judged():
    obs, next_obs, reward, terminated, truncated, action, _ = coded_sample(size=300)
    counts = check_rows(obs, next_obs, reward + 1 / 4096, ~terminated, truncated, action + 0.25)
    assert counts["wrong_reward"] == counts["wrong_end"] == counts["wrong_action"] == 300
    assert check_rows(obs, next_obs, reward, truncated, terminated)["wrong_end"] == (terminated | truncated).sum()


def test_a_worker_that_was_replaced_leaves_terminated_rows_without_a_final_observation():
    env = CodedEnv(num_envs=1, min_length=1, max_length=1)
    while True:  # the first episode ends by termination
        obs = env.reset()
        result = env.step(np.zeros((1, 2), np.float32))
        if result.terminated[0]:
            break
    opened = env.reset()
    counts = check_rows(obs, opened, result.reward, result.terminated, result.truncated)
    assert counts["without_final"] == 1 and counts["cross_episode"] == 0
    counts = check_rows(obs, opened, result.reward, ~result.terminated, result.truncated)
    assert counts["without_final"] == 0 and counts["cross_episode"] == 1


def test_lanes_workers_and_processes_differ():
    code = (
        "from claw_lightning.rollout.envs.diagnostic import CodedEnv\n"
        "print(CodedEnv(num_envs=2, seed=7).reset().tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    other, mine = np.array(json.loads(run.stdout)), CodedEnv(num_envs=2, seed=7).reset()
    assert (other[:, PROCESS] != mine[:, PROCESS]).all() and (other[:, SEED] == mine[:, SEED]).all()
    assert mine[:, LANE].tolist() == [0, 1]
    assert (CodedEnv(num_envs=2, seed=7, mark_process=False).reset()[:, PROCESS] == 0).all()
    assert (CodedEnv(num_envs=2, seed=8).reset()[:, SEED] != mine[:, SEED]).all()


def test_each_reset_opens_another_episode():
    env = CodedEnv(num_envs=3)
    assert env.reset(4)[:, EPISODE].tolist() == [0.0] * 3
    assert env.reset(4)[:, EPISODE].tolist() == [1.0] * 3


def test_the_action_that_led_here_is_part_of_the_row():
    env = CodedEnv(num_envs=2, min_length=5)
    env.reset()
    assert env.step(np.array([[0.1, 0.0], [-0.7, 0.0]], np.float32)).obs[:, ACTION].tolist() == [
        np.float32(0.1),
        np.float32(-0.7),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_arrays_belong_to_the_caller(mode):
    env = CodedEnv(num_envs=2, max_length=3, autoreset=mode)
    kept = [(env.reset(),) * 2]
    for _ in range(20):
        result = env.step(np.zeros((2, 2), np.float32))
        arrays = [x for x in result if isinstance(x, np.ndarray)]
        kept += [(array, array.copy()) for array in arrays]
    assert all((array == copy).all() for array, copy in kept)
    assert result.obs.dtype == result.reward.dtype == np.float32


@pytest.mark.parametrize(
    "settings, word",
    [
        ({"task": "other"}, "task"),
        ({"obs_size": 9}, "obs_size"),
        ({"action_size": 0}, "action_size"),
        ({"min_length": 0}, "min_length"),
        ({"min_length": 9, "max_length": 8}, "min_length"),
        ({"autoreset": "never"}, "autoreset"),
        ({"step_seconds": -1.0}, "step_seconds"),
        ({"compute_seconds": "long"}, "compute_seconds"),
    ],
)
def test_wrong_settings_of_coded_rows_are_named(settings, word):
    with pytest.raises(EnvError, match=word):
        CodedEnv(**settings)


def test_steps_take_as_long_as_they_are_told():
    env = CodedEnv(num_envs=1)
    env.reset()
    env.configure(step_seconds=0.05)
    started = time.monotonic()
    env.step(np.zeros((1, 2), np.float32))
    assert time.monotonic() - started >= 0.05
    with pytest.raises(EnvError, match="mass"):
        env.configure(mass=1.0)


# -- faults -----------------------------------------------------------------------------------------------------------


def faulty(num_envs=3, **settings):
    return FaultyEnv(num_envs=num_envs, **CODED, **settings)


def play(env, num_steps):
    action = np.zeros((env.num_envs, env.spec.action_size), np.float32)
    return [env.step(action) for _ in range(num_steps)]


def test_without_faults_it_is_the_wrapped_adapter():
    env, plain = faulty(seed=9), make_env("CodedEnv", CODED["adapter_args"], 3, 9)
    assert (env.spec, env.num_envs) == (plain.spec, 3)
    np.testing.assert_array_equal(env.reset(), plain.reset())
    for mine, other in zip(play(env, 20), play(plain, 20)):
        np.testing.assert_array_equal(mine.obs, other.obs)
        np.testing.assert_array_equal(mine.reward, other.reward)
    env.configure(step_seconds=0.01)
    assert env.env._step_seconds == 0.01 and env.states() is None
    with pytest.raises(EnvError, match="goal-conditioned"):
        env.compute_reward(np.zeros((1, 1)), np.zeros((1, 1)))
    env.close()


@pytest.mark.parametrize("kind, bad", [("nan_obs", np.isnan), ("inf_obs", np.isinf)])
def test_observations_that_are_not_finite(kind, bad):
    env = faulty(faults={kind: [2, 4]})
    env.reset()
    results = play(env, 5)
    assert [int(bad(result.obs).all(axis=1).sum()) for result in results] == [0, 1, 0, 1, 0]
    assert all(np.isfinite(result.reward).all() for result in results)


def test_rewards_resets_shapes_and_dtypes():
    env = faulty(faults={"nan_reward": [1], "wrong_shape": [2], "wrong_dtype": [3], "nan_reset": [2]})
    assert np.isfinite(env.reset()).all()
    first, second, third = play(env, 3)
    assert np.isnan(first.reward).sum() == 1
    assert second.obs.shape == (3, 15) and third.obs.dtype == np.float64
    assert np.isnan(env.reset()).all(axis=1).sum() == 1


def test_an_exception_is_raised_at_its_step():
    env = faulty(faults={"raise": [3]})
    env.reset()
    play(env, 2)
    with pytest.raises(RuntimeError, match="'raise' in step 3"):
        play(env, 1)
    with pytest.raises(SystemExit):
        faulty(faults={"quit": [0]})


def test_slow_steps():
    env = faulty(faults={"slow": [2]})
    env.configure(step_seconds=0.005)
    env.reset()
    times = []
    for _ in range(2):
        started = time.monotonic()
        play(env, 1)
        times.append(time.monotonic() - started)
    assert times[1] >= 0.05


def test_a_random_clock_gives_about_as_many_as_it_should():
    env = faulty(faults={"nan_reward": 0.02}, fault_seed=3)
    env.reset()
    found, started = 0, time.monotonic()
    while time.monotonic() - started < 0.6:
        found += int(np.isnan(play(env, 1)[0].reward).any())
        time.sleep(0.001)
    assert 5 <= found <= 60


def test_orders_are_carried_out_once_and_recorded(tmp_path):
    orders = tmp_path / "orders"
    orders.mkdir()
    env = faulty(orders=str(orders), record=str(tmp_path / "faults.jsonl"))
    env.reset()
    (orders / "nan_obs.1").touch()
    (orders / "nan_obs.2").touch()
    (orders / "README").touch()
    before = time.monotonic()
    results = play(env, 3)
    assert [np.isnan(result.obs).any() for result in results] == [True, False, False]
    assert [path.name for path in orders.iterdir()] == ["README"]
    entry = json.loads((tmp_path / "faults.jsonl").read_text().splitlines()[0])
    assert (entry["kind"], entry["pid"], entry["step"]) == ("nan_obs", os.getpid(), 1)
    assert before <= entry["time"] <= time.monotonic()
    (orders / "nan_reset").touch()
    assert np.isnan(env.reset()).any()


@pytest.mark.parametrize("kind", ["exit", "quit", "hang", "hang_gil", "print"])
def test_what_ends_or_blocks_a_process(kind, tmp_path):
    code = (
        "import sys, threading, time\n"
        "import numpy as np\n"
        "from claw_lightning.rollout.envs.diagnostic import FaultyEnv\n"
        "env = FaultyEnv(adapter='CodedEnv', faults={sys.argv[1]: [1]})\n"
        "env.reset()\n"
        "def count():\n"
        "    for i in range(10**6):\n"
        "        time.sleep(0.02); print('tick', file=sys.stderr, flush=True)\n"
        "threading.Thread(target=count, daemon=True).start()\n"
        "env.step(np.zeros((1, 2), np.float32))\n"
        "sys.exit(7)\n"
    )
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen([sys.executable, "-c", code, kind], cwd=ROOT, stdout=out, stderr=err)
    try:
        if kind.startswith("hang"):
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(3.0)
            ticks = (tmp_path / "err").read_text().count("tick")
            assert ticks < 5 if kind == "hang_gil" else ticks > 5
        else:
            assert process.wait(60.0) == {"exit": 3, "quit": 0, "print": 7}[kind]
    finally:
        process.kill()
        process.wait()
    assert ((tmp_path / "out").stat().st_size > 1 << 20) == (kind == "print")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"adapter": ""}, "init_args.adapter"),
        ({"adapter_args": {"no_such": 1}}, "no_such"),
        ({"faults": {"explode": 1.0}}, "no fault 'explode'.*nan_obs"),
        ({"faults": {"raise": 0}}, "faults.raise"),
        ({"faults": {"raise": True}}, "faults.raise"),
        ({"adapter": "NoSuchEnv"}, "NoSuchEnv"),
    ],
)
def test_wrong_settings_of_faults_are_named(settings, words):
    with pytest.raises(EnvError, match=words):
        FaultyEnv(**{**CODED, **settings})


def test_every_fault_is_documented():
    assert all("``%s``" % kind in FaultyEnv.__doc__ for kind in FAULTS)


def test_a_wrapped_adapter_imports_what_it_must_before_torch(monkeypatch):
    asked = []
    monkeypatch.setattr(CodedEnv, "import_first", classmethod(lambda cls, init_args: asked.append(init_args)))
    FaultyEnv.import_first({"adapter": "CodedEnv", "adapter_args": {"task": "coded"}, "at": {}})
    FaultyEnv.import_first({})
    assert asked == [{"task": "coded"}]


def test_a_coded_simulator_can_take_processor_time():
    env = CodedEnv(num_envs=4, compute_seconds=0.002)
    env.reset()
    started = time.thread_time()
    env.step(np.zeros((4, 2), np.float32))
    assert time.thread_time() - started >= 0.008
