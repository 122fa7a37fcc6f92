"""The bonus is large where little like it was seen, on a scale of its own, and survives a resume."""

import copy
import math

import numpy as np
import pytest
import torch

from callbacks import NoveltyBonus, RunCheckpoint
from callbacks.novelty import TRAINED_ROWS
from claw_lightning.errors import ConfigError
from claw_lightning.replay import ReplayBatch
from claw_lightning.rollout.normalizer import batch_moments
from tests.runs import SPEC, fit_fake, fit_lockstep, make_batch, make_module


def batch_of(next_obs, valid=None):
    """Batch with these next observations [..., 3]."""
    made = make_batch(1, 1)
    next_obs = torch.as_tensor(next_obs, dtype=torch.float32)
    rows = torch.zeros(*next_obs.shape[:-1], made.layout.words)
    moments = batch_moments(next_obs.reshape(-1, SPEC.obs_size).numpy())
    return ReplayBatch(rows, next_obs, made.layout, moments, 100, valid)


def around(centre, seed, size=64):
    return centre + 0.3 * np.random.default_rng(seed).normal(size=(2, size, SPEC.obs_size))


def test_new_states_get_more_than_those_seen_often():
    torch.manual_seed(0)
    bonus = NoveltyBonus(lr=1e-3)
    first = bonus.intrinsic_reward(None, None, batch_of(around(-1.0, 0)))
    for seed in range(150):
        bonus.intrinsic_reward(None, None, batch_of(around(-1.0, seed)))
    both = np.concatenate((around(-1.0, 1000), around(1.0, 1001)), axis=1)
    seen, new = bonus.intrinsic_reward(None, None, batch_of(both)).split(64, dim=1)
    assert first.shape == seen.shape == (2, 64)
    assert new.min() > seen.max() and new.mean() > 5 * seen.mean()
    assert first.mean() > 5 * seen.mean()


def test_the_bonus_is_the_error_over_its_running_deviation_times_the_scale():
    torch.manual_seed(0)
    bonus, errors = NoveltyBonus(scale=0.5), []
    for seed in range(3):
        batch = batch_of(around(float(seed), seed))
        networks = bonus._prepare(3, torch.device("cpu"))
        before = {name: value.clone() for name, value in networks.state_dict().items()}
        given = bonus.intrinsic_reward(None, None, batch)
        after = networks.state_dict()
        assert any(not torch.equal(before[n], after[n]) for n in before if n.startswith("predictor"))
        assert all(torch.equal(before[n], after[n]) for n in before if n.startswith("target")), "it is frozen"
        changed = {name: after[name].clone() for name in after}
        networks.load_state_dict({**after, **{n: before[n] for n in before if n.startswith("predictor")}})
        with torch.no_grad():
            errors.append(networks.error(networks.normalizer(batch.next_obs.flatten(0, 1))))
        networks.load_state_dict(changed)
        spread = torch.cat(errors).double().std(correction=0)
        torch.testing.assert_close(given.flatten(), (0.5 * errors[-1] / spread).float())
    assert bonus.metrics() == {"novelty/error": pytest.approx(float(torch.stack([e.mean() for e in errors]).mean()))}
    assert bonus.metrics() == {}


def test_rows_outside_segments_get_nothing_and_teach_nothing():
    valid = torch.tensor([[[True, True, False], [True, False, False]]])
    obs = np.random.default_rng(0).normal(size=(1, 2, 3, SPEC.obs_size))

    def first_and_second(filling):
        torch.manual_seed(0)
        bonus, batch = NoveltyBonus(), batch_of(obs, valid)
        batch.next_obs[~valid] = filling
        return [bonus.intrinsic_reward(None, None, batch) for _ in range(2)]

    zeros, others = first_and_second(0.0), first_and_second(7.0)
    assert zeros[0].shape == valid.shape
    for one, other in zip(zeros, others):
        assert torch.equal(one, other) and (one[valid] > 0).all() and (one[~valid] == 0).all()


def test_the_predictor_learns_from_a_part_of_large_batches(monkeypatch):
    bonus = NoveltyBonus()
    networks = bonus._prepare(3, torch.device("cpu"))
    sizes, error = [], networks.error
    monkeypatch.setattr(networks, "error", lambda obs: sizes.append(len(obs)) or error(obs))
    bonus.intrinsic_reward(None, None, batch_of(np.zeros((4, 600, 3))))
    assert sizes == [2400, TRAINED_ROWS]


def test_nothing_varies_and_nothing_breaks():
    value = NoveltyBonus().intrinsic_reward(None, None, batch_of(np.ones((1, 1, 3))))
    assert torch.isfinite(value).all()


def test_state_goes_on_where_it_was():
    torch.manual_seed(0)
    bonus, resumed = NoveltyBonus(), NoveltyBonus()
    assert bonus.state_dict() == {}
    for seed in range(3):
        bonus.intrinsic_reward(None, None, batch_of(around(0.0, seed)))
    resumed.load_state_dict(copy.deepcopy(bonus.state_dict()))  # a file shares no tensors
    assert set(resumed.state_dict()) == {"networks", "optimizer"}, "also before its first batch"
    for seed in (3, 4):
        one, other = (b.intrinsic_reward(None, None, batch_of(around(0.0, seed))) for b in (bonus, resumed))
        assert torch.equal(one, other)
    wrong = NoveltyBonus(hidden=16)
    wrong.load_state_dict(bonus.state_dict())
    with pytest.raises(ConfigError, match="embedding_size and hidden") as error:
        wrong.intrinsic_reward(None, None, batch_of(around(0.0, 5)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{}, {"n_step": 3, "num_options": 1}])
def test_whole_run_logs_saves_and_resumes(tmp_path, settings):
    def run(**more):
        bonus = NoveltyBonus(scale=0.1, hidden=16)
        callbacks = [bonus, RunCheckpoint(dirpath=str(tmp_path))]
        _, module, _ = fit_lockstep(
            tmp_path, callbacks=callbacks, model=settings, limit_val_batches=0, enable_checkpointing=True, **more
        )
        return bonus, module.latest_metrics

    bonus, metrics = run()
    assert metrics["novelty/error"] > 0 and metrics["reward/intrinsic"] > 0
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"][bonus.state_key]
    errors = int(stored["networks"]["error_count"])
    resumed, _ = run(data={"max_env_steps": 500}, ckpt=tmp_path / "last.ckpt")
    more = int(resumed.state_dict()["networks"]["error_count"]) - errors
    assert 0.9 * errors < more < 1.1 * errors, "100 updates, then 100 more; segments differ in length"


def test_reduced_precision_of_the_trainer_leaves_it_alone():
    bonus = NoveltyBonus()
    fit_fake(make_module(), [make_batch()], [bonus], precision="bf16-mixed")
    assert all(v.dtype != torch.bfloat16 for v in bonus.state_dict()["networks"].values())


@pytest.mark.parametrize(
    "arguments, key",
    [
        ({"scale": -1.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"embedding_size": 0}, "embedding_size"),
        ({"hidden": 0}, "hidden"),
        ({"lr": 0.0}, "lr"),
    ],
)
def test_bad_arguments_are_named(arguments, key):
    with pytest.raises(ConfigError, match=rf"NoveltyBonus\.{key}"):
        NoveltyBonus(**arguments)
