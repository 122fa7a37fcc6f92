"""The floor: TD3 in a plain PyTorch loop over packed rows, and the same beside a simulator in one process."""

import numpy as np
import torch
from serve import ACTION, OBS, transitions
from torch import nn
from torch.nn import functional as F

POLICY_NOISE, NOISE_CLIP, POLICY_DELAY = 0.2, 0.5, 2


def layers(sizes, last=None):
    """Linear layers with ReLU between them."""
    parts = []
    for before, after in zip(sizes[:-1], sizes[1:], strict=True):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts[:-1], *([] if last is None else [last]))


class Learner:
    """TD3: fused Adam, targets moved by one foreach call each second update, rows gathered by one index_select.

    Args:
        settings: ``batch``, ``hidden_sizes``, ``gamma``, ``tau``, ``lr``, ``is_compiled``, ``bf16``, ``device``.
        rows: packed [N, 2 O + A + 2]: obs, action, reward, not terminated, next_obs.
        obs: O.
        action: A.
    """

    def __init__(self, settings, rows, obs=OBS, action=ACTION):
        hidden = list(settings.get("hidden_sizes", [256, 256]))
        self.device = torch.device(settings.get("device", "cpu"))
        self.rows, self.batch, self.filled = rows.to(self.device), settings.get("batch", 256), len(rows)
        self.sizes = [obs, action, 1, 1, obs]
        self.gamma, self.tau = settings.get("gamma", 0.95), settings.get("tau", 0.02)
        torch.manual_seed(settings.get("seed", 0))

        def networks():
            return layers([obs, *hidden, action], nn.Tanh()), [layers([obs + action, *hidden, 1]) for _ in range(2)]

        (self.actor, critics), (self.target_actor, target_critics) = networks(), networks()
        self.critics, self.target_critics = nn.ModuleList(critics), nn.ModuleList(target_critics)
        for network in (self.actor, self.target_actor, self.critics, self.target_critics):
            network.to(self.device)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.target_critics.load_state_dict(self.critics.state_dict())
        lr = settings.get("lr", 1e-3)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), lr, fused=True)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), lr, fused=True)
        self.online = [*self.actor.parameters(), *self.critics.parameters()]
        self.targets = [*self.target_actor.parameters(), *self.target_critics.parameters()]
        self.autocast = settings.get("bf16", False)
        self.losses = self.critic_loss, self.actor_loss
        if settings.get("is_compiled"):
            self.losses = tuple(torch.compile(loss) for loss in self.losses)
        self.updates = 0

    def critic_loss(self, obs, action, reward, alive, next_obs, noise):
        """Both critics against the smaller target."""
        with torch.no_grad():
            chosen = (self.target_actor(next_obs) + noise).clamp(-1.0, 1.0)
            joined = torch.cat((next_obs, chosen), 1)
            least = torch.minimum(*(critic(joined) for critic in self.target_critics))
            target = reward + self.gamma * alive * least
        joined = torch.cat((obs, action), 1)
        return sum(F.mse_loss(critic(joined), target) for critic in self.critics)

    def actor_loss(self, obs):
        """Minus the first critic's value of its actions."""
        return -self.critics[0](torch.cat((obs, self.actor(obs)), 1)).mean()

    def update(self):
        """One update."""
        index = torch.randint(self.filled, (self.batch,), device=self.device)
        obs, action, reward, alive, next_obs = torch.index_select(self.rows, 0, index).split(self.sizes, 1)
        noise = (torch.randn_like(action) * POLICY_NOISE).clamp(-NOISE_CLIP, NOISE_CLIP)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.losses[0](obs, action, reward, alive, next_obs, noise)
        self.critic_adam.zero_grad(set_to_none=True)
        loss.backward()
        self.critic_adam.step()
        self.updates += 1
        if self.updates % POLICY_DELAY:
            return
        self.critics.requires_grad_(False)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.losses[1](obs)
        self.actor_adam.zero_grad(set_to_none=True)
        loss.backward()
        self.critics.requires_grad_(True)
        self.actor_adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.targets, self.online, self.tau)


def pack(obs, action, reward, next_obs, terminated):
    """Rows [N, 2 O + A + 2] of arrays."""
    alive = 1.0 - terminated.astype(np.float32)
    return torch.from_numpy(np.concatenate((obs, action, reward[:, None], alive[:, None], next_obs), 1))


def td3(settings):
    """Updates on rows that lie there."""
    learner = Learner(settings, pack(*transitions(settings.get("rows", 100_000))))

    def call():
        for _ in range(8):
            learner.update()
        if learner.device.type == "cuda":
            torch.cuda.synchronize()
        return 8

    return call


class Alternating:
    """One process that steps a simulator and learns in turn, as a script of one file does; counts environment steps.

    Settings: those of :class:`Learner`, ``task``, ``lanes``, ``samples_per_insert``, ``warmup``, ``noise``.
    """

    def __init__(self, settings):
        from claw_lightning.rollout.envs import EnvPoolEnv

        self.settings, self.task = settings, settings["task"]
        self.lanes = settings.get("lanes", 16)
        self.env = EnvPoolEnv(self.task, num_envs=self.lanes, seed=1000 * settings.get("seed", 0))
        obs, action = self.env.spec.obs_size, self.env.spec.action_size
        self.rows = torch.zeros(settings.get("capacity", 1_000_000), 2 * obs + action + 2)
        self.learner = Learner(settings, self.rows, obs, action)
        self.learner.filled = self.written = 0
        self.rng = np.random.default_rng(settings.get("seed", 0))
        self.obs, self.owed, self.steps = self.env.reset(), 0.0, 0
        self.is_border = np.zeros(self.lanes, bool)

    def __call__(self):
        """One vector step and the updates that it pays for."""
        size = self.env.spec.action_size
        if self.steps < self.settings.get("warmup", 1000):
            action = self.rng.uniform(-1.0, 1.0, (self.lanes, size)).astype(np.float32)
        else:
            with torch.no_grad():
                action = self.learner.actor(torch.from_numpy(self.obs)).numpy()
            noise = self.rng.standard_normal((self.lanes, size), np.float32) * self.settings.get("noise", 0.3)
            action = np.clip(action + noise, -1.0, 1.0)
            self.owed += self.lanes * self.settings.get("samples_per_insert", 64)
        result = self.env.step(action)
        fine = ~result.is_border
        if fine.any():
            count = int(fine.sum())
            rows = pack(*(x[fine] for x in (self.obs, action, result.reward, result.obs, result.terminated)))
            places = torch.arange(self.written, self.written + count) % len(self.rows)
            self.rows[places] = rows
            self.written += count
            self.learner.filled = min(self.written, len(self.rows))
        self.obs = result.obs
        self.steps += self.lanes
        while self.owed >= self.learner.batch:
            self.learner.update()
            self.owed -= self.learner.batch
        return self.lanes

    def evaluate(self, episodes):
        """Mean return of noise-free episodes."""
        from serve import play_actor

        return play_actor(self.learner.actor, self.task, episodes)


def alternating(settings):
    """See :class:`Alternating`."""
    return Alternating(settings)


ARMS = {"td3": td3, "alternating": alternating}
