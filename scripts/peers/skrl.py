"""Arms of skrl."""

import torch
from serve import spaces, transitions
from skrl.agents.torch.td3 import TD3
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, Model
from skrl.resources.noises.torch import GaussianNoise
from torch import nn


class Network(DeterministicMixin, Model):
    """Actor, or critic where ``is_critic``."""

    def __init__(self, observations, actions, hidden, is_critic, device):
        Model.__init__(self, observation_space=observations, action_space=actions, device=device)
        DeterministicMixin.__init__(self)
        self.is_critic = is_critic
        first = self.num_observations + (self.num_actions if is_critic else 0)
        parts = []
        for before, after in zip([first, *hidden[:-1]], hidden, strict=True):
            parts += [nn.Linear(before, after), nn.ReLU()]
        last = [nn.Linear(hidden[-1], 1)] if is_critic else [nn.Linear(hidden[-1], self.num_actions), nn.Tanh()]
        self.net = nn.Sequential(*parts, *last).to(device)

    def compute(self, inputs, role):
        """Actions or values."""
        obs = inputs["observations"]
        return self.net(torch.cat((obs, inputs["taken_actions"]), 1) if self.is_critic else obs), {}


def td3(settings):
    """``update``: sampling and updates, on rows that lie there."""
    rows = settings.get("rows", 100_000)
    hidden = list(settings.get("hidden_sizes", [256, 256]))
    observations, actions = spaces()
    device = settings.get("device", "cpu")
    names = ["policy", "target_policy", "critic_1", "critic_2", "target_critic_1", "target_critic_2"]
    models = {name: Network(observations, actions, hidden, "critic" in name, device) for name in names}
    memory = RandomMemory(memory_size=rows, num_envs=1, device=device)
    agent = TD3(
        models=models, memory=memory, observation_space=observations, action_space=actions, device=device,
        cfg={
            "gradient_steps": 8, "batch_size": settings.get("batch", 256), "policy_delay": 2,
            "discount_factor": settings.get("gamma", 0.95), "polyak": settings.get("tau", 0.02),
            "learning_rate": settings.get("lr", 1e-3),
            "smooth_regularization_noise": GaussianNoise,
            "smooth_regularization_noise_kwargs": {"mean": 0.0, "std": 0.2, "device": device},
            "smooth_regularization_clip": 0.5,
            "experiment": {"write_interval": 0, "checkpoint_interval": 0},
        },
    )  # fmt: skip
    agent.init()
    obs, action, reward, next_obs, terminated = (torch.from_numpy(x) for x in transitions(rows))
    fields = {
        "observations": obs, "actions": action, "rewards": reward[:, None], "next_observations": next_obs,
        "terminated": terminated[:, None],
    }  # fmt: skip
    for name, values in fields.items():
        memory.tensors[name].copy_(values.view_as(memory.tensors[name]))
    memory.filled = True
    agent.enable_models_training_mode(True)

    def call():
        agent.update(timestep=1, timesteps=2**30)
        agent.tracking_data.clear()  # as its trainer does at every writing
        return 8

    return call


ARMS = {"td3": td3}
