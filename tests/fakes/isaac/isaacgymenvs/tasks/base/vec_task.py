"""The loop around every task: buffers, devices, clipping, and the objects that are handed out again each step.

Checks of the stand-in are marked with the fault of a worker that they catch.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Dict, List, Optional, Tuple

from isaacgym import gymapi, gymtorch  # noqa: F401  isort: skip
import gym  # isort: skip
import numpy as np
import torch
from gym import spaces

#: The first sim of the process, kept for good: nothing frees it but the end of the process.
EXISTING_SIM: Optional[gymapi.Sim] = None

#: Faults from outside, in the spelling of :func:`read_faults`; ``env.fault`` of the configuration has priority.
FAULT = "CLAW_FAKE_ISAAC_FAULT"
FAULTS = ("hang", "exit", "segv", "nan_reward", "nan_obs", "quit", "slow", "noise")


def read_faults(cfg: Dict[str, Any]) -> Dict[str, float]:
    """Faults to inject, name to number: a mapping in ``env.fault``, or ``hang=5,noise=1`` there or in the variable.

    ``hang``, ``exit``, ``segv``, ``nan_reward``, ``nan_obs``: the control step, from 1, at which it happens (NaN: in
    lane 0, from then on). ``quit``: the sim cannot be made. ``slow``: seconds that set-up takes. ``noise``: lines on
    stdout each step.

    Raises:
        ValueError: an unknown fault.
    """
    given = cfg["env"].get("fault") or os.environ.get(FAULT) or {}
    if isinstance(given, str):
        given = dict(item.partition("=")[::2] for item in given.replace(" ", ",").split(",") if item)
    faults = {name: float(number or 1.0) for name, number in given.items()}
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown:
        raise ValueError("env.fault: unknown %s; one of %s" % (unknown, list(FAULTS)))
    return faults


def _create_sim_once(gym_api: gymapi.Gym, *args: Any) -> Optional[gymapi.Sim]:
    global EXISTING_SIM
    if EXISTING_SIM is not None:
        # The real one hands out the used sim again, and adding environments to it fails later, in native code.
        raise RuntimeError("this process already has a simulation; a second one cannot be made: use a new process")
    EXISTING_SIM = gym_api.create_sim(*args)
    return EXISTING_SIM


class Env:
    """Sizes, spaces and devices of a task."""

    def __init__(
        self, config: Dict[str, Any], rl_device: str, sim_device: str, graphics_device_id: int, headless: bool
    ) -> None:
        split_device = sim_device.split(":")
        self.device_type = split_device[0]
        self.device_id = int(split_device[1]) if len(split_device) > 1 else 0
        self.device = "cpu"
        if config["sim"]["use_gpu_pipeline"]:
            if self.device_type.lower() in ("cuda", "gpu"):
                self.device = "cuda:%d" % self.device_id
            else:
                print("GPU pipeline asked for, but the simulation runs on the CPU: CPU pipeline it is.")
                config["sim"]["use_gpu_pipeline"] = False
        self.rl_device = rl_device
        self.headless = headless
        cameras = config["env"].get("enableCameraSensors", False)
        self.graphics_device_id = -1 if headless and not cameras else graphics_device_id
        self.num_environments: int = config["env"]["numEnvs"]
        if not isinstance(self.num_environments, int) or self.num_environments < 1:
            raise TypeError("env.numEnvs must be a positive int, not %r" % (self.num_environments,))
        self.num_observations: int = config["env"].get("numObservations", 0)
        self.num_states: int = config["env"].get("numStates", 0)
        self.num_actions: int = config["env"]["numActions"]
        self.obs_space = spaces.Box(np.full(self.num_obs, -np.inf), np.full(self.num_obs, np.inf))
        self.state_space = spaces.Box(np.full(self.num_states, -np.inf), np.full(self.num_states, np.inf))
        self.act_space = spaces.Box(np.full(self.num_actions, -1.0), np.full(self.num_actions, 1.0))
        self.control_freq_inv: int = config["env"].get("controlFrequencyInv", 1)
        self.clip_obs: float = config["env"].get("clipObservations", np.inf)
        self.clip_actions: float = config["env"].get("clipActions", np.inf)
        self.total_train_env_frames = 0
        self.control_steps = 0

    @property
    def observation_space(self) -> gym.Space:
        """Box without bounds, float32."""
        return self.obs_space

    @property
    def action_space(self) -> gym.Space:
        """Box of -1 to 1, float32."""
        return self.act_space

    @property
    def num_envs(self) -> int:
        """Lanes."""
        return self.num_environments

    @property
    def num_acts(self) -> int:
        """Size of an action."""
        return self.num_actions

    @property
    def num_obs(self) -> int:
        """Size of an observation."""
        return self.num_observations

    def set_train_info(self, env_frames: int, *args: Any, **kwargs: Any) -> None:
        """Tells the task how far training is; curricula go by it."""
        self.total_train_env_frames = env_frames

    def get_env_state(self) -> Any:
        """None: most tasks have nothing to keep."""
        return None

    def set_env_state(self, env_state: Any) -> None:
        """Ignored by most tasks."""


class VecTask(Env):
    """N lanes stepped together; see the table of shapes in the design notes of the simulators.

    There is no ``close``: the sim lives as long as the process.
    """

    cfg: Dict[str, Any]
    max_episode_length: int
    successes: torch.Tensor

    def __init__(
        self,
        config: Dict[str, Any],
        rl_device: str,
        sim_device: str,
        graphics_device_id: int,
        headless: bool,
        virtual_screen_capture: bool = False,
        force_render: bool = False,
    ) -> None:
        super().__init__(config, rl_device, sim_device, graphics_device_id, headless)
        if virtual_screen_capture:
            import pyvirtualdisplay  # noqa: F401
        self.force_render = force_render
        self.faults = read_faults(self.cfg)
        self.sim_params = self._parse_sim_params(self.cfg["physics_engine"], self.cfg["sim"])
        self.physics_engine = {"physx": gymapi.SIM_PHYSX, "flex": gymapi.SIM_FLEX}[self.cfg["physics_engine"]]
        self.dt = self.sim_params.dt
        self.gym = gymapi.acquire_gym()
        self.dr_randomizations: Dict[str, Dict[str, float]] = {}
        self.last_rand_step = -1
        time.sleep(self.faults.get("slow", 0.0))
        self.create_sim()
        self.gym.prepare_sim(self.sim)
        self.viewer = None
        if not self.headless:
            self.gym.create_viewer(self.sim, gymapi.CameraProperties())
        self.allocate_buffers()
        self.obs_dict: Dict[str, torch.Tensor] = {}

    def create_sim(self) -> None:
        """Makes the sim, or prints a line and leaves with exit code 0, as the real one does."""
        sim = None
        if "quit" not in self.faults:
            sim = _create_sim_once(
                self.gym, self.device_id, self.graphics_device_id, self.physics_engine, self.sim_params
            )
        if sim is None:
            print("*** No sim could be created", flush=True)
            quit()  # closes standard input as well, and the exit code is 0
        self.sim = sim

    def allocate_buffers(self) -> None:
        """The tensors that are kept for the life of the task and partly handed out as they are."""
        floats: Dict[str, Any] = {"dtype": torch.float, "device": self.device}
        longs: Dict[str, Any] = {"dtype": torch.long, "device": self.device}
        self.obs_buf = torch.zeros((self.num_envs, self.num_obs), **floats)
        self.states_buf = torch.zeros((self.num_envs, self.num_states), **floats)
        self.rew_buf = torch.zeros(self.num_envs, **floats)
        self.reset_buf = torch.ones(self.num_envs, **longs)
        self.timeout_buf = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.progress_buf = torch.zeros(self.num_envs, **longs)
        self.extras: Dict[str, Any] = {}

    def get_state(self) -> torch.Tensor:
        """Privileged observation, clamped, a fresh tensor on ``rl_device``."""
        return torch.clamp(self.states_buf, -self.clip_obs, self.clip_obs).to(self.rl_device)

    def zero_actions(self) -> torch.Tensor:
        """[N, A] zeros on ``rl_device``."""
        return torch.zeros([self.num_envs, self.num_actions], dtype=torch.float32, device=self.rl_device)

    def pre_physics_step(self, actions: torch.Tensor) -> None:
        """Resets what was flagged, then applies the actions."""
        raise NotImplementedError

    def post_physics_step(self) -> None:
        """Observations, then reward and reset flags."""
        raise NotImplementedError

    def reset_idx(self, env_ids: torch.Tensor, *args: Any) -> None:
        """Resets lanes."""
        raise NotImplementedError

    def reset(self) -> Dict[str, torch.Tensor]:
        """What the buffers hold, without simulating: zeros before the first step."""
        return self._fill_obs_dict()

    def reset_done(self) -> Tuple[Dict[str, torch.Tensor], torch.Tensor]:
        """TypeError for both hands, whose ``reset_idx`` takes the lanes with new goals as well."""
        done_env_ids = self.reset_buf.nonzero(as_tuple=False).flatten()
        self.reset_idx(done_env_ids)
        return self._fill_obs_dict(), done_env_ids

    def render(self, mode: str = "rgb_array") -> None:
        """Does nothing without a viewer."""

    def step(self, actions: torch.Tensor) -> Tuple[Dict[str, torch.Tensor], torch.Tensor, torch.Tensor, Dict[str, Any]]:
        """One control step: the same ``obs_dict`` and ``extras`` objects each time, reward and done themselves."""
        self._check_actions(actions)
        self._before_step()
        actions = self._randomised("actions", actions)
        self.pre_physics_step(torch.clamp(actions, -self.clip_actions, self.clip_actions))
        for _ in range(self.control_freq_inv):
            if self.force_render:
                self.render()
            self.gym.simulate(self.sim)
        if self.device == "cpu":
            self.gym.fetch_results(self.sim, True)
        self.post_physics_step()
        self.control_steps += 1
        self._spoil()
        self.timeout_buf = (self.progress_buf >= self.max_episode_length - 1) & (self.reset_buf != 0)
        self.obs_buf = self._randomised("observations", self.obs_buf)
        self.extras["time_outs"] = self.timeout_buf.to(self.rl_device)
        self._fill_obs_dict()
        return self.obs_dict, self.rew_buf.to(self.rl_device), self.reset_buf.to(self.rl_device), self.extras

    def apply_randomizations(self, params: Dict[str, Any]) -> None:
        """New strengths of the noise on actions and observations, every ``frequency`` frames, only called at resets."""
        frames = self.gym.get_frame_count(self.sim)
        if self.last_rand_step >= 0 and frames - self.last_rand_step < params.get("frequency", 1):
            return
        self.last_rand_step = frames
        for name in ("observations", "actions"):
            if name in params:
                mean, std = params[name]["range"]
                self.dr_randomizations[name] = {"mean": float(mean), "std": float(std)}

    def _randomised(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = self.dr_randomizations.get(name)
        if noise is None:
            return tensor
        return tensor + torch.randn_like(tensor) * noise["std"] + noise["mean"]

    def _fill_obs_dict(self) -> Dict[str, torch.Tensor]:
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -self.clip_obs, self.clip_obs).to(self.rl_device)
        if self.num_states > 0:
            self.obs_dict["states"] = self.get_state()
        return self.obs_dict

    def _check_actions(self, actions: torch.Tensor) -> None:
        if not isinstance(actions, torch.Tensor):
            raise TypeError("actions must be a torch tensor, not %s" % type(actions).__name__)
        if not actions.is_floating_point():
            raise TypeError("actions must be floating, not %s" % actions.dtype)
        if tuple(actions.shape) != (self.num_envs, self.num_actions):
            expected = (self.num_envs, self.num_actions)
            raise RuntimeError("actions must have shape %s, not %s" % (expected, tuple(actions.shape)))
        if actions.device.type not in ("cpu", "cuda"):
            raise RuntimeError("actions on device %s cannot be copied to the simulation" % actions.device)
        if actions.requires_grad:
            raise RuntimeError("actions require grad: a leaf cannot be written into the simulation's buffers")

    def _before_step(self) -> None:
        """Faults that need no results."""
        now = self.control_steps + 1
        if "noise" in self.faults:
            print("[Warning] [carb.gym.plugin] a line on stdout in step %d" % now, flush=True)
        if now == self.faults.get("hang"):
            while True:
                time.sleep(3600)
        if now == self.faults.get("exit"):
            os._exit(3)
        if now == self.faults.get("segv"):
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(60)

    def _spoil(self) -> None:
        for name, buffer in (("nan_reward", self.rew_buf), ("nan_obs", self.obs_buf)):
            if self.control_steps >= self.faults.get(name, np.inf):
                buffer[0] = float("nan")

    def _parse_sim_params(self, physics_engine: str, config: Dict[str, Any]) -> gymapi.SimParams:
        """Numbers of the configuration; strings that nobody resolved raise TypeError here."""
        params = gymapi.SimParams()
        if config["up_axis"] not in ("z", "y"):
            raise ValueError("sim.up_axis must be z or y, not %r" % (config["up_axis"],))
        params.dt = config["dt"]
        params.num_client_threads = config.get("num_client_threads", 0)
        params.use_gpu_pipeline = config["use_gpu_pipeline"]
        params.substeps = config.get("substeps", 2)
        params.up_axis = gymapi.UP_AXIS_Z if config["up_axis"] == "z" else gymapi.UP_AXIS_Y
        params.gravity = gymapi.Vec3(*config["gravity"])
        for name, value in config.get("physx", {}).items() if physics_engine == "physx" else ():
            setattr(params.physx, name, gymapi.ContactCollection(value) if name == "contact_collection" else value)
        return params


def require(section: Dict[str, Any], names: List[str]) -> None:
    """Raises KeyError for a setting that the real task reads without a default."""
    for name in names:
        section[name]
