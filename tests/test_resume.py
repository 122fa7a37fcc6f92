"""Whole runs that are broken off and go on: bit for bit in lock-step, without a jump in the background."""

import copy
import json

import numpy as np
import pytest
import torch

from callbacks import Curriculum, NoveltyBonus, RunCheckpoint
from claw_lightning import lockstep
from claw_lightning.data import EnvConfig
from claw_lightning.errors import ConfigError
from claw_lightning.exploration import Exploration
from claw_lightning.hooks import UpdateCallback
from claw_lightning.replay import Hindsight
from claw_lightning.replay.samplers import Mixture, Prioritized, Recent, Uniform
from claw_lightning.settings import Distillation
from tests.runs import fit_lockstep, tensors


class StopAt(UpdateCallback):
    """As a signal would: the run ends after the training step in which so many updates are reached."""

    def __init__(self, updates):
        self.updates = updates

    def on_update_end(self, trainer, module):
        if module.updates == self.updates:
            trainer.should_stop = True


def fit(root, steps, case, ckpt=None, stop_at=0, **settings):
    """A run with checkpoints; one that is resumed begins with generators that are elsewhere."""
    case = copy.deepcopy(case)
    torch.manual_seed(0 if ckpt is None else 99)
    np.random.seed(0 if ckpt is None else 99)  # noqa: NPY002
    keep = [*case.get("callbacks", ()), *([StopAt(stop_at)] if stop_at else ()), RunCheckpoint(dirpath=str(root))]
    return fit_lockstep(
        root, 3, keep, case.get("model"), {"max_env_steps": steps, **case.get("data", {})}, ckpt,
        enable_checkpointing=True, check_val_every_n_epoch=2, **{**case.get("trainer", {}), **settings},
    )  # fmt: skip


def everything(run):
    """All that learning goes on from, by name."""
    trainer, module, data = run
    assert module.evaluated_policy is not None  # statistics of the average are copied when it is asked for
    found = dict(tensors(module))
    for i, optimizer in enumerate(trainer.optimizers):
        for place, state in optimizer.state_dict()["state"].items():
            found.update({f"optimizer {i} {place} {name}": value for name, value in state.items()})
    numbers = (module.updates, module.env_steps, data.limiter.inserted, data.limiter.sampled, data.limiter.warmup)
    found["counters"] = torch.tensor(numbers)
    found["episodes"] = torch.tensor([data.episodes.total, *(e.ret for e in data.episodes.recent)])
    return found


K4 = {
    "num_options": 4, "policy_average": 0.01, "target_decision_rate": 0.2, "lr_decay_steps": 400,
    "n_step": 3, "max_grad_norm": 1.0,
    "distillation": Distillation(kind="student"),
    "exploration": Exploration(kind="ornstein_uhlenbeck", uniform=0.2, uniform_steps=3.0),
}  # fmt: skip
CASES = {
    "TD3": {"model": {"num_options": 1}},
    "SAC": {"model": {"num_options": 1, "actor": "gaussian"}, "data": {"pull_every": 3}},
    "K = 4": {
        "model": K4,
        "data": {"sampler": Mixture([Uniform(), Prioritized(anneal_steps=300)], [1.0, 2.0]), "updates_per_step": 3},
        "callbacks": [NoveltyBonus(hidden=8, embedding_size=4)],
    },
    "ring turned over": {"data": {"capacity": 120, "sampler": Prioritized()}, "model": {"num_options": 2}},
    "by age": {"data": {"capacity": 120, "sampler": Recent(half_life=50.0)}},
    "a simulator that changes": {
        "model": {"actor": "categorical", "num_options": 2},
        "data": {"env": EnvConfig("FourRoomsEnv", {}), "envs_per_worker": 2},
        "callbacks": [Curriculum("slip", [0.0, 0.2, 0.3], metric="time/env_steps", threshold=0.0, min_env_steps=100)],
    },
    "EnvPool": {"data": {"env": EnvConfig("EnvPoolEnv", {"task": "Pendulum-v1"})}},
    "hindsight": {
        "data": {"env": EnvConfig("EnvPoolEnv", {"task": "FetchReach-v4"}), "hindsight": Hindsight(),
                 "envs_per_worker": 2},
        "model": {"exploration": Exploration(uniform=0.3)},
    },
    "MuJoCo": {"data": {"env": EnvConfig("GymnasiumEnv", {"task": "Hopper-v5"})}, "model": {"num_options": 1}},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(tmp_path, monkeypatch, name):
    """At a step of no meaning, where the other run writes no checkpoint."""
    monkeypatch.setattr(lockstep, "SPAN", 20)  # simulators are built anew on the way, in both
    case = CASES[name]
    # Only the run without a break evaluates, and stores what it has, on the way.
    whole = everything(fit(tmp_path / "whole", 320, case))
    _, broken, _ = fit(tmp_path / "broken", 320, case, stop_at=41, limit_val_batches=0)
    assert 41 <= broken.updates < 44
    going_on = fit(tmp_path / "going_on", 320, case, tmp_path / "broken/last.ckpt", limit_val_batches=0)
    now = everything(going_on)
    assert now["counters"][0] == whole["counters"][0] > 100
    assert [name for name in whole if not torch.equal(whole[name], now[name])] == []


def test_older_checkpoints_are_exact_while_nothing_they_need_was_overwritten(tmp_path):
    """As best.ckpt may be older than the replay; a run that goes on from it in the same folder stores its own."""
    case = {"model": {"num_options": 1}}
    whole = everything(fit(tmp_path / "whole", 400, case))
    fit(tmp_path / "broken", 200, case)
    early = (tmp_path / "broken/last.ckpt").read_bytes()
    fit(tmp_path / "broken", 300, case, tmp_path / "broken/last.ckpt")
    (tmp_path / "broken/early.ckpt").write_bytes(early)
    going_on = fit(tmp_path / "broken", 400, case, tmp_path / "broken/early.ckpt")
    now = everything(going_on)
    assert [name for name in whole if not torch.equal(whole[name], now[name])] == []
    header = json.loads((tmp_path / "broken/replay/replay.json").read_text())
    assert header["rings"][0]["head"] == going_on[2].memory.rings[0].head == 100


def test_what_makes_a_run_another_one_is_told_and_its_episodes_are_new_ones(tmp_path, caplog, monkeypatch):
    case = {"model": {"num_options": 1}}
    fit(tmp_path, 200, case)
    seeds = []
    begin = lockstep.LockStep.begin
    monkeypatch.setattr(lockstep.LockStep, "begin", lambda self, seed, c: [seeds.append(seed), begin(self, seed, c)])
    last = tmp_path / "last.ckpt"
    with caplog.at_level("INFO"):
        other = {**case, "data": {"env": EnvConfig("GymnasiumEnv", {"task": "Pendulum-v1", "make_kwargs": {"g": 9.0}})}}
        fit(tmp_path / "other", 220, other, last)
        assert "does not go on bit for bit" in caplog.text
        # A simulator that answers to the same actions otherwise.
        monkeypatch.setattr("claw_lightning.rollout.collector.Collector.retrace", lambda *a: False)
        fit(tmp_path / "again", 220, case, last)
        assert "does not repeat itself" in caplog.text
    assert len(set(seeds)) == 1 and seeds[0] != 3


def test_random_states_and_seeds_of_a_resumed_run_are_not_those_of_its_beginning(tmp_path):
    """In the background too: neither the draws nor the workers' episodes come again."""
    from claw_lightning.randomness import derived_seed
    from tests.runs import make_data

    fit(tmp_path, 200, {})
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["ReplayDataModule"]
    data = make_data(mode="overlapped", seed=3)
    fresh = data._settings("collect", 1)["seed"]
    data.load_state_dict(state)
    assert data._settings("collect", 1)["seed"] == derived_seed(3, 200) + 10_007 != fresh
    assert data._settings("evaluate", 0)["seed"] == 3
    assert derived_seed(3, 0) == 3 and derived_seed(3, 200) != derived_seed(3, 201)


class Steps(UpdateCallback):
    """Environment steps and updates, in samples, at each batch."""

    def __init__(self):
        self.seen = []

    def on_batch_sampled(self, trainer, module, batch):
        self.seen.append((batch.env_steps, module.updates))


@pytest.mark.slow
@pytest.mark.parametrize("replay", [True, False])
def test_in_the_background_a_resumed_run_keeps_its_rate_and_makes_no_burst(tmp_path, replay):
    """Of 300 steps and 100 updates of 16 samples, 8 per step after the first 100, which fill the memory."""
    keep = RunCheckpoint(dirpath=str(tmp_path), replay=replay)
    fit_lockstep(tmp_path, callbacks=[keep], limit_val_batches=0, enable_checkpointing=True)
    steps = Steps()
    settings = {"mode": "overlapped", "max_env_steps": 700}
    _, module, data = fit_lockstep(
        tmp_path, callbacks=[steps], data=settings, ckpt=tmp_path / "last.ckpt", limit_val_batches=0
    )
    begin = 300 if replay else 400  # where learning goes on: steps that fill the memory anew owe nothing
    assert steps.seen[0][1] == 100 and begin <= steps.seen[0][0] <= begin + 16
    for env_steps, updates in steps.seen:
        assert 16 * (updates + 2 - 100) <= 8 * (env_steps - begin), "more than was paid for"
    # Neither ahead nor behind by more than the band, all the way.
    behind = [8 * (env_steps - begin) - 16 * (updates - 100) for env_steps, updates in steps.seen]
    assert max(behind) <= data.limiter.band + 8 * data.lanes
    assert (data.env_steps, 16 * (module.updates - 100)) == (700, 8 * (700 - begin))
    assert data.limiter.achieved == 8.0


def test_a_learning_rate_that_fell_is_full_again_where_it_is_not_to_fall(tmp_path):
    """And settings that only act at the start are applied where that can be, and refused where it cannot."""
    fit(tmp_path, 200, {"model": {"lr_decay_steps": 150, "deliberation_cost": 0.1}})
    last = tmp_path / "last.ckpt"
    trainer, module, _ = fit(tmp_path / "b", 220, {"model": {"deliberation_cost": 0.3, "actor_lr": 5e-4}}, last)
    assert float(module.policy.switch_cost) == pytest.approx(0.3)
    rates = {name: o.param_groups[0]["lr"] for name, o in zip(module._optimizer_names, trainer.optimizers, strict=True)}
    assert rates["critic"] == 1e-3 and rates["actor"] == 5e-4
    for model in ({"initial_termination": 0.5}, {"deliberation_cost": 0.3, "target_decision_rate": 0.1}):
        with pytest.raises(ConfigError, match="would do nothing"):
            fit(tmp_path / "c", 220, {"model": {"deliberation_cost": 0.1, "lr_decay_steps": 150, **model}}, last)


def test_the_best_value_of_another_kind_is_none_of_this_one():
    keep, other, same = RunCheckpoint(), RunCheckpoint(monitor="loss/critic", mode="min"), RunCheckpoint()
    keep.best = -3.0
    for each in (other, same):
        each.load_state_dict(keep.state_dict())
    assert (other.best, same.best) == (None, -3.0)
