"""Stand-ins for simulators that are not installed: their interfaces, as far as the adapters use them.

Written after the sources of mjlab (October 2025), Isaac Lab (2.3 and the development of 3.0), MuJoCo Playground 0.2.0
and EnvPool 1.2.5: names and order of arguments, shapes, dtypes, buffers that are used again, when lanes are reset,
where the last observation is. The numbers are those of ``CodedLanes``; privileged observations are the same with the
sign changed. Each ``install`` puts modules in place of the real ones for one test.
"""

import importlib.machinery
import sys
import types
from types import SimpleNamespace

import numpy as np
import torch

from tests.fakes.coded_lanes import ACTION_SIZE, OBS_SIZE, CodedLanes

TASK = "Coded-v0"
STATES_TASK = "CodedStates-v0"
ISAAC_TASK = "Isaac-Coded-Direct-v0"


def put(monkeypatch, name, **content):
    """A module of the given name; its package knows it."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)
    package, _, last = name.rpartition(".")
    if package:
        monkeypatch.setattr(sys.modules[package], last, module, raising=False)
    return module


# -- EnvPool ----------------------------------------------------------------------------------------------------------


def install_envpool(monkeypatch):
    """Next-step reset: the action is ignored, reward 0, elapsed step 0; arrays are used again."""
    from gymnasium.spaces import Box, Dict

    class Pool:
        observation_space = Dict(
            {"obs": Box(-np.inf, np.inf, (OBS_SIZE,)), "privileged_state": Box(-np.inf, np.inf, (OBS_SIZE,))}
        )
        action_space = Box(-1.0, 1.0, (ACTION_SIZE,), np.float64)

        def __init__(self, num_envs, seed):
            self.lanes = CodedLanes(num_envs, seed[0])
            self.spec = SimpleNamespace(
                config=SimpleNamespace(max_episode_steps=7),
                action_array_spec={"action": SimpleNamespace(dtype=np.float64)},
            )
            self.over = np.zeros(num_envs, bool)
            self.elapsed = np.zeros(num_envs, np.int32)
            self.buffers = {"obs": np.zeros((num_envs, OBS_SIZE)), "privileged_state": np.zeros((num_envs, OBS_SIZE))}

        def _raw(self):
            self.buffers["obs"][:] = self.lanes.obs()
            self.buffers["privileged_state"][:] = -self.buffers["obs"]
            return self.buffers

        def reset(self):
            self.lanes.open(np.ones_like(self.over))
            self.over[:] = False
            self.elapsed[:] = 0
            return self._raw(), {}

        def step(self, action):
            assert action.dtype == np.float64
            border = self.over.copy()
            reward, terminated, truncated = self.lanes.advance(action, ~border)
            self.lanes.open(border)
            self.over[:] = terminated | truncated
            self.elapsed[:] = np.where(border, 0, self.elapsed + 1)
            return self._raw(), reward, terminated, truncated, {"elapsed_step": self.elapsed}

        def close(self):
            pass

    put(
        monkeypatch,
        "envpool",
        __version__="1.2.5",
        list_all_envs=lambda: [TASK],
        make_gymnasium=lambda task, num_envs, seed, num_threads: Pool(num_envs, seed),
    )


# -- Gymnasium --------------------------------------------------------------------------------------------------------

GYM_SEED = 100  # a task takes its lane from the seed of its first reset


def register_gymnasium():
    """A single environment, registered as ``TASK``; it hands out one array again and again.

    As ``STATES_TASK`` the same with privileged observations.
    """
    import gymnasium as gym

    class Coded(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (OBS_SIZE,), np.float32)
        action_space = gym.spaces.Box(-1.0, 1.0, (ACTION_SIZE,), np.float32)

        def __init__(self):
            self.lanes = CodedLanes(1)
            self.array = np.zeros(OBS_SIZE, np.float32)
            self.is_over = True

        def _obs(self):
            self.array[:] = self.lanes.obs()[0]
            return self.array

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            if seed is not None:
                self.lanes.header[:, 0] = seed - GYM_SEED
            self.lanes.open(np.ones(1, bool))
            self.is_over = False
            return self._obs(), {"is_success": True}  # of the reset: must never be counted

        def step(self, action):
            assert not self.is_over, "step after the end"
            reward, terminated, truncated = (x[0] for x in self.lanes.advance(action[None]))
            self.is_over = bool(terminated or truncated)
            return self._obs(), float(reward), bool(terminated), bool(truncated), {"is_success": bool(terminated)}

    class CodedStates(Coded):
        observation_space = gym.spaces.Dict({"observation": Coded.observation_space,
                                             "privileged_state": Coded.observation_space})  # fmt: skip

        def __init__(self):
            super().__init__()
            self.negative = np.zeros(OBS_SIZE, np.float32)

        def _obs(self):
            self.negative[:] = -super()._obs()
            return {"observation": self.array, "privileged_state": self.negative}

    for task, kind in ((TASK, Coded), (STATES_TASK, CodedStates)):
        if task not in gym.registry:
            gym.register(task, kind)


# -- simulators of torch tensors --------------------------------------------------------------------------------------


class TensorSim:
    """What mjlab and Isaac Lab have in common: buffers that are used again, extras that are one dictionary."""

    step_dt, max_episode_length, device = 0.05, 7, "cpu"
    single_action_space = SimpleNamespace(
        shape=(ACTION_SIZE,), low=np.full(ACTION_SIZE, -np.inf), high=np.full(ACTION_SIZE, np.inf)
    )
    policy, critic = "policy", "critic"

    def __init__(self, num_envs, seed):
        self.num_envs, self.extras, self.closed = num_envs, {}, False
        self.lanes = CodedLanes(num_envs, seed)
        self.seeds = []
        self.reward_buf = torch.zeros(num_envs)
        self.terminated, self.time_outs = (torch.zeros(num_envs, dtype=torch.bool) for _ in range(2))
        self.obs_buf = {name: torch.zeros(num_envs, OBS_SIZE) for name in (self.policy, self.critic)}

    def _observe(self):
        """Writes over what the last step returned."""
        self.obs_buf[self.policy][:] = torch.from_numpy(self.lanes.obs())
        self.obs_buf[self.critic][:] = -self.obs_buf[self.policy]
        return self.obs_buf

    def _advance(self, action):
        assert action.dtype == torch.float32 and action.shape == (self.num_envs, ACTION_SIZE)
        reward, terminated, truncated = self.lanes.advance(action.numpy())
        self.reward_buf[:] = torch.from_numpy(reward)
        self.terminated[:], self.time_outs[:] = torch.from_numpy(terminated), torch.from_numpy(truncated)
        self.extras["log"] = {"Episode_Reward/all": torch.tensor(0.5)}
        return terminated | truncated

    def _answer(self):
        return self._observe(), self.reward_buf, self.terminated, self.time_outs, self.extras

    def _open_all(self, seed):
        self.seeds.append(seed)
        self.lanes.open(np.ones(self.num_envs, bool))

    def close(self):
        self.closed = True


class MjlabSim(TensorSim):
    """Same-step reset, or by hand: then a step is refused while an ended lane waits."""

    policy = "actor"

    def __init__(self, cfg, device):
        super().__init__(cfg.scene.num_envs, cfg.seed)
        self.cfg, self.waiting = cfg, np.zeros(cfg.scene.num_envs, bool)

    def reset(self, *, seed=None, env_ids=None, options=None):
        if env_ids is None:
            self._open_all(seed)
            self.waiting[:] = False
        else:
            lanes = np.zeros(self.num_envs, bool)
            lanes[env_ids.numpy()] = True
            self.lanes.open(lanes)
            self.waiting &= ~lanes
        return self._observe(), self.extras

    def step(self, action):
        if self.waiting.any():
            raise RuntimeError("Environments must be reset via reset(env_ids=...)")
        ended = self._advance(action)
        if getattr(self.cfg, "auto_reset", True):
            self.lanes.open(ended)
        else:
            self.waiting |= ended
        return self._answer()


def install_mjlab(monkeypatch, version="1.6.0", with_switch=True, history=0, finite=False):
    """``with_switch``: whether the configuration has ``auto_reset``; ``history``: of the observations."""

    def load_env_cfg(task):
        group = SimpleNamespace(terms={"hand": SimpleNamespace(history_length=history)}, history_length=None)
        cfg = SimpleNamespace(
            scene=SimpleNamespace(num_envs=1), seed=None, observations={"actor": group}, is_finite_horizon=finite
        )
        if with_switch:
            cfg.auto_reset = True
        return cfg

    put(monkeypatch, "mjlab", __version__=version)
    put(monkeypatch, "mjlab.tasks")
    put(monkeypatch, "mjlab.tasks.registry", list_tasks=lambda: [TASK, "Other-v0"], load_env_cfg=load_env_cfg)
    put(monkeypatch, "mjlab.envs", ManagerBasedRlEnv=MjlabSim)


def install_isaaclab(monkeypatch, version="3.0.0", finite=False, with_app=True):
    """Before 3.0 the configuration has no ``compute_final_obs`` and the last observation is lost."""
    import gymnasium as gym

    started = []

    class AppLauncher:
        def __init__(self, launcher_args=None, **kwargs):
            assert kwargs["headless"] is True, "on a server there is no window"
            started.append(kwargs)

    class IsaacSim(TensorSim, gym.Env):
        observation_space = action_space = gym.spaces.Box(-1.0, 1.0, (1,))

        def __init__(self, cfg, render_mode=None):
            super().__init__(cfg.scene.num_envs, cfg.seed)
            self.cfg, self.successes = cfg, torch.zeros(cfg.scene.num_envs)

        def reset(self, seed=None, options=None):
            self._open_all(seed)
            return self._observe(), self.extras

        def step(self, action):
            ended = self._advance(action)
            self.successes += 1.0
            if ended.any():
                if getattr(self.cfg, "compute_final_obs", False):
                    self.extras["final_obs"] = {key: value.clone() for key, value in self._observe().items()}
                self.lanes.open(ended)
                self.successes[torch.from_numpy(ended)] = 0.0
            return self._answer()

    def parse_env_cfg(task, device="cuda:0", num_envs=None):
        cfg = SimpleNamespace(scene=SimpleNamespace(num_envs=num_envs), seed=None, is_finite_horizon=finite)
        if int(version.split(".")[0]) >= 3:
            cfg.compute_final_obs = False
        return cfg

    put(monkeypatch, "isaaclab", __version__=version)
    put(monkeypatch, "isaaclab.app", AppLauncher=AppLauncher)
    if with_app:
        put(monkeypatch, "isaacsim")
    put(monkeypatch, "isaaclab_tasks")
    put(monkeypatch, "isaaclab_tasks.utils", parse_env_cfg=parse_env_cfg)
    monkeypatch.setitem(gym.registry, ISAAC_TASK, gym.envs.registration.EnvSpec(ISAAC_TASK, IsaacSim))
    return started


# -- Playground -------------------------------------------------------------------------------------------------------


def tree_map(function, *trees):
    """Of dictionaries, namespaces and arrays."""
    first = trees[0]
    if isinstance(first, SimpleNamespace):
        return SimpleNamespace(**tree_map(function, *(vars(tree) for tree in trees)))
    if isinstance(first, dict):
        return {key: tree_map(function, *(tree[key] for tree in trees)) for key in first}
    return function(*trees)


def _vmap(function):
    def mapped(*trees):
        leaves = []
        tree_map(leaves.append, trees[0])
        lanes = len(leaves[0])
        results = [function(*(tree_map(lambda x, i=lane: x[i], tree) for tree in trees)) for lane in range(lanes)]
        return tree_map(lambda *values: _frozen(np.stack(values)), *results)

    return mapped


def _frozen(array):
    """Arrays of JAX cannot be written."""
    array = np.asarray(array)
    array.flags.writeable = False
    return array


class Config(dict):
    """As much of ``ml_collections.ConfigDict`` as is used: no new keys, no other types."""

    __getattr__ = dict.__getitem__

    def update_from_flattened_dict(self, overrides):
        for key, value in overrides.items():
            if key not in self:
                raise KeyError(key)
            if not isinstance(value, type(self[key])):
                raise TypeError("%s must be %s" % (key, type(self[key]).__name__))
            self[key] = value


class CodedTask:
    """One lane, without a state of its own: all of it goes in and out. It never ends by time.

    Half of the episodes end by termination, before or at the limit; the others would go on for ever.
    """

    action_size = ACTION_SIZE

    def __init__(self, config):
        self.limit = int(config["episode_length"])

    def _state(self, lanes, reward, done):
        obs = lanes.obs()[0]
        obs_tree = {"privileged_state": -obs, "state": obs}
        return SimpleNamespace(
            data=SimpleNamespace(header=lanes.header[0].copy()),
            obs=obs_tree,
            reward=np.float32(reward),
            done=np.float32(done),
            metrics={"reward/success": np.float32(done)},
            info={"step": np.int32(0)},
        )

    def reset(self, key):
        # What a key is made of: the lane's seed and the number of the episode.
        lanes = CodedLanes(1, seed=int(key[0]), max_length=self.limit)
        lanes.header[0, 3] = int(key[1]) - 1
        lanes.open(np.ones(1, bool))
        if lanes.header[0, -1] != 1:
            lanes.header[0, 5] = self.limit
        return self._state(lanes, 0.0, False)

    def step(self, state, action):
        lanes = CodedLanes(1)
        lanes.header[0] = state.data.header
        reward, terminated, _ = lanes.advance(np.asarray(action)[None])
        return self._state(lanes, reward[0], terminated[0])


def install_playground(monkeypatch, version="0.2.0", platform="cpu", with_impl=True, limit=6, **config):
    """A JAX of numpy arrays, and a registry of one task."""
    loaded = []

    def load(task, config):
        loaded.append(dict(config))
        return CodedTask(config)

    def get_default_config(task):
        return Config(
            episode_length=limit, ctrl_dt=0.05, action_repeat=1, **({"impl": "warp"} if with_impl else {}), **config
        )

    put(monkeypatch, "jax")
    put(monkeypatch, "jax.numpy", **{name: getattr(np, name) for name in
        ("asarray", "concatenate", "float32", "ndim", "shape", "where")})  # fmt: skip
    put(
        monkeypatch,
        "jax.random",
        PRNGKey=lambda seed: np.array([seed, 0], np.uint32),
        fold_in=lambda key, number: np.array([key[0], number], np.uint32),
    )
    put(monkeypatch, "jax.tree_util", tree_map=tree_map)
    sys.modules["jax"].__dict__.update(
        vmap=_vmap,
        jit=lambda function: lambda *arguments: tree_map_pair(function(*arguments)),
        eval_shape=lambda function, *arguments: function(*arguments),
        devices=lambda: [SimpleNamespace(platform=platform)],
    )
    registry = SimpleNamespace(ALL_ENVS=(TASK, "Other"), get_default_config=get_default_config, load=load)
    put(monkeypatch, "mujoco_playground", __version__=version, registry=registry)
    return loaded


def tree_map_pair(pair):
    """(state, packed) as a compiled program returns them: arrays that cannot be written."""
    return tree_map(_frozen, pair[0]), _frozen(pair[1])
