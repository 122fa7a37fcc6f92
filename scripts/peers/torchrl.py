"""Arms of TorchRL."""

import logging

import torch
from serve import ACTION, OBS, gymnasium_env, transitions
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.data import Bounded, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, AdditiveGaussianModule, TanhModule, ValueOperator
from torchrl.objectives import SoftUpdate
from torchrl.objectives.td3 import TD3Loss

logging.getLogger("torchrl").setLevel(logging.ERROR)


def make_actor(settings, obs, spec):
    """Deterministic policy within the bounds of a spec."""
    cells = list(settings.get("hidden_sizes", [256, 256]))
    net = MLP(in_features=obs, num_cells=cells, out_features=spec.shape[-1], activation_class=torch.nn.ReLU)
    return TensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spec),
    )


def td3(settings):
    """Loss module, Adam and SoftUpdate in its own order, on rows that lie there."""
    rows, batch = settings.get("rows", 100_000), settings.get("batch", 256)
    cells = list(settings.get("hidden_sizes", [256, 256]))
    spec = Bounded(-1.0, 1.0, (ACTION,), dtype=torch.float32)
    actor = make_actor(settings, OBS, spec)
    critic = ValueOperator(
        MLP(in_features=OBS + ACTION, num_cells=cells, out_features=1, activation_class=torch.nn.ReLU),
        in_keys=["observation", "action"],
    )
    loss = TD3Loss(
        actor, critic, action_spec=spec, num_qvalue_nets=2, policy_noise=0.2, noise_clip=0.5, loss_function="l2",
        delay_actor=True, delay_qvalue=True,
    )  # fmt: skip
    loss.make_value_estimator(gamma=settings.get("gamma", 0.95))
    targets = SoftUpdate(loss, tau=settings.get("tau", 0.02))
    lr = settings.get("lr", 1e-3)
    critics, actors = (
        list(params.flatten_keys().values()) for params in (loss.qvalue_network_params, loss.actor_network_params)
    )
    critic_adam, actor_adam = torch.optim.Adam(critics, lr), torch.optim.Adam(actors, lr)
    obs, action, reward, next_obs, terminated = (torch.from_numpy(x) for x in transitions(rows))
    ends = terminated[:, None]
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(rows), batch_size=batch)
    following = {"observation": next_obs, "reward": reward[:, None], "done": ends, "terminated": ends}
    buffer.extend(TensorDict({"observation": obs, "action": action, "next": following}, [rows]))
    updates = 0

    def update():
        nonlocal updates
        sampled = buffer.sample()
        value, _ = loss.value_loss(sampled)
        critic_adam.zero_grad()
        value.backward()
        critic_adam.step()
        updates += 1
        if updates % 2 == 0:
            value, _ = loss.actor_loss(sampled)
            actor_adam.zero_grad()
            value.backward()
            actor_adam.step()
            targets.step()

    def call():
        for _ in range(8):
            update()
        return 8

    return call


class Collect:
    """MultiAsyncCollector into a replay: frames that are in it.

    With ``pushes`` the policy's weights go out each time.
    """

    def __init__(self, settings):
        from torchrl.collectors import MultiAsyncCollector
        from torchrl.envs import Compose, DoubleToFloat, GymWrapper, TransformedEnv

        task, count = settings["task"], settings.get("processes", 2)

        def make():
            return TransformedEnv(GymWrapper(gymnasium_env(task)), Compose(DoubleToFloat()))

        env = make()
        spec, size = env.action_spec, env.observation_spec["observation"].shape[-1]
        env.close()
        actor = make_actor(settings, size, spec)
        noise = AdditiveGaussianModule(spec, sigma_init=0.3, sigma_end=0.3, annealing_num_steps=1)
        policy = TensorDictSequential(actor, noise)
        self.collector = MultiAsyncCollector([make] * count, policy, frames_per_batch=200, total_frames=-1)
        self.buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), batch_size=256)
        self.frames, self.pushes = iter(self.collector), settings.get("pushes", False)

    def __call__(self):
        """One batch of frames."""
        batch = next(self.frames).reshape(-1)
        self.buffer.extend(batch)
        if self.pushes:
            self.collector.update_policy_weights_()
        return len(batch)


ARMS = {"td3": td3, "collect": Collect}
