"""What must hold of the stand-in for Isaac Gym; run by ``test_isaac.py`` as a script, under any Python from 3.8 on.

usage: isaac_cases.py CONFIGS RESULTS: reads a JSON file of resolved configurations by name, runs each ``case_*`` in a
forked process of its own (one simulation per process) and writes a JSON file of case -> "" or what went wrong.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
import tempfile
import traceback
import types
from typing import Any, Callable

import numpy as np

if not hasattr(np, "float"):
    np.float = float  # noqa: NPY001  isaacgym's torch_utils evaluates it at import

import isaacgym  # isort: skip
import isaac_closed_form as form
import isaac_encoding as encoding
import torch

CONFIGS: dict[str, Any] = {}
MODULES = {
    "ShadowHand": "shadow_hand",
    "AllegroHand": "allegro_hand",
    "AllegroKukaReorientation": "allegro_kuka.allegro_kuka_reorientation",
    "AllegroKukaRegrasping": "allegro_kuka.allegro_kuka_regrasping",
    "AllegroKukaThrow": "allegro_kuka.allegro_kuka_throw",
    "AllegroKukaTwoArmsReorientation": "allegro_kuka.allegro_kuka_two_arms_reorientation",
    "AllegroKukaTwoArmsRegrasping": "allegro_kuka.allegro_kuka_two_arms_regrasping",
    "Encoded": "encoded",
}


def bypass_packages() -> None:
    """Lets task modules be imported without the packages' own ``__init__``, which want hydra and much more."""
    folder = os.path.dirname(os.path.dirname(os.path.abspath(isaacgym.__file__)))
    for name in ("isaacgymenvs", "isaacgymenvs.tasks", "bidexhands", "bidexhands.tasks"):
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split("."))]
        sys.modules[name] = module


def build(config: str, name: str = "", sim_device: str = "cpu:0", headless: bool = True, **env: Any) -> Any:
    """A task with four lanes, unless ``env`` says otherwise."""
    bypass_packages()
    cfg = copy.deepcopy(CONFIGS[config])
    cfg["env"]["numEnvs"] = 4
    cfg["env"].update(env)
    name = name or cfg["name"]
    if name.startswith("AllegroKuka"):
        add_needs()
    task = getattr(importlib.import_module("isaacgymenvs.tasks." + MODULES[name]), name)
    return task(cfg, "cpu", sim_device, -1, headless, False, True)


def build_over(headless: bool = True, **env: Any) -> Any:
    """ShadowHandOver of Bi-DexHands with four lanes."""
    bypass_packages()
    gymapi = importlib.import_module("isaacgym.gymapi")
    cfg = CONFIGS["ShadowHandOver"]
    cfg["env"].update(env)
    params = gymapi.SimParams()
    importlib.import_module("isaacgym.gymutil").parse_sim_config(cfg["sim"], params)
    task = importlib.import_module("bidexhands.tasks.shadow_hand_over").ShadowHandOver
    return task(cfg, params, gymapi.SIM_PHYSX, "cpu", 0, headless)


def raises(error: Any, function: Callable[[], Any], said: str = "") -> None:
    """The call must raise ``error``, with ``said`` in its message."""
    try:
        function()
    except error as caught:
        message = str(caught)
    else:
        raise AssertionError("no %s" % (error,))
    assert said in message, "%r does not say %r" % (message, said)


def exit_code_of(function: Callable[[], Any]) -> int:
    """Wait status of a forked process that calls it; an ordinary return gives 77 << 8."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except SystemExit as stop:
            os._exit(0 if stop.code is None else int(stop.code))
        except BaseException:
            os._exit(99)
        os._exit(77)
    return os.waitpid(child, 0)[1]


def printed(function: Callable[[], Any]) -> str:
    """What the call writes to the descriptor of stdout."""
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            function()
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
        file.seek(0)
        return file.read()


def steps(env: Any, count: int, action: Any = None) -> Any:
    """The last of ``count`` steps with the same action."""
    for _ in range(count):
        result = env.step(env.zero_actions() if action is None else action)
    return result


# --- the fourteen checks ---------------------------------------------------------------------------------------------


def case_01_a_second_sim_in_the_process_is_refused() -> None:
    """IsaacGymEnvs#145."""
    build("ShadowHand")
    raises(RuntimeError, lambda: build("ShadowHand"), "new process")
    raises(RuntimeError, lambda: build("AllegroHand"), "new process")


def case_02_a_viewer_is_refused() -> None:
    """Servers have no display."""
    raises(RuntimeError, lambda: build("ShadowHand", headless=False), "headless")


def case_02_a_captured_screen_needs_a_package() -> None:
    """Which no server has."""
    bypass_packages()
    cfg = copy.deepcopy(CONFIGS["ShadowHand"])
    task = importlib.import_module("isaacgymenvs.tasks.shadow_hand").ShadowHand
    raises(ModuleNotFoundError, lambda: task(cfg, "cpu", "cpu:0", -1, True, True, True), "pyvirtualdisplay")


def case_03_the_first_reset_gives_zeros_and_simulates_nothing() -> None:
    """Its observation is no observation."""
    env = build("ShadowHand", asymmetric_observations=True)
    first = env.reset()
    assert not first["obs"].any() and not first["states"].any()
    assert env.reset_buf.tolist() == [1] * 4, "reset flags must start at one"
    assert env.gym.get_frame_count(env.sim) == 0
    seen = steps(env, 1)[0]["obs"].clone()
    assert seen.any()
    assert torch.equal(env.reset()["obs"], seen), "reset() must not reset anything"


def case_04_ends_are_applied_one_step_late_and_the_action_to_the_new_episode() -> None:
    """The row after an end crosses the border."""
    env = build("Encoded")
    before = None
    borders = 0
    for index in range(60):
        action = torch.full((4, 20), (index % 7) / 10.0)
        obs, _, done, _ = env.step(action)
        now = encoding.decode(obs["obs"])
        done = done.numpy().copy()
        assert np.array_equal(now.is_last, done), "the observation that comes with the flag is the last of its episode"
        assert (obs["obs"][:, -20:] == action).all(), "the action of the border step must have been applied"
        if before is not None:
            was, ended = before
            assert np.array_equal(now.episode, was.episode + ended)
            assert np.array_equal(now.step, np.where(ended, 1, was.step + 1))
            borders += int(ended.sum())
        before = now, done
    assert borders > 20


def case_05_done_is_int64_and_reward_and_done_are_the_internal_buffers() -> None:
    """Who does not copy reads the next step's numbers."""
    env = build("Encoded")
    _, reward, done, _ = steps(env, 2)
    assert done.dtype == torch.int64 and reward.dtype == torch.float32 and reward.shape == done.shape == (4,)
    kept, flags = reward.clone(), done.clone()
    assert flags.any(), "lane 0 falls in its second step"
    _, again, flags_again, _ = steps(env, 1)
    assert again.data_ptr() == reward.data_ptr() and flags_again.data_ptr() == done.data_ptr()
    assert not torch.equal(kept, reward) and not torch.equal(flags, done)


def case_06_dictionaries_are_reused_and_observations_are_fresh() -> None:
    """A worker must take what it needs before the next step."""
    env = build("ShadowHand", asymmetric_observations=True)
    obs, _, _, extras = steps(env, 1)
    tensor, states, time_outs = obs["obs"], obs["states"], extras["time_outs"]
    kept = tensor.clone()
    obs_again, _, _, extras_again = steps(env, 1, torch.ones(4, 20))
    assert obs_again is obs and extras_again is extras and env.reset() is obs
    assert obs["obs"] is not tensor and obs["states"] is not states and extras["time_outs"] is not time_outs
    assert torch.equal(tensor, kept)


def case_07_states_only_when_asked_for() -> None:
    """And then in full, beside the smaller observation."""
    env = build("ShadowHand")
    assert env.num_states == 0 and list(env.reset()) == ["obs"] and list(steps(env, 1)[0]) == ["obs"]


def case_07_states_of_the_asymmetric_variant() -> None:
    """The sizes of ShadowHandOpenAI."""
    env = build("ShadowHandOpenAI_FF")
    obs = steps(env, 1)[0]
    assert obs["obs"].shape == (4, 42) and obs["states"].shape == (4, 211)
    assert env.state_space.shape == (211,) and env.num_states == 211


def case_08_time_outs_are_late_steps_that_end() -> None:
    """A fall in the last step is called a time-out."""
    env = build("Encoded")
    falls, outs, both = 0, 0, 0
    for _ in range(150):
        obs, _, done, extras = env.step(env.zero_actions())
        now = encoding.decode(obs["obs"])
        late = now.step == env.max_episode_length - 1
        fell = now.step == encoding.fall_step(now.lane, now.episode, env.period)
        assert extras["time_outs"].dtype == torch.bool
        assert np.array_equal(extras["time_outs"].numpy(), late)
        assert np.array_equal(done.numpy(), late | fell)
        falls, outs, both = falls + (fell & ~late).sum(), outs + (late & ~fell).sum(), both + (late & fell).sum()
    assert falls and outs and both


def case_08_enough_successes_are_no_time_out() -> None:
    """The step counter starts again with each success."""
    env = build("Encoded", maxConsecutiveSuccesses=2, period=0, goalPeriod=4)
    _, _, done, extras = steps(env, 8)
    assert done.tolist() == [1] * 4 and not extras["time_outs"].any() and env.progress_buf.tolist() == [0] * 4
    assert env.successes.tolist() == [2.0] * 4


def case_09_consecutive_successes_is_a_lagging_scalar() -> None:
    """A tensor without dimensions that starts at zero and moves by a tenth."""
    env = build("Encoded", period=0, goalPeriod=4)
    extras = steps(env, 1)[3]
    assert extras["consecutive_successes"].shape == () and float(extras["consecutive_successes"]) == 0.0
    extras = steps(env, 10)[3]  # 11 = the length less one: the episodes end, with successes in steps 4 and 8
    assert abs(float(extras["consecutive_successes"]) - 0.1 * 2.0) < 1e-6
    kept = float(extras["consecutive_successes"])
    assert float(steps(env, 1)[3]["consecutive_successes"]) == kept


def case_10_actions_are_clamped() -> None:
    """To +-1, also as the observation tells them."""
    env = build("ShadowHand")
    obs = steps(env, 1, torch.full((4, 20), 7.0))[0]["obs"]
    assert (obs[:, -20:] == 1.0).all()


def case_10_wrong_actions_are_refused() -> None:
    """Shape, kind, device."""
    env = build("ShadowHand")
    raises(RuntimeError, lambda: env.step(torch.zeros(4, 19)), "shape")
    raises(RuntimeError, lambda: env.step(torch.zeros(20)), "shape")
    raises(RuntimeError, lambda: env.step(torch.zeros(5, 20)), "shape")
    raises(RuntimeError, lambda: env.step(torch.zeros(4, 20, device="meta")), "device")
    raises(TypeError, lambda: env.step(np.zeros((4, 20), dtype=np.float32)), "torch tensor")
    raises(TypeError, lambda: env.step(torch.zeros(4, 20, dtype=torch.int64)), "floating")
    raises(RuntimeError, lambda: env.step(torch.zeros(4, 20, requires_grad=True)), "grad")


def case_11_a_goal_is_drawn_one_step_late() -> None:
    """Reward and next observation know the new goal, the observation does not."""
    env = build("ShadowHand", successSteps=1, successTolerance=10.0, episodeLength=50)
    obs, reward, _, _ = steps(env, 1)
    old = env.goal.clone()
    assert env.reset_goal_buf.tolist() == [1] * 4
    position, _, error = form.LAYOUTS[211]
    shown = obs["obs"][:, error : error + 4] + obs["obs"][:, position : position + 4]
    assert torch.allclose(shown, old, atol=1e-6), "the observation with the success still shows the old goal"
    obs, reward, _, _ = steps(env, 1)
    assert not torch.equal(env.goal, old)
    distance = obs["obs"][:, error : error + 4]
    expected = (1.0 / (1.0 + (distance / form.WIDTH) ** 2)).mean(dim=-1) + 1.0
    assert torch.allclose(reward, expected, atol=1e-5), "reward and next observation share the new goal"


def case_12_there_is_no_close() -> None:
    """Nor anything else that frees the sim."""
    env = build("ShadowHand")
    assert not hasattr(env, "close") and not hasattr(env, "seed") and not hasattr(env, "reset_goal")


def case_13_a_failed_set_up_quits_with_code_zero() -> None:
    """The parent sees a clean exit."""
    text = printed(lambda: _assert_equal(exit_code_of(lambda: build("ShadowHand", fault="quit")), 0))
    assert "*** No sim" in text


def case_13_gpu_physics_without_a_gpu_quits() -> None:
    """A configuration for the GPU, given to a machine without one."""
    if torch.cuda.is_available():
        return
    assert exit_code_of(lambda: build("ShadowHand_as_shipped", sim_device="cuda:0")) == 0
    assert exit_code_of(lambda: build("ShadowHand_as_shipped", sim_device="cpu:0")) == 0


def case_14_crashes_come_in_their_step() -> None:
    """By exit code and by signal."""
    assert exit_code_of(lambda: steps(build("ShadowHand", fault="exit=3"), 2)) == 77 << 8
    assert exit_code_of(lambda: steps(build("ShadowHand", fault="exit=3"), 3)) == 3 << 8
    assert os.WTERMSIG(exit_code_of(lambda: steps(build("ShadowHand", fault={"segv": 2}), 2))) == 11


def case_14_a_hang_lasts() -> None:
    """It sleeps, and never for a time that ends."""
    env = build("ShadowHand", fault={"hang": 2})
    vec_task = importlib.import_module("isaacgymenvs.tasks.base.vec_task")
    slept: list[float] = []

    class Woken(Exception):
        pass

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise Woken

    vec_task.time = types.SimpleNamespace(sleep=sleep)
    steps(env, 1)
    raises(Woken, lambda: steps(env, 1))
    assert min(slept) >= 3600


def case_14_numbers_go_bad() -> None:
    """Reward or observation of lane 0, from a step on."""
    env = build("ShadowHand", fault="nan_reward=2,nan_obs=3")
    assert not torch.isnan(steps(env, 1)[1]).any()
    obs, reward, _, _ = steps(env, 1)
    assert torch.isnan(reward).tolist() == [True, False, False, False] and not torch.isnan(obs["obs"]).any()
    obs = steps(env, 1)[0]["obs"]
    assert torch.isnan(obs[0]).all() and not torch.isnan(obs[1:]).any()


def case_14_stdout_is_noisy() -> None:
    """At set-up always, in each step on request."""
    made: list[Any] = []
    assert "Physics Engine" in printed(lambda: made.append(build("ShadowHand", fault="noise")))
    assert printed(lambda: steps(made[0], 3)).count("\n") == 3


def case_14_set_up_is_slow() -> None:
    """By as many seconds as asked for."""
    bypass_packages()
    vec_task = importlib.import_module("isaacgymenvs.tasks.base.vec_task")
    slept: list[float] = []
    vec_task.time = types.SimpleNamespace(sleep=slept.append)
    build("ShadowHand", fault="slow=45")
    assert slept == [45.0]


def case_14_faults_come_by_variable_and_are_checked() -> None:
    """The configuration has priority."""
    os.environ["CLAW_FAKE_ISAAC_FAULT"] = "nan_reward=1"
    assert build("ShadowHand").faults == {"nan_reward": 1.0}
    vec_task = importlib.import_module("isaacgymenvs.tasks.base.vec_task")
    assert vec_task.read_faults({"env": {"fault": {"hang": 2}}}) == {"hang": 2.0}
    raises(ValueError, lambda: vec_task.read_faults({"env": {"fault": "explode"}}), "explode")


# --- other statements of the contract --------------------------------------------------------------------------------


def case_reset_done_is_a_type_error() -> None:
    """Both hands take two arguments in their reset."""
    raises(TypeError, build("ShadowHand").reset_done)


def case_sizes_and_spaces_of_shadow_hand() -> None:
    """Each type of observation."""
    env = build("ShadowHand")
    assert (env.num_envs, env.num_obs, env.num_states, env.num_acts) == (4, 211, 0, 20)
    assert env.max_episode_length == 600 and env.control_freq_inv == 1
    space, actions = env.observation_space, env.action_space
    assert space.shape == (211,) and space.dtype == np.float32 and np.isinf(space.low).all()
    assert actions.shape == (20,) and (actions.low == -1).all() and (actions.high == 1).all()
    assert env.zero_actions().shape == (4, 20)
    assert env.get_env_state() is None and env.set_env_state(None) is None
    env.set_train_info(1234)
    assert env.total_train_env_frames == 1234


def sizes(config: str, name: str, obs: int, states: int, actions: int, length: int, **env: Any) -> None:
    """Sizes of a task, and a few steps of it."""
    task = build(config, name, **env)
    seen = steps(task, 3, torch.full((4, actions), 0.1))[0]
    found = task.num_obs, task.num_states, task.num_acts, task.max_episode_length
    assert found == (obs, states, actions, length), found
    assert seen["obs"].shape == (4, obs) and torch.isfinite(seen["obs"]).all()


def case_sizes_of_full() -> None:
    """157."""
    sizes("ShadowHand", "ShadowHand", 157, 0, 20, 600, observationType="full")


def case_sizes_of_full_no_vel() -> None:
    """77."""
    sizes("ShadowHand", "ShadowHand", 77, 211, 20, 600, observationType="full_no_vel", asymmetric_observations=True)


def case_sizes_of_openai() -> None:
    """Eight seconds at 20 Hz."""
    sizes("ShadowHandOpenAI_FF", "ShadowHand", 42, 211, 20, 160)


def case_sizes_of_allegro_hand() -> None:
    """30 Hz: two frames a step."""
    sizes("AllegroHand", "AllegroHand", 88, 0, 16, 600)
    bypass_packages()
    vec_task = importlib.import_module("isaacgymenvs.tasks.base.vec_task")
    assert vec_task is not None


def case_sizes_of_kuka_reorientation() -> None:
    """States always."""
    sizes("AllegroKuka", "AllegroKukaReorientation", 117, 117, 23, 600)


def case_sizes_of_kuka_regrasping() -> None:
    """300 steps."""
    sizes("AllegroKuka_regrasping", "AllegroKukaRegrasping", 99, 99, 23, 300)


def case_sizes_of_kuka_throw() -> None:
    """300 steps."""
    sizes("AllegroKuka_throw", "AllegroKukaThrow", 99, 99, 23, 300)


def case_sizes_of_two_arms() -> None:
    """46 actions."""
    sizes("AllegroKukaTwoArms", "AllegroKukaTwoArmsReorientation", 196, 196, 46, 600)


def case_sizes_of_two_arms_regrasping() -> None:
    """46 actions, fewer keypoints."""
    sizes("AllegroKukaTwoArms_regrasping", "AllegroKukaTwoArmsRegrasping", 169, 169, 46, 300)


def case_kuka_needs_a_numbered_device() -> None:
    """A bare "cpu" is an IndexError there, and there only."""
    for device in ("cpu", "cuda"):
        raises(IndexError, lambda device=device: build("AllegroKuka", "AllegroKukaReorientation", sim_device=device))
    build("ShadowHand", sim_device="cpu")


def case_kuka_tells_reward_progress_and_metrics() -> None:
    """Observations include the reward; the curriculum can be kept."""
    env = build("AllegroKuka", "AllegroKukaReorientation")
    obs, reward, _, extras = steps(env, 2)
    assert torch.allclose(obs["obs"][:, -1], 0.01 * reward)
    assert torch.allclose(obs["obs"][:, -2], torch.log(env.progress_buf / 10.0 + 1.0))
    assert extras["successes"].shape == extras["true_objective"].shape == (4,)
    assert {"rewards_episode", "episode_cumulative", "scalars"} <= set(extras)
    assert env.get_env_state() == {"success_tolerance": 0.075}
    env.set_env_state({"success_tolerance": 0.02})
    assert env.success_tolerance == 0.02


def case_noise_of_the_openai_variant() -> None:
    """Randomisation is on there: the same action is not applied the same."""
    env = build("ShadowHandOpenAI_FF")
    obs = steps(env, 1)[0]["obs"]
    assert obs[:, -20:].std() > 0.0
    assert env.gym.get_frame_count(env.sim) == 3, "20 Hz: three frames a step"


def case_bidexhands_has_no_time_outs_and_returns_nothing() -> None:
    """Its buffers are all there is; metrics are per lane."""
    env = build_over(episodeLength=5, asymmetric_observations=True)
    assert (env.num_obs, env.num_states, env.num_actions) == (398, 211, 40)
    actions = torch.zeros(4, 40)
    for index in range(5):
        assert env.reset_buf.any() == (index == 0)
        assert env.step(actions) is None
    assert env.reset_buf.tolist() == [1] * 4 and env.progress_buf.tolist() == [5] * 4, "a step later than elsewhere"
    assert "time_outs" not in env.extras and env.extras["successes"].shape == (4,)
    before = env.obs_buf.clone()
    env.step(actions)
    assert env.progress_buf.tolist() == [1] * 4 and not torch.equal(before, env.obs_buf)


def case_bidexhands_refuses_the_same() -> None:
    """A viewer, a second sim, wrong actions; and its package needs more than its tasks."""
    raises(RuntimeError, lambda: build_over(headless=False), "headless")
    raises(RuntimeError, build_over, "new process")
    base = importlib.import_module("bidexhands.tasks.hand_base.base_task")
    base.EXISTING_SIM = None
    env = build_over()
    raises(RuntimeError, lambda: env.step(torch.zeros(4, 20)), "shape")
    for name in [name for name in sys.modules if name.startswith("bidexhands")]:
        del sys.modules[name]
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    raises(ImportError, lambda: importlib.import_module("bidexhands.tasks.shadow_hand_over"), "matplotlib")


def case_unresolved_settings_are_refused() -> None:
    """Text where native code wants a number."""
    bypass_packages()
    for key, value in (("num_threads", "${....num_threads}"), ("use_gpu", "False"), ("no_such", 1)):
        CONFIGS["ShadowHand"]["sim"]["physx"] = {key: value}
        raises((TypeError, AttributeError), lambda: build("ShadowHand"))
    CONFIGS["ShadowHand"]["sim"]["physx"] = {}
    raises(TypeError, lambda: build("ShadowHand", numEnvs="${...num_envs}"))


def case_settings_that_the_real_task_reads_are_required() -> None:
    """Without defaults of the stand-in's own."""
    for key in ("rotEps", "printNumSuccesses", "asymmetric_observations"):
        kept = CONFIGS["ShadowHand"]["env"].pop(key)
        raises(KeyError, lambda: build("ShadowHand"), key)
        CONFIGS["ShadowHand"]["env"][key] = kept


def case_seeds_are_the_callers_business() -> None:
    """The package's set_seed makes two runs equal."""
    bypass_packages()
    utils = importlib.import_module("isaacgymenvs.utils.utils")
    env = build("ShadowHand")
    steps(env, 1)  # the very first draws goals twice

    def run(seed: int) -> torch.Tensor:
        utils.set_seed(seed)
        env.reset_buf[:] = 1
        return steps(env, 2)[0]["obs"].clone()

    assert torch.equal(run(5), run(5)) and not torch.equal(run(5), run(6))


def case_encoded_rows_tell_what_is_wrong() -> None:
    """The rule for rows accepts the right ones, and refuses each way to take the wrong ones."""
    env = build("Encoded")
    before = env.step(env.zero_actions())
    obs = before[0]["obs"].clone()
    done = before[2].clone()
    rows: list[Any] = []
    borders: list[Any] = []
    for _ in range(80):
        action = torch.rand(4, 20) * 2 - 1
        seen, reward, flag, extras = env.step(action)
        out = extras["time_outs"]
        kept = [obs, action, reward.clone(), seen["obs"], (flag > 0) & ~out, out]
        for lane in range(4):
            (borders if done[lane] else rows).append([part[lane].numpy().copy() for part in kept])
        obs, done = seen["obs"], flag.clone()
        assert np.array_equal(encoding.decode(seen["states"], encoding.STATES_MARK), encoding.decode(seen["obs"]))
        raises(ValueError, lambda seen=seen: encoding.decode(seen["states"]), "mixed up")
    good = [np.stack(column) for column in zip(*rows)]

    def faults(columns: list[Any]) -> list[str]:
        return encoding.row_faults(*columns, episode_length=env.max_episode_length, period=env.period)

    assert faults(good) == []
    text = " ".join(faults([np.stack(column) for column in zip(*borders)]))
    assert "crosses" in text and "from after the end" in text
    for column, said in ((1, "action"), (2, "reward"), (4, "terminated"), (5, "truncated")):
        bad = list(good)
        bad[column] = ~bad[column] if column > 3 else np.roll(bad[column], 4, axis=0)
        assert said in " ".join(faults(bad)), said
    bad = list(good)
    bad[3] = good[0]  # next_obs overwritten, as with a buffer that is used again
    assert "do not follow" in " ".join(faults(bad))


def returns(env: Any, policy: Callable[[Any], Any], count: int) -> np.ndarray:
    """Returns of episodes, counted as a learner must: without the border rows."""
    finished: list[float] = []
    total, border = torch.zeros(env.num_envs), torch.ones(env.num_envs, dtype=torch.bool)
    action = env.zero_actions()
    for _ in range(count):
        obs, reward, done, _ = env.step(action)
        total = torch.where(border, torch.zeros_like(total), total + reward)
        finished += total[(done > 0) & ~border].tolist()
        border = done > 0
        action = torch.as_tensor(policy(obs))
    return np.array(finished)


def case_the_closed_form_is_reached_and_chance_is_far_from_it() -> None:
    """The policy in closed form comes within two per cent; none that knows less comes near."""
    torch.manual_seed(0)
    env = build("ShadowHand", numEnvs=64, episodeLength=100)
    best = form.optimal_return(env.cfg)
    reached = returns(env, lambda obs: form.optimal_action(obs["obs"], 20), 300).mean()
    assert 0.98 * best < reached < 1.005 * best, (reached, best)
    env.reset_buf[:] = 1
    idle = returns(env, lambda obs: env.zero_actions(), 300).mean()
    env.reset_buf[:] = 1
    chance = returns(env, lambda obs: 2 * torch.rand(64, 20) - 1, 300).mean()
    assert idle < 0.6 * best and chance < 0.4 * best, (idle, chance, best)


def case_the_small_observation_is_enough_too() -> None:
    """The 42 numbers of the asymmetric variant hold what the policy needs."""
    torch.manual_seed(0)
    env = build("ShadowHand", numEnvs=64, episodeLength=100, observationType="openai", asymmetric_observations=True)
    best = form.optimal_return(env.cfg)
    assert returns(env, lambda obs: form.optimal_action(obs["obs"], 20), 200).mean() > 0.98 * best
    assert returns(env, lambda obs: form.optimal_action(obs["states"], 20), 200).mean() > 0.98 * best


# --- through the package and its make --------------------------------------------------------------------------------


def add_needs() -> None:
    """hydra, rl_games and the like, where the real ones are missing."""
    sys.path.append(os.environ["ISAAC_NEEDS"])


def case_the_package_needs_hydra() -> None:
    """Importing it, or anything in it, without."""
    try:
        import hydra  # noqa: F401
    except ImportError:
        raises(ModuleNotFoundError, lambda: importlib.import_module("isaacgymenvs"), "hydra")
        sys.modules.pop("isaacgymenvs", None)
        raises(ModuleNotFoundError, lambda: importlib.import_module("isaacgymenvs.tasks.shadow_hand"), "hydra")


def case_make_needs_rl_games_and_the_packages_of_every_task() -> None:
    """Though ShadowHand needs neither."""
    add_needs()
    package = importlib.import_module("isaacgymenvs")
    cfg = types.SimpleNamespace(task=CONFIGS["ShadowHand"])
    for name in ("pysdf", "rl_games"):
        sys.modules[name] = None  # type: ignore[assignment]
        raises(ImportError, lambda: package.make(0, "ShadowHand", 4, "cpu:0", "cpu", -1, True, cfg=cfg), name)
        del sys.modules[name]


def case_the_package_cannot_be_run_twice() -> None:
    """Its resolvers are registered already."""
    add_needs()
    importlib.import_module("isaacgymenvs")
    del sys.modules["isaacgymenvs"]
    raises(ValueError, lambda: importlib.import_module("isaacgymenvs"), "already registered")


def case_make_takes_a_configuration_as_it_is() -> None:
    """num_envs counts only without one; the class is found by the configuration's own name."""
    add_needs()
    package = importlib.import_module("isaacgymenvs")
    CONFIGS["ShadowHandOpenAI_FF"]["env"]["numEnvs"] = 3
    cfg = types.SimpleNamespace(task=CONFIGS["ShadowHandOpenAI_FF"])
    env = package.make(0, "any", 7, "cpu:0", "cpu", -1, True, False, False, True, cfg)
    assert env.num_envs == 3 and type(env).__name__ == "ShadowHand" and env.num_obs == 42
    raises(RuntimeError, lambda: package.make(0, "any", 7, "cpu:0", "cpu", headless=True, cfg=cfg), "new process")


def case_make_resolves_the_subtask_of_kuka() -> None:
    """By the configuration."""
    add_needs()
    package = importlib.import_module("isaacgymenvs")
    CONFIGS["AllegroKuka_throw"]["env"]["numEnvs"] = 2
    cfg = types.SimpleNamespace(task=CONFIGS["AllegroKuka_throw"])
    env = package.make(0, "AllegroKuka", 2, "cpu:0", "cpu", headless=True, cfg=cfg)
    assert type(env).__name__ == "AllegroKukaThrow"


def case_make_with_several_gpus_ignores_the_given_devices() -> None:
    """Both become the GPU of LOCAL_RANK, which is not there."""
    if torch.cuda.is_available():
        return
    add_needs()
    package = importlib.import_module("isaacgymenvs")
    os.environ["LOCAL_RANK"] = "1"
    CONFIGS["ShadowHand"]["sim"]["use_gpu_pipeline"] = True
    cfg = types.SimpleNamespace(task=CONFIGS["ShadowHand"])

    def make() -> None:
        package.make(0, "any", 4, "cpu:0", "cpu", headless=True, multi_gpu=True, cfg=cfg)

    assert exit_code_of(make) == 0


def case_make_without_a_configuration_keeps_the_gpu_of_the_files() -> None:
    """Whatever ``sim_device`` says, GPU physics stay on; with a GPU the rest is corrected at run time."""
    if torch.cuda.is_available() or sys.version_info < (3, 9):  # the stand-in for omegaconf reads no files
        return
    add_needs()
    package = importlib.import_module("isaacgymenvs")
    assert exit_code_of(lambda: package.make(0, "ShadowHand", 4, "cpu:0", "cpu", headless=True)) == 0
    os.environ["CLAW_FAKE_ISAAC_GPU"] = "1"
    env = package.make(0, "ShadowHand", 5, "cpu:0", "cpu", headless=True)
    assert env.num_envs == 5 and env.device == "cpu" and not env.cfg["sim"]["use_gpu_pipeline"]
    assert env.sim_params.physx.use_gpu


def case_bindings_check_contiguity() -> None:
    """As the real bridge does."""
    gymtorch = importlib.import_module("isaacgym.gymtorch")
    raises(RuntimeError, lambda: gymtorch.unwrap_tensor(torch.zeros(4, 3).t()), "contiguous")
    assert gymtorch.wrap_tensor(np.zeros(3)).shape == (3,)


def _assert_equal(found: Any, expected: Any) -> None:
    assert found == expected, found


def run_forked(name: str, folder: str) -> str:
    """ "" or the traceback of a case that ran in a process of its own."""
    path = os.path.join(folder, name)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            globals()[name]()
            code = 0
        except BaseException:
            with open(path, "w") as file:
                file.write(traceback.format_exc())
        finally:
            sys.stdout.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.path.exists(path):
        with open(path) as file:
            return file.read()
    return "" if status == 0 else "wait status %d" % status


def main() -> None:
    """Runs all cases."""
    with open(sys.argv[1]) as file:
        CONFIGS.update(json.load(file))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: run_forked(name, folder) for name in sorted(globals()) if name.startswith("case_")}
    with open(sys.argv[2], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
