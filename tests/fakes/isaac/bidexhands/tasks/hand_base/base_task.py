"""The inner half of a task: nothing is clipped, copied or returned; wrappers elsewhere in the package do that."""

from __future__ import annotations

from typing import Any, Dict, Optional

from isaacgym import gymapi, gymutil  # noqa: F401  isort: skip
import torch

EXISTING_SIM: Optional[gymapi.Sim] = None


def _create_sim_once(gym_api: gymapi.Gym, *args: Any) -> Optional[gymapi.Sim]:
    global EXISTING_SIM
    if EXISTING_SIM is not None:
        raise RuntimeError("this process already has a simulation; a second one cannot be made: use a new process")
    EXISTING_SIM = gym_api.create_sim(*args)
    return EXISTING_SIM


class BaseTask:
    """N lanes; ``step`` returns nothing, and ``extras`` have no ``time_outs``."""

    sim_params: gymapi.SimParams
    physics_engine: int

    def __init__(self, cfg: Dict[str, Any]) -> None:
        self.gym = gymapi.acquire_gym()
        self.device_type = cfg.get("device_type", "cuda")
        self.device_id = cfg.get("device_id", 0)
        self.device = "cuda:%d" % self.device_id if self.device_type in ("cuda", "GPU") else "cpu"
        self.headless = cfg["headless"]
        self.num_envs: int = cfg["env"]["numEnvs"]
        self.num_obs: int = cfg["env"]["numObservations"]
        self.num_states: int = cfg["env"].get("numStates", 0)
        self.num_actions: int = cfg["env"]["numActions"]
        self.control_freq_inv: int = cfg["env"].get("controlFrequencyInv", 1)
        floats: Dict[str, Any] = {"dtype": torch.float, "device": self.device}
        longs: Dict[str, Any] = {"dtype": torch.long, "device": self.device}
        self.obs_buf = torch.zeros((self.num_envs, self.num_obs), **floats)
        self.states_buf = torch.zeros((self.num_envs, self.num_states), **floats)
        self.rew_buf = torch.zeros(self.num_envs, **floats)
        self.reset_buf = torch.ones(self.num_envs, **longs)
        self.progress_buf = torch.zeros(self.num_envs, **longs)
        self.extras: Dict[str, Any] = {}
        sim = _create_sim_once(self.gym, self.device_id, self.device_id, self.physics_engine, self.sim_params)
        if sim is None:
            print("*** No sim could be created", flush=True)
            quit()
        assert sim is not None
        self.sim = sim
        self.gym.prepare_sim(self.sim)
        self.viewer = None
        if not self.headless:
            self.gym.create_viewer(self.sim, gymapi.CameraProperties())

    def pre_physics_step(self, actions: torch.Tensor) -> None:
        """Resets what was flagged, then applies the actions."""
        raise NotImplementedError

    def post_physics_step(self) -> None:
        """Observations, then reward and reset flags."""
        raise NotImplementedError

    def step(self, actions: torch.Tensor) -> None:
        """Fills the buffers."""
        if tuple(actions.shape) != (self.num_envs, self.num_actions):
            raise RuntimeError("actions must have shape %s" % ((self.num_envs, self.num_actions),))
        if str(actions.device) != self.device:
            raise RuntimeError("actions are on %s, the task is on %s" % (actions.device, self.device))
        self.pre_physics_step(actions)
        for _ in range(self.control_freq_inv):
            self.gym.simulate(self.sim)
        self.post_physics_step()

    def get_states(self) -> torch.Tensor:
        """The buffer itself."""
        return self.states_buf
