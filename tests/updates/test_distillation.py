"""Distillation: towards a slow copy, a teacher's file, or into a flat student."""

import pytest
import torch

from claw_lightning import losses
from claw_lightning.errors import ConfigError
from claw_lightning.settings import Distillation
from claw_lightning.updates.actor import update_actor
from claw_lightning.updates.distillation import (
    distillation_coefficient,
    load_teacher,
    move_reference,
    student_loss,
    update_student,
)
from claw_lightning.updates.options import update_options
from tests.runs import SPEC, fit_fake, fit_lockstep, make_batch, make_module
from tests.updates.support import DISCRETE, capture, constant, make_discrete, make_rows, sgd

LOCKSTEP = {"max_env_steps": 140, "warmup_steps": 100, "updates_per_step": 1, "eval_episodes": 2}


def target(**settings):
    return Distillation(**{"kind": "target", "coefficient": 1.0, **settings})


# -- a slow copy ------------------------------------------------------------------------------------------------------


def test_the_copy_starts_where_the_policy_is_and_follows_by_tau(monkeypatch):
    module = make_module(num_options=2, distillation=target(tau=0.1), build=True)
    capture(module, monkeypatch)
    before = [p.detach().clone() for p in module.policy.parameters()]
    with torch.no_grad():
        for p in module.policy.parameters():
            p.add_(1.0)
    move_reference(module)
    for then, p in zip(before, module.reference.parameters()):
        torch.testing.assert_close(p, then + 0.1)
        assert not p.requires_grad


@pytest.mark.parametrize("actor", ["deterministic", "gaussian", "categorical"])
def test_the_loss_is_zero_at_the_start_and_then_the_weighted_divergence(monkeypatch, actor):
    settings = {"num_options": 2, "distillation": target(coefficient=0.5, std=0.2)}
    module = make_discrete(**settings) if actor == "categorical" else make_module(actor=actor, build=True, **settings)
    rows = make_rows(num_actions=3 if actor == "categorical" else 0, weight=torch.rand(8, 2))
    capture(module, monkeypatch)
    update_actor(module, rows)
    assert float(module._sums["loss/distillation"]) == pytest.approx(0.0, abs=1e-9)
    with torch.no_grad():
        for p in module.policy.actor.parameters():
            p.add_(0.1 * torch.randn_like(p))
    module._sums.clear()
    update_actor(module, rows)
    mine, theirs = module.policy.actor.forward_all(rows.obs), module.reference.actor.forward_all(rows.obs)
    if actor == "categorical":
        apart = losses.categorical_kl(theirs.softmax(-1), mine.softmax(-1))
    elif actor == "gaussian":
        apart = losses.gaussian_kl(*module.policy.actor.gaussian(theirs), *module.policy.actor.gaussian(mine))
    else:
        apart = (theirs.tanh() - mine.tanh()).square().sum(-1) / (2 * 0.2**2)
    want = float((rows.weight * apart).sum() / rows.weight.sum())
    assert want > 0
    assert float(module._sums["loss/distillation"]) == pytest.approx(want, rel=1e-4)
    assert float(module._sums["distillation/coefficient"]) == pytest.approx(0.5)


def test_every_policy_is_pulled_back_to_the_copy(monkeypatch):
    """A strong pull undoes a displacement of actor, option policy and termination alike."""
    module = make_module(
        num_options=2, distillation=target(coefficient=100.0, std=1.0), action_penalty=0.0, option_entropy=0.0,
        termination_entropy=0.0, initial_termination=0.5, build=True,
    )  # fmt: skip
    monkeypatch.setattr(module.next_values, "options", constant([0.0, 0.0]))
    rows, policy = make_rows(), module.policy
    with torch.no_grad():
        for net in (policy.actor.body, policy.option_policy, policy.termination):
            net[-1].bias.add_(torch.tensor([0.5, -0.5]))

    def apart():
        with torch.no_grad():
            mine = policy.actor(rows.obs, rows.option), policy.option_probs(rows.obs), policy.beta(rows.obs)
            ref = module.reference
            theirs = ref.actor(rows.obs, rows.option), ref.option_probs(rows.obs), ref.beta(rows.obs)
            return [float((a - b).abs().max()) for a, b in zip(mine, theirs)]

    before = apart()
    capture(module, monkeypatch, sgd(1e-3))
    for _ in range(100):
        update_actor(module, rows)
        update_options(module, rows)
    for then, now in zip(before, apart()):
        assert now < 0.5 * then


@pytest.mark.parametrize("limit, direction", [(1e-3, 1), (1e3, -1)])
def test_dual_ascent_raises_the_coefficient_where_the_divergence_exceeds_the_limit(monkeypatch, limit, direction):
    module = make_module(num_options=2, distillation=target(coefficient=0.3, kl_limit=limit), build=True)
    assert float(distillation_coefficient(module)) == pytest.approx(0.3)
    with torch.no_grad():
        module.policy.actor.body[-1].bias.add_(1.0)

    def step(name, network):
        if name == "multiplier":
            module.log_multiplier.data -= 1e-3 * module.log_multiplier.grad

    capture(module, monkeypatch, step)
    update_actor(module, make_rows())
    assert (float(distillation_coefficient(module)) - 0.3) * direction > 0


def test_the_coefficient_follows_its_schedule():
    module = make_module(distillation=target(final_coefficient=0.0, decay_steps=100), build=True)
    for steps, want in ((0, 1.0), (25, 0.75), (100, 0.0), (1000, 0.0)):
        module.env_steps = steps
        assert float(distillation_coefficient(module)) == pytest.approx(want)


# -- a teacher --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory):
    """Checkpoint of a lock-step run."""
    folder = tmp_path_factory.mktemp("teacher")
    trainer, _, _ = fit_lockstep(folder, model={"num_options": 2}, data=LOCKSTEP, limit_val_batches=0)
    trainer.save_checkpoint(folder / "teacher.ckpt")
    return folder / "teacher.ckpt", trainer.lightning_module


def test_a_teacher_is_the_frozen_policy_of_its_checkpoint(teacher_path):
    path, module = teacher_path
    teacher = load_teacher(str(path), module.spec, 2, "deterministic")
    assert teacher.flatten().tolist() == module.policy.flatten().tolist()
    assert not any(p.requires_grad for p in teacher.parameters()) and not teacher.training


@pytest.mark.parametrize("change, said", [
    ({"obs_size": 7}, ("obs_size 3", "obs_size 7")),
    ({"action_size": 5}, ("action_size 1", "action_size 5")),
    ({"num_options": 4}, ("num_options 2", "num_options is 4")),
    ({"actor": "gaussian"}, ("actor deterministic", "actor gaussian")),
])  # fmt: skip
def test_a_teacher_of_another_shape_is_refused_with_both_named(teacher_path, change, said):
    path, module = teacher_path
    sizes = {name: change.get(name, getattr(module.spec, name)) for name in ("obs_size", "action_size")}
    spec = type(SPEC)("other", **sizes, action_low=[-1.0], action_high=[1.0])
    with pytest.raises(ConfigError, match=r"model\.distillation\.teacher") as error:
        load_teacher(str(path), spec, change.get("num_options", 2), change.get("actor", "deterministic"))
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in said)


@pytest.mark.parametrize("kind", ["missing", "text", "foreign", "folder"])
def test_what_is_no_checkpoint_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / "teacher.ckpt"
    if kind == "text":
        path.write_text("not a checkpoint\n")
    elif kind == "foreign":
        torch.save({"state_dict": {}}, path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(ConfigError, match=r"model\.distillation\.teacher") as error:
        load_teacher(str(path), SPEC, 2, "deterministic")
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    assert ("no such file" in str(error.value)) == (kind == "missing")


def test_a_run_draws_its_policies_to_the_teacher_seen_through_its_own_normaliser(tmp_path):
    settings = {"num_options": 2, "actor_lr": 1e-2}
    module = make_module(seed=5, **settings)
    trainer, _ = fit_fake(module, [make_batch(2, num_options=2)])
    module.policy.normalizer.mean.fill_(0.3)
    with torch.no_grad():
        module.policy.actor.body[-1].bias.copy_(torch.tensor([1.0, -1.0]))
    trainer.save_checkpoint(tmp_path / "teacher.ckpt")
    distances = {}
    for coefficient in (0.0, 1000.0):
        d = Distillation("teacher", coefficient=coefficient, teacher=str(tmp_path / "teacher.ckpt"), std=1.0)
        student = make_module(distillation=d, **settings)
        fit_fake(student, [make_batch(10, num_options=2, seed=s) for s in range(3)])
        teacher = student.reference_policy
        obs, option = torch.randn(64, 3), torch.arange(64) % 2
        mine, theirs = (p.actor.mean_action(p.actor(p.normalizer(obs), option)) for p in (student.policy, teacher))
        distances[coefficient] = float((mine - theirs).square().mean())
        assert float(teacher.normalizer.mean[0]) == pytest.approx(0.3)
        assert not any("teacher" in name for name in student.state_dict())
    assert distances[1000.0] < 0.7 * distances[0.0]


# -- a student --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor", ["deterministic", "gaussian", "categorical"])
def test_with_beta_0_the_student_imitates_the_option_that_is_active(monkeypatch, actor):
    settings = {"num_options": 2, "distillation": Distillation("student", student_hidden_sizes=[16])}
    module = make_discrete(**settings) if actor == "categorical" else make_module(actor=actor, build=True, **settings)
    policy = module.policy
    monkeypatch.setattr(policy, "beta", constant([0.0, 0.0]))
    monkeypatch.setattr(policy, "option_probs", constant([0.0, 1.0]))  # chosen never, as nothing ends
    with torch.no_grad():  # options far apart
        policy.actor.embedding.weight.mul_(10.0)
        policy.actor.body[-1].weight.mul_(100.0)
    obs = torch.randn(64, 3)
    previous = torch.zeros(64, dtype=torch.int64)
    raw = policy.actor.forward_all(obs).detach()
    kl = {"gaussian": lambda a, b: losses.gaussian_kl(*policy.actor.gaussian(a), *policy.actor.gaussian(b)),
          "categorical": lambda a, b: losses.categorical_kl(a.softmax(-1), b.softmax(-1)),
          "deterministic": lambda a, b: losses.deterministic_kl(a.tanh(), b.tanh(), 0.2)}[actor]  # fmt: skip
    mine = policy.student(obs, previous)
    assert float(student_loss(policy, obs, previous, 0.2)) == pytest.approx(float(kl(raw[:, 0], mine).mean()), rel=1e-4)
    opening = torch.full((64,), -1)
    assert float(student_loss(policy, obs, opening, 0.2)) == pytest.approx(float(kl(raw[:, 1], mine).mean()), rel=1e-4)

    optimizer = torch.optim.Adam(policy.student.parameters(), lr=1e-2)

    def step(name, network):
        assert name == "student" and network is policy.student
        assert all(p.grad is None for p in policy.actor.parameters())
        optimizer.step()

    capture(module, monkeypatch, step)
    rows = make_rows(64, obs=obs, previous=previous)
    before = float(kl(raw[:, 0], mine).mean())
    for _ in range(200):
        update_student(module, rows)
    mine = policy.student(obs, previous)
    assert float(kl(raw[:, 0], mine).mean()) < 0.5 * before
    assert float(kl(raw[:, 0], mine).mean()) < float(kl(raw[:, 1], mine).mean())


def test_evaluation_plays_the_student_beside_the_options(tmp_path):
    model = {"num_options": 2, "distillation": Distillation("student", student_hidden_sizes=[16])}
    _, module, data = fit_lockstep(tmp_path, model=model, data=LOCKSTEP | {"task": "ClawIdentity-v0"},
                                   limit_train_batches=4)  # fmt: skip
    logged = module.trainer.callback_metrics
    assert {"val/return", "val/student_return", "val/student_length"} <= set(logged)
    assert logged["val/return"] != logged["val/student_return"]


def test_discrete_teachers_are_told_by_their_number_of_actions(tmp_path):
    module = make_discrete()
    torch.save({"claw": {"policy": module.policy_settings},
                "state_dict": {f"policy.{n}": x for n, x in module.policy.state_dict().items()}},
               tmp_path / "t.ckpt")  # fmt: skip
    assert load_teacher(str(tmp_path / "t.ckpt"), DISCRETE, 2, "categorical").num_options == 2
