"""Arms of stable-baselines3."""

import numpy as np
import torch
from serve import gymnasium_env, nothing_env, play_actor, transitions
from stable_baselines3 import TD3
from stable_baselines3.common.logger import configure
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv


def make_model(settings, env, **more):
    """TD3 in the shared recipe."""
    return TD3(
        "MlpPolicy", env, device=settings.get("device", "cpu"), seed=settings.get("seed", 0),
        batch_size=settings.get("batch", 256),
        gamma=settings.get("gamma", 0.95), tau=settings.get("tau", 0.02), learning_rate=settings.get("lr", 1e-3),
        policy_kwargs={"net_arch": list(settings.get("hidden_sizes", [256, 256]))}, **more,
    )  # fmt: skip


def td3(settings):
    """``train``: sampling and updates, on rows that lie there."""
    rows = settings.get("rows", 100_000)
    model = make_model(settings, DummyVecEnv([nothing_env]), buffer_size=rows)
    model.set_logger(configure(None, []))
    buffer = model.replay_buffer
    obs, action, reward, next_obs, terminated = transitions(rows)
    buffer.observations[:, 0], buffer.next_observations[:, 0], buffer.actions[:, 0] = obs, next_obs, action
    buffer.rewards[:, 0], buffer.dones[:, 0] = reward, terminated
    buffer.full = True

    def call():
        model.train(8, model.batch_size)
        return 8

    return call


def simulators(settings):
    """The environments of a run: processes of Gymnasium's simulator, or EnvPool's with threads."""
    task, kind = settings["task"], settings.get("kind", "processes")
    if kind == "processes":
        return SubprocVecEnv([lambda: gymnasium_env(task)] * settings.get("processes", 2))
    from serve import compare_sb3

    from claw_lightning.rollout.envs import EnvPoolEnv

    lanes, threads, seed = settings.get("lanes", 16), settings.get("env_threads", 1), 1000 * settings.get("seed", 0)
    return compare_sb3().make_vec_env(EnvPoolEnv(task, num_envs=lanes, seed=seed, num_threads=threads))


def collect(settings):
    """``learn`` without gradient steps: frames that are in the replay."""
    env = simulators(settings)
    model = make_model(settings, env, buffer_size=100_000, learning_starts=0, gradient_steps=0)
    return learned(model, env.num_envs * 32)


def learned(model, steps):
    """Parts of one run, of so many environment steps each."""

    def call():
        before = model.num_timesteps
        model.learn(steps, reset_num_timesteps=before == 0, log_interval=2**60)
        return model.num_timesteps - before

    return call


class Fit:
    """``learn`` at so many samples per environment step; counts environment steps."""

    def __init__(self, settings):
        env = simulators(settings)
        batch, samples = settings.get("batch", 256), settings["samples_per_insert"]
        frequency = 1  # vector steps that pay for whole updates
        while frequency * env.num_envs * samples % batch:
            frequency += 1
        size = env.action_space.shape[0]
        self.task, warmup = settings["task"], settings.get("warmup", 1000)
        self.moments = None
        if settings.get("normalize"):
            from stable_baselines3.common.vec_env import VecNormalize

            env = VecNormalize(env, norm_reward=False, clip_obs=5.0, gamma=settings.get("gamma", 0.95))
            self.moments = env.obs_rms
        self.model = make_model(
            settings, env, buffer_size=settings.get("capacity", 1_000_000), learning_starts=warmup,
            train_freq=(frequency, "step"), gradient_steps=frequency * env.num_envs * samples // batch,
            action_noise=NormalActionNoise(np.zeros(size), np.full(size, settings.get("noise", 0.3))),
        )  # fmt: skip
        learned(self.model, warmup + env.num_envs * frequency)()
        self.call = learned(self.model, max(256 // env.num_envs, frequency) * env.num_envs)

    def __call__(self):
        """A part of the run."""
        return self.call()

    def evaluate(self, episodes):
        """Mean return of noise-free episodes."""
        actor = self.model.actor
        actor.set_training_mode(False)
        if self.moments is None:
            return play_actor(actor, self.task, episodes)
        mean, scale = (torch.as_tensor(x, dtype=torch.float32) for x in (
            self.moments.mean, np.sqrt(self.moments.var + 1e-8)))  # fmt: skip
        return play_actor(lambda obs: actor(((obs - mean) / scale).clamp(-5.0, 5.0)), self.task, episodes)


ARMS = {"td3": td3, "collect": collect, "fit": Fit}
