"""Isaac Gym's adapter on its stand-in: what it makes of a task's steps, and what it says where there is no task."""

import logging
import sys
import types

import numpy as np
import pytest
import torch

from claw_lightning.rollout.collector import evaluate
from claw_lightning.rollout.control import Control
from claw_lightning.rollout.device import HostSide
from claw_lightning.rollout.envs import isaacgym_config as configs
from claw_lightning.rollout.envs import isaacgym_setup as setup
from claw_lightning.rollout.envs.base import ContractError, EnvError, EnvSpec, StepResult, VectorEnv, make_env
from claw_lightning.rollout.envs.isaacgym import IsaacGymEnv
from claw_lightning.rollout.envs.packages import ASKED_DEVICE
from tests.builders import collector_of
from tests.rollout.envs.isaac import PACKAGE, is_ours, stand_in, without_torch

LANES = 6
#: Columns of the encoded task's observation.
LANE, EPISODE, STEP, TIME, GOALS, LAST = range(6)


@pytest.fixture
def isaac(monkeypatch):
    with stand_in(monkeypatch):
        yield


def build(task="Encoded", num_envs=LANES, **settings):
    settings.setdefault("overrides", {"+env.fault": {}})
    return make_env("IsaacGymEnv", dict(settings, task=task), num_envs, 3)


def act(env, value=0.0):
    return np.full((env.num_envs, env.spec.action_size), value, np.float32)


def play(env, steps):
    """Observation before, result and action of each step; results are copied, as an adapter's arrays may be reused."""
    obs, rows = env.reset(3).copy(), []
    for step in range(steps):
        action = act(env, (step % 10) / 10.0)
        result = env.step(action)
        result = StepResult(*[x.copy() if isinstance(x, np.ndarray) else x for x in result])
        rows.append((obs, action, result))
        obs = result.obs
    return rows


# -- steps ----------------------------------------------------------------------------------------------------------


def test_every_row_belongs_to_one_episode_or_is_a_border(isaac):
    borders = ends = 0
    for obs, action, result in play(build(reward_scale=1.0), 60):
        same = obs[:, EPISODE] == result.obs[:, EPISODE]
        assert (result.is_border == ~same).all()
        assert (result.obs[:, LANE] == np.arange(LANES)).all()
        assert (result.obs[same, STEP] == obs[same, STEP] + 1).all()
        assert (result.obs[~same, STEP] == 1).all()
        assert (result.reward[~same] == 0).all()
        code = (200 * result.obs[:, LANE] + result.obs[:, EPISODE]) * 1000 + result.obs[:, STEP]
        assert (result.reward[same] == code[same]).all()
        done = result.terminated | result.truncated
        assert (done == (result.obs[:, LAST] == 1) & same).all()  # the observation with the end is the true last one
        assert (result.states[:, :6] == result.obs[:, :6] + 0.5).all()
        assert np.allclose(result.obs[:, -20:], action)  # also in border rows: the action was applied
        borders, ends = borders + (~same).sum(), ends + done.sum()
    assert borders > 20 and ends > 20


def test_ends_are_falls_or_time_limits(isaac):
    found = set()
    for _, _, result in play(build(overrides={"env.episodeLength": 12}), 60):
        falls = result.obs[:, STEP] == 2 + (3 * result.obs[:, LANE] + result.obs[:, EPISODE]) % 14
        late = result.obs[:, STEP] >= 11
        assert (result.truncated == late & ~result.is_border).all()
        assert (result.terminated == falls & ~late & ~result.is_border).all()
        found |= {(bool(f), bool(t)) for f, t in zip(falls, late)}
    assert (True, True) in found  # a fall at the last step, which the simulator calls a time limit


def test_an_end_by_successes_is_no_time_limit(isaac):
    env = build(overrides={"env.maxConsecutiveSuccesses": 2, "env.goalPeriod": 3, "env.period": 999})
    rows = play(env, 30)
    assert env.spec.max_episode_steps == 24  # the clock restarts at each success
    assert not any(result.truncated.any() for _, _, result in rows)
    by_goals = [(result.info["success"], result.terminated & (result.obs[:, LAST] == 0)) for *_, result in rows]
    goals = np.concatenate([successes[ended] for successes, ended in by_goals])
    assert len(goals) and (goals == 2).all()  # the others have fallen


def test_the_first_observation_is_simulated(isaac):
    env = build()
    obs = env.reset(3)
    assert (obs[:, STEP] == 1).all() and (obs[:, EPISODE] == 0).all()
    env.step(act(env))
    assert (env.reset(3)[:, EPISODE] >= 1).all()  # all lanes, also in the midst of an episode
    assert (env.states()[:, LANE] == np.arange(LANES) + 0.5).all()


def test_rewards_are_scaled_and_none_of_the_simulators_buffers_is_handed_out(isaac):
    env = build(reward_scale=0.5)
    env.reset(3)
    inner = env.env
    inner.device = "cpu"  # as the simulator names its own device: nothing is copied on the way
    first = inner.step(torch.zeros(LANES, 20))
    kept = [first.reward.clone(), first.terminated.clone(), first.obs.clone(), first.info["success"].clone()]
    for _ in range(5):
        inner.step(torch.zeros(LANES, 20))
    for before, now in zip(kept, (first.reward, first.terminated, first.obs, first.info["success"])):
        assert torch.equal(before, now)
    assert first.reward[2] == 0.5 * (200 * 2 * 1000 + 2)


def test_scalars_are_read_seldom(isaac):
    env = build(scalars_every=10)
    env.reset(3)
    reads = []
    env.env._task.extras["scalars"] = {"watched": type("Watched", (), {
        "ndim": 0, "numel": lambda self: 1, "__float__": lambda self: float(reads.append(1) or 7.0)})()}  # fmt: skip
    for _ in range(20):
        result = env.step(act(env))
    assert len(reads) == 2 and (result.info["watched"] == 7.0).all()
    assert result.info["consecutive_successes"].shape == (LANES,)


def test_the_replay_gets_no_row_that_crosses_a_border(isaac):
    from claw_lightning.replay import ReplayMemory

    env = build(reward_scale=1.0)
    collector, ring, episodes = collector_of(env, 64)
    for _ in range(50):
        collector.step()
    batch = ReplayMemory([ring], 0).sample(1, 500)
    obs, following = batch.obs[0].numpy(), batch.next_obs[0].numpy()
    assert (obs[:, EPISODE] == following[:, EPISODE]).all() and (obs[:, STEP] + 1 == following[:, STEP]).all()
    rows, view = ring.rows[:50], ring.layout.view
    assert (view(rows, "states")[..., :6] == view(rows, "obs")[..., :6] + 0.5).all()
    assert episodes and all(np.isfinite(episode.success) for episode in episodes)


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "task, settings, sizes",
    [
        ("ShadowHand", {}, (211, 0, 20, 600, 60)),
        ("ShadowHand", {"env.observationType": "full"}, (157, 0, 20, 600, 60)),
        ("ShadowHand", {"env.observationType": "full_no_vel"}, (77, 0, 20, 600, 60)),
        ("ShadowHand", {"env.observationType": "openai", "env.asymmetric_observations": True}, (42, 211, 20, 600, 60)),
        ("ShadowHandOpenAI_FF", {}, (42, 211, 20, 160 * 50, 20)),
        ("ShadowHandOpenAI_LSTM", {"task.randomize": False}, (42, 211, 20, 160 * 50, 20)),
        ("AllegroHand", {"env.asymmetric_observations": True}, (88, 88, 16, 600, 30)),
        ("AllegroKuka", {}, (117, 117, 23, 600 * 50, 60)),
        ("AllegroKukaTwoArms", {}, (196, 196, 46, 600 * 50, 60)),
    ],
)
def test_sizes_of_the_hands(isaac, task, settings, sizes):
    spec = build(task, 3, overrides=settings).spec
    found = spec.obs_size, spec.states_size, spec.action_size, spec.max_episode_steps, round(spec.control_frequency)
    assert found == sizes and spec.goal_in_reward == "next_obs" and spec.autoreset == "next_step"
    assert spec.action_low == [-1.0] * spec.action_size


def test_the_curriculum_is_told_of_progress_and_can_be_set(isaac):
    env = build("AllegroKuka", 3, subtask="regrasping", overrides={"env.maxConsecutiveSuccesses": 0})
    env.reset()
    for _ in range(4):
        result = env.step(act(env))
    assert env.env._task.total_train_env_frames == 12 and env.spec.max_episode_steps == 300
    assert env.env.env_state() == {"success_tolerance": pytest.approx(0.075)}
    env.configure(success_tolerance=0.02)
    assert env.env.env_state() == {"success_tolerance": 0.02} and "success_tolerance" in result.info
    for bad, message in (({"tolerance": 1.0}, r"known: success_tolerance"), ({"success_tolerance": "x"}, "number")):
        with pytest.raises(EnvError, match=message):
            env.configure(**bad)


BIDEX = """
import torch
from isaacgym import gymapi


class ShadowHandOver:
    def __init__(self, cfg, sim_params, physics_engine, device_type, device_id, headless, is_multi_agent):
        assert headless and not is_multi_agent and physics_engine == gymapi.SIM_PHYSX and device_type == "cpu"
        assert sim_params.use_gpu_pipeline is False and sim_params.physx.num_position_iterations == 8
        self.num_envs, self.num_obs, self.num_states, self.num_actions = cfg["env"]["numEnvs"], 3, 2, 4
        self.max_episode_length, self.extras = cfg["env"]["episodeLength"], {"time_outs": None}
        n = self.num_envs
        self.obs_buf, self.states_buf = torch.zeros(n, 3), torch.zeros(n, 2)
        self.rew_buf, self.reset_buf = torch.zeros(n), torch.ones(n, dtype=torch.long)
        self.progress_buf, self.successes = torch.zeros(n, dtype=torch.long), torch.zeros(n)

    def step(self, actions):
        assert actions.abs().max() <= 1.0
        self.progress_buf[self.reset_buf == 1] = 0
        self.reset_buf[:] = 0
        self.progress_buf += 1
        self.obs_buf[:, 0] = self.progress_buf
        self.obs_buf[:, 1] = 100.0
        fell = (torch.arange(self.num_envs) == 0) & (self.progress_buf == self.max_episode_length - 1)
        self.reset_buf = (fell | (self.progress_buf >= self.max_episode_length)).long()
        self.rew_buf[:] = self.progress_buf
        self.extras = {"successes": self.successes, **EXTRAS}
"""


@pytest.mark.parametrize("extras", ["{}", "{'time_outs': torch.zeros(2, dtype=torch.bool)}"])
def test_bidexhands_time_limits_are_found_by_the_clock(monkeypatch, tmp_path, extras):
    for folder in ("tasks", "cfg"):
        (tmp_path / "bidexhands" / folder).mkdir(parents=True)
    (tmp_path / "bidexhands/tasks/shadow_hand_over.py").write_text(f"{BIDEX}\n\nEXTRAS = {extras}\n")
    settings = "env: {episodeLength: 5, numEnvs: 9}\nsim: {physx: {num_position_iterations: 8}}\n"
    (tmp_path / "bidexhands/cfg/ShadowHandOver.yaml").write_text(settings)
    with stand_in(monkeypatch):
        sys.modules["isaacgym.gymutil"] = types.ModuleType("isaacgym.gymutil")
        sys.modules["isaacgym.gymutil"].parse_sim_config = parse_sim_config
        import isaacgym

        isaacgym.gymutil = sys.modules["isaacgym.gymutil"]
        env = build("ShadowHandOver", 2, bidexhands_path=str(tmp_path), overrides={}, reward_scale=1.0)
        assert (env.spec.obs_size, env.spec.states_size, env.spec.action_size) == (3, 2, 4)
        found = []
        env.reset(0)
        for _ in range(12):
            result = env.step(act(env, 3.0))
            assert (result.obs[:, 1] == 5.0).all()
            found.append((result.terminated.copy(), result.truncated.copy(), result.is_border.copy()))
    terminated, truncated, border = (np.stack(each) for each in zip(*found))
    assert not truncated[:, 0].any() and not terminated[:, 1].any()
    assert np.flatnonzero(terminated[:, 0]).tolist() == [2, 6, 10]  # a fall one step before the time is over
    assert np.flatnonzero(border[:, 0]).tolist() == [3, 7, 11]
    assert np.flatnonzero(truncated[:, 1]).tolist() == [3, 8] and np.flatnonzero(border[:, 1]).tolist() == [4, 9]


def parse_sim_config(config, params):
    for name, value in config["physx"].items():
        setattr(params.physx, name, value)


# -- what cannot be built ---------------------------------------------------------------------------------------------


def refused(message, **settings):
    with pytest.raises(EnvError, match=message) as caught:
        build(**settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"task": "ShadowHnd"}, "has no task ShadowHnd here; did you mean ShadowHand"),
        ({"task": "AllegroHandADR"}, "dict of observations"),
        ({"isaacgymenvs_path": "/nowhere"}, "isaacgymenvs_path: /nowhere is not the folder"),
        ({"overrides": {"env.observationTyp": "full"}}, "did you mean env.observationType"),
        ({"task": "AllegroKuka", "subtask": "throwing"}, "no throwing; did you mean throw"),
        ({"pipeline": "tpu"}, "pipeline: must be gpu or cpu"),
        ({"pipeline": "gpu"}, "set data.worker_device to cuda"),
        ({"reward_scale": 0.0}, "reward_scale: must be a number above 0"),
        ({"scalars_every": 0}, "scalars_every: must be at least 1"),
        ({"num_envs": 0}, "data.envs_per_worker: must be at least 1"),
        ({"scalars_every": "a"}, "scalars_every: must be at least 1 and whole, not 'a'"),
        ({"num_threads": 1.5}, "num_threads: must be at least 1 and whole, not 1.5"),
        ({"reward_scale": True}, "reward_scale: must be a number above 0"),
        ({"gpu_memory": -1}, "gpu_memory: must be a number from 0"),
        ({"gpu_memory": "8"}, "gpu_memory: must be a number from 0"),
        ({"subtask": 3}, "subtask: must be a name"),
        ({"task": None}, "task: must be a name"),
        ({"isaacgymenvs_path": 3}, "isaacgymenvs_path: must be a folder"),
        ({"overrides": []}, "init_args.overrides: must hold settings"),
        ({"subtask": "regrasping", "overrides": {}}, "subtask: Encoded has no subtasks"),
        ({"overrides": {"env.episodeLength": 0}}, "overrides.env.episodeLength: must be a whole number from 3, not 0"),
        ({"overrides": {"sim.dt": 0}}, "overrides.sim.dt: must be a number of seconds above 0"),
        ({"overrides": {"sim.physx": None}}, "overrides.sim.physx: is a group of settings"),
        ({"nonsense": 1}, "data.env.init_args: .*nonsense"),
    ],
)
def test_bad_settings_are_one_sentence(isaac, settings, message):
    refused(message, **settings)


@pytest.mark.parametrize(
    "cuda, reason", [(None, "was built without CUDA"), ("11.7", r"\(CUDA 11.7\) sees no such GPU")]
)
def test_a_gpu_that_was_asked_for_is_not_replaced_by_the_cpu(isaac, monkeypatch, cuda, reason):
    monkeypatch.setattr(setup, "find_gpu", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv(ASKED_DEVICE, "cuda:0")
    refused(rf"^data.worker_device: cuda:0 for IsaacGymEnv, but .*{reason}.*data.worker_device: cpu$")
    monkeypatch.setenv(ASKED_DEVICE, "cpu")
    build()


@pytest.mark.parametrize("seed", ["x", 1.5, None])
def test_a_seed_is_a_whole_number(isaac, seed):
    with pytest.raises(EnvError, match="data.seed: must be a whole number"):
        IsaacGymEnv("Encoded", seed=seed)


def test_the_shortest_episodes_are_those_that_leave_a_row(isaac, monkeypatch):
    env = build(overrides={"env.episodeLength": configs.SHORTEST, "env.period": 999})
    assert not all(result.is_border.all() for *_, result in play(env, 12))
    monkeypatch.setattr(env.env._task, "max_episode_length", 2)  # what a resetTime makes of it
    with pytest.raises(EnvError, match="episodes of Encoded are 2 steps long, .* env.resetTime to give at least 3"):
        env.env._check_sizes()
    assert all(result.is_border.all() for *_, result in play(env, 12)[4:])


def test_a_second_environment_in_a_process_is_refused(isaac):
    build()
    refused("one process can hold one Isaac Gym environment")


def test_torch_first_is_refused():
    assert "isaacgym" not in sys.modules
    refused("torch was imported before Isaac Gym .*data.mode overlapped, not lockstep")


def test_isaac_gym_missing_names_the_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    with without_torch(), pytest.raises(EnvError, match=r"has no Isaac Gym; install it .*setup_isaacgym.sh"):
        setup.import_isaacgym()
    monkeypatch.setattr(sys, "version_info", (3, 11, 2))
    with without_torch(), pytest.raises(EnvError, match="runs under Python 3.8 at most, and the workers' interpreter"):
        setup.import_isaacgym()


@pytest.mark.parametrize(
    "raised, message",
    [
        ("ImportError('libpython3.8.so.1.0: cannot open shared object file')", "built without --enable-shared"),
        ("RuntimeError('No gym module found for the active version of Python (3.9)')", "no bindings for"),
        ("ImportError('PyTorch was imported before isaacgym modules')", "torch was imported before Isaac Gym"),
        ("OSError('libmem_filesys.so: no such file')", "cannot be imported in .*libmem_filesys"),
    ],
)
def test_isaac_gym_that_cannot_be_imported_says_why(tmp_path, monkeypatch, raised, message):
    (tmp_path / "isaacgym").mkdir()
    (tmp_path / "isaacgym/__init__.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with without_torch(), pytest.raises(EnvError, match=message):
        setup.import_isaacgym()
    assert not any(is_ours(name) for name in sys.modules)


def test_isaacgymenvs_missing_says_how_to_give_it(isaac, monkeypatch):
    monkeypatch.setattr(setup, "find_package", lambda name, given: None)
    refused("IsaacGymEnvs is not installed there; clone it, and give its folder as .*isaacgymenvs_path")


def test_a_dependency_of_the_task_that_is_missing_is_named(isaac, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    refused("allegro_kuka_reorientation cannot be imported .* -m pip install jinja2", task="AllegroKuka", overrides={})


def test_only_the_tasks_own_files_are_run(isaac):
    build()
    tasks = {name for name in sys.modules if name.startswith("isaacgymenvs.tasks.")}
    assert "isaacgymenvs.tasks.encoded" in tasks and "isaacgymenvs.tasks.allegro_hand" not in tasks
    assert getattr(sys.modules["isaacgymenvs"], "make", None) is None


@pytest.mark.parametrize(
    "error, compiler, message",
    [
        (RuntimeError("Ninja is required to load C++ extensions"), True, "ninja is missing; run .* install ninja"),
        (RuntimeError("Error building extension 'gymtorch'"), False, "no C\\+\\+ compiler"),
        (RuntimeError("gymtorch.cpp:1: fatal error: Python.h: No such file"), True, "python3.8-dev"),
        (RuntimeError("Error building\nextension"), True, "cannot be compiled: Error building extension"),
    ],
)  # fmt: skip
def test_a_bridge_that_cannot_be_compiled_says_what_is_missing(isaac, monkeypatch, error, compiler, message):
    def fail(name):
        raise error

    monkeypatch.setattr(setup, "importlib", types.SimpleNamespace(import_module=fail, util=setup.importlib.util))
    monkeypatch.setattr(setup, "has_compiler", lambda: compiler)
    refused(message)


def test_what_a_killed_build_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "new"))
    (tmp_path / "new/gymtorch").mkdir(parents=True)
    (tmp_path / "new/gymtorch/lock").touch()
    with setup.building_alone():
        assert not (tmp_path / "new/gymtorch/lock").exists()


def gpu(**changes):
    known = {"name": "Some GPU", "capability": (8, 6), "kernels": ["sm_70", "sm_80", "sm_86"], "free": 20 << 30,
             "total": 24 << 30}  # fmt: skip
    return setup.Gpu(**{**known, **changes})


@pytest.mark.parametrize(
    "capability, kernels, runs",
    [
        ((8, 6), ["sm_80"], True),
        ((8, 6), ["sm_70", "sm_90"], False),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((12, 0), ["sm_50", "sm_86"], False),
        ((12, 0), ["sm_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((3, 7), ["gfx906"], False),
    ],
)
def test_kernels_that_a_gpu_can_run(capability, kernels, runs):
    if runs:
        setup.check_gpu(gpu(capability=capability, kernels=kernels), 1)
        return
    with pytest.raises(EnvError, match=r"no kernels for Some GPU \(sm_\d+; it has .*data.worker_device"):
        setup.check_gpu(gpu(capability=capability, kernels=kernels), 1)


def test_too_little_free_memory_is_told_in_numbers(isaac, monkeypatch):
    monkeypatch.setattr(setup, "find_gpu", lambda: gpu(free=3 << 30))
    refused(r"3.0 GiB free of 24.0; 4096 environments need about 4.0, .*data.num_workers", num_envs=4096)
    setup.check_gpu(gpu(free=3 << 30), 4096, 0.0)
    with pytest.raises(EnvError, match="need about 8.0"):
        setup.check_gpu(gpu(free=3 << 30), 1, 8.0)


def test_a_hopper_gpu_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        setup.check_gpu(gpu(capability=(9, 0), kernels=["sm_90"]), 1)
    assert "Hopper" in caplog.text and "Using GPU PhysX" in caplog.text


def test_a_set_up_that_quits_is_told_with_what_it_printed(isaac, monkeypatch):
    monkeypatch.setattr(setup, "last_printed", lambda: "*** No sim")
    monkeypatch.setattr("builtins.quit", sys.exit, raising=False)
    with pytest.raises(
        RuntimeError, match=r"ended the process while it set up Encoded; it printed last: \*\*\* No sim"
    ):
        build(overrides={"+env.fault": "quit"})


def test_the_stand_in_is_where_it_is_looked_for(isaac):
    assert setup.find_package("isaacgymenvs") == str(PACKAGE)


# -- tensors behind the contract of arrays ----------------------------------------------------------------------------


class TensorEnv(VectorEnv):
    """Two lanes; observation [count, lane, reward] and what a test puts in place of a part."""

    device = "cpu"

    def __init__(self, num_envs=2, seed=0, task="tensors", **wrong):
        self.num_envs, self.wrong, self.count = num_envs, wrong, 0
        self.spec = EnvSpec(task, 3, 2, [-1.0] * 2, [1.0] * 2, 10, states_size=1)

    def _obs(self):
        return torch.tensor([[self.count, lane, 0.5] for lane in range(self.num_envs)], dtype=torch.float32)

    def states(self):
        return self._obs()[:, :1] + 100

    def reset(self, seed=None):
        self.count = 0
        return self._obs()

    def step(self, action):
        assert isinstance(action, torch.Tensor) and action.shape == (2, 2)
        self.count += 1
        parts = {
            "obs": self._obs(),
            "reward": torch.full((2,), float(self.count)),
            "terminated": torch.zeros(2, dtype=torch.bool),
            "truncated": torch.tensor([self.count == 4, False]),
            "is_border": torch.tensor([self.count == 5, False]),
            "info": {"success": torch.ones(2)},
            "states": self.states(),
        }
        return StepResult(final_obs=None, has_final_obs=None, **{**parts, **self.wrong})


def test_tensors_become_arrays_in_one_copy():
    env = HostSide(TensorEnv())
    assert env.reset().dtype == np.float32 and (env.states() == 100).all()
    before = None
    for count in range(1, 7):
        result = env.step(np.zeros((2, 2), np.float32))
        assert (result.obs == [[count, 0, 0.5], [count, 1, 0.5]]).all() and (result.reward == count).all()
        assert torch.equal(env.obs_on_device, torch.from_numpy(result.obs))
        assert result.truncated.tolist() == [count == 4, False] and result.is_border.tolist() == [count == 5, False]
        assert (result.states == 100 + count).all() and (result.info["success"] == 1).all()
        assert before is None or (before.obs[:, 0] == count - 1).all()  # the step before is still whole
        before = result


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"obs": torch.zeros(2, 4)}, "observation of shape"),
        ({"obs": np.zeros((2, 3))}, "observation as ndarray"),
        ({"reward": torch.zeros(2, dtype=torch.float64)}, "reward of shape"),
        ({"terminated": torch.zeros(2)}, "terminated of shape"),
        ({"states": None}, "states as NoneType"),
        ({"info": {"success": torch.ones(3)}}, "metric success"),
    ],
)
def test_tensors_that_break_the_contract_are_named(wrong, message):
    env = HostSide(TensorEnv(**wrong))
    env.reset()
    with pytest.raises(ContractError, match=message):
        env.step(np.zeros((2, 2), np.float32))


def test_the_policy_acts_on_the_tensor_where_it_is(monkeypatch):
    """And does the same as with arrays, to the bit."""
    found = []
    for has_tensors in (True, False):
        torch.manual_seed(0)
        collector, ring, _ = collector_of(HostSide(TensorEnv()), 32, policy={"num_options": 2})
        collector.agent.policy.exploration[1] = 0.0  # actions are the policy's, not uniform
        kinds, act = set(), collector.agent.act
        monkeypatch.setattr(
            collector.agent, "act", lambda obs, *more, k=kinds, a=act: k.add(type(obs)) or a(obs, *more)
        )
        if not has_tensors:
            monkeypatch.setattr("claw_lightning.rollout.collector.seen", lambda env, obs: obs)
        for _ in range(20):
            collector.step()
        assert kinds == {torch.Tensor if has_tensors else np.ndarray}
        found.append(ring.rows[:20].tobytes())
    assert found[0] == found[1]


def test_evaluation_acts_on_the_tensor_too(monkeypatch):
    env, kinds = HostSide(TensorEnv()), set()
    agent = collector_of(env)[0].agent
    act = agent.act
    monkeypatch.setattr(agent, "act", lambda obs, *more: kinds.add(type(obs)) or act(obs, *more))
    env.env.wrong = {"terminated": torch.ones(2, dtype=torch.bool), "is_border": torch.zeros(2, dtype=torch.bool)}
    result = evaluate(env, agent, 4, 0, Control())
    assert len(result["return"]) == 4 and kinds == {torch.Tensor}


def test_same_step_simulators_keep_to_arrays():
    env = TensorEnv()
    env.spec = EnvSpec("tensors", 3, 2, [-1.0] * 2, [1.0] * 2, autoreset="same_step")
    with pytest.raises(EnvError, match=r"return numpy arrays \(device None\)"):
        HostSide(env)


def test_other_adapters_are_not_wrapped():
    assert not isinstance(make_env("CodedEnv", {"task": "coded"}, 2, 0), HostSide)
    assert IsaacGymEnv.device is None and IsaacGymEnv.may_be_built_twice is False
