"""Arms of SheepRL."""

import hydra
import torch
from hydra import compose, initialize_config_module
from lightning.fabric import Fabric
from serve import spaces, transitions
from sheeprl.algos.sac.agent import build_agent
from sheeprl.algos.sac.sac import train
from sheeprl.data.buffers import ReplayBuffer
from sheeprl.utils.utils import dotdict


def sac(settings):
    """``train``: sampling and updates, on rows that lie there."""
    from gymnasium.spaces import Dict
    from omegaconf import OmegaConf

    rows, batch = settings.get("rows", 100_000), settings.get("batch", 256)
    lr = settings.get("lr", 1e-3)
    with initialize_config_module("sheeprl.configs", version_base="1.3"):
        config = compose("config", overrides=[
            "exp=sac", "env=gym", "env.id=Pendulum-v1", "metric.log_level=0", "algo.mlp_keys.encoder=[state]",
            f"algo.gamma={settings.get('gamma', 0.95)}", f"algo.tau={settings.get('tau', 0.005)}",
            *(f"algo.{part}.optimizer.lr={lr}" for part in ("actor", "critic", "alpha")),
        ])  # fmt: skip
    cfg = dotdict(OmegaConf.to_container(config, resolve=True))
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    observations, actions = spaces()
    agent, _ = build_agent(fabric, cfg, Dict({"state": observations}), actions)
    parameters = {
        "critic": agent.qfs.parameters(), "actor": agent.actor.parameters(), "alpha": [agent.log_alpha],
    }  # fmt: skip
    adams = {
        name: fabric.setup_optimizers(
            hydra.utils.instantiate(cfg.algo[name].optimizer, params=list(given), _convert_="all")
        )
        for name, given in parameters.items()
    }
    buffer = ReplayBuffer(rows, 1, memmap=False)
    obs, action, reward, next_obs, terminated = transitions(rows)
    columns = {
        "observations": obs, "actions": action, "rewards": reward[:, None], "next_observations": next_obs,
        "terminated": terminated[:, None].astype("uint8"), "truncated": terminated[:, None].astype("uint8") * 0,
    }  # fmt: skip
    buffer.add({name: values[:, None] for name, values in columns.items()})

    def call():
        # As its main loop: the batches of all updates at once.
        sampled = buffer.sample_tensors(batch_size=batch * 8, sample_next_obs=False, dtype=None, device="cpu")
        data = {name: values.float().flatten(0, 1) for name, values in sampled.items()}
        for start in range(0, batch * 8, batch):
            part = {name: values[start : start + batch] for name, values in data.items()}
            train(fabric, agent, adams["actor"], adams["critic"], adams["alpha"], part, None, 1, cfg, 1)
        return 8

    torch.manual_seed(settings.get("seed", 0))
    return call


ARMS = {"sac": sac}
