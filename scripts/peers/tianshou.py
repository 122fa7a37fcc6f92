"""Arms of tianshou."""

import numpy as np
from serve import gymnasium_env, spaces, transitions
from tianshou.algorithm.algorithm_base import policy_within_training_step
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.td3 import TD3
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, ReplayBuffer, VectorReplayBuffer
from tianshou.env import SubprocVectorEnv
from tianshou.exploration import GaussianNoise
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousCritic


def make_algorithm(settings, observations, actions):
    """TD3 in the shared recipe."""
    hidden = list(settings.get("hidden_sizes", [256, 256]))
    size, shape = observations.shape, actions.shape

    def critic():
        net = Net(state_shape=size, action_shape=shape, hidden_sizes=hidden, concat=True)
        return ContinuousCritic(preprocess_net=net)

    actor = ContinuousActorDeterministic(
        preprocess_net=Net(state_shape=size, hidden_sizes=hidden), action_shape=shape, max_action=1.0
    )
    policy = ContinuousDeterministicPolicy(
        actor=actor, exploration_noise=GaussianNoise(sigma=0.3), observation_space=observations, action_space=actions
    )
    adam = AdamOptimizerFactory(lr=settings.get("lr", 1e-3))
    return TD3(
        policy=policy, policy_optim=adam, critic=critic(), critic_optim=adam, critic2=critic(), critic2_optim=adam,
        tau=settings.get("tau", 0.02), gamma=settings.get("gamma", 0.95), policy_noise=0.2, update_actor_freq=2,
        noise_clip=0.5,
    )  # fmt: skip


def td3(settings):
    """``update``: sampling and updates, on rows that lie there."""
    algorithm = make_algorithm(settings, *spaces())
    obs, action, reward, next_obs, terminated = transitions(settings.get("rows", 100_000))
    no = np.zeros_like(terminated)
    buffer = ReplayBuffer.from_data(obs, action, reward, terminated, no, terminated, next_obs)
    batch = settings.get("batch", 256)

    def call():
        with policy_within_training_step(algorithm.policy):
            for _ in range(8):
                algorithm.update(buffer, batch)
        return 8

    return call


def collect(settings):
    """SubprocVectorEnv and Collector: frames that are in the buffer."""
    count, task = settings.get("processes", 2), settings["task"]
    envs = SubprocVectorEnv([lambda: gymnasium_env(task)] * count)
    algorithm = make_algorithm(settings, envs.observation_space[0], envs.action_space[0])
    collector = Collector(algorithm.policy, envs, VectorReplayBuffer(100_000, count), exploration_noise=True)
    collector.reset()
    return lambda: collector.collect(n_step=count * 32).n_collected_steps


ARMS = {"td3": td3, "collect": collect}
