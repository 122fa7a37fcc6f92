"""ReplayDataModule: what it refuses, how it paces a run, and how a run ends and resumes."""

import copy
import io
import math
import os
import shutil
import signal
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from callbacks import RunCheckpoint
from claw_lightning import data as data_room
from claw_lightning.data import EnvConfig, ReplayDataModule
from claw_lightning.errors import ConfigError, WorkerError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.replay import Hindsight
from claw_lightning.replay.samplers import ByOption, Fresh, Mixture, OptionSegments, Prioritized, Recent, Uniform
from claw_lightning.settings import PolicyGradient
from tests.builders import FAKES
from tests.fakes.fake_envs import ConfigurableEnv
from tests.runs import fit_lockstep, make_data, make_module, tensors


@pytest.mark.parametrize(
    "settings, key",
    [
        ({"num_workers": 0}, "data.num_workers"),
        ({"envs_per_worker": 0}, "data.envs_per_worker"),
        ({"worker_threads": 0}, "data.worker_threads"),
        ({"capacity": 0}, "data.capacity"),
        ({"batch_size": 0}, "data.batch_size"),
        ({"updates_per_step": -1}, "data.updates_per_step"),
        ({"samples_per_insert": 0.0}, "data.samples_per_insert"),
        ({"samples_per_insert": math.nan}, "data.samples_per_insert"),
        ({"samples_per_insert": 1e-300}, "data.samples_per_insert"),
        ({"rate_band": math.inf}, "data.rate_band"),
        ({"learner_threads": 0}, "data.learner_threads"),
        ({"seed": -1}, "data.seed"),
        ({"worker_device": "cuda:x"}, "data.worker_device"),
        ({"pull_every": 0}, "data.pull_every"),
        ({"eval_episodes": 0}, "data.eval_episodes"),
        ({"eval_envs": 0}, "data.eval_envs"),
        ({"warmup_steps": -1}, "data.warmup_steps"),
        ({"max_env_steps": -1}, "data.max_env_steps"),
        ({"restart_budget": -1}, "data.restart_budget"),
        ({"restart_window": 0.0}, "data.restart_window"),
        ({"recycle_steps": -1}, "data.recycle_steps"),
        ({"deadlines": {"stepp": 5.0}}, "data.deadlines"),
        ({"deadlines": {"step": 0.0}}, "data.deadlines.step"),
        ({"deadlines": {"step": math.nan}}, "data.deadlines.step"),
        ({"on_worker_failure": "retry"}, "data.on_worker_failure"),
        ({"batch_size": 5000}, "data.batch_size"),
        ({"warmup_steps": 5000, "max_env_steps": 0}, "data.warmup_steps"),
        ({"max_env_steps": 100}, "data.max_env_steps"),
        ({"capacity": 28, "warmup_steps": 20}, "data.capacity"),
        ({"worker_device": "gpu"}, "data.worker_device"),
        ({"max_env_steps": 102}, "data.max_env_steps"),
        # Rounded to whole vector steps nothing is left, although 5 steps would pay for an update.
        ({"envs_per_worker": 16, "warmup_steps": 97, "max_env_steps": 102, "samples_per_insert": 100}, "max_env_steps"),
        ({"rate_band": 1.0}, "data.rate_band"),
        ({"env": None}, "data.env"),
    ],
)
def test_wrong_settings_are_named_in_one_line(settings, key):
    with pytest.raises(ConfigError) as error:
        make_data(**settings)
    assert key in str(error.value) and "\n" not in str(error.value)


def test_a_replay_larger_than_memory_is_refused_with_what_would_fit(monkeypatch):
    data = make_data()
    monkeypatch.setattr(data_room, "available_memory", lambda: 50_000)
    with pytest.raises(ConfigError, match=r"data\.capacity.*would fit") as error:
        data.setup("fit")
    assert "\n" not in str(error.value)
    fits = int(str(error.value).split("; ")[1].split(" ")[0].replace(",", ""))
    monkeypatch.setattr(data_room, "available_memory", lambda: 10**9)
    data.setup("fit")
    assert 8 < fits < data.capacity


def test_an_unknown_task_is_an_error_of_one_line():
    with pytest.raises(ConfigError, match="NoSuchTask-v0") as error:
        make_data(task="NoSuchTask-v0").setup("fit")
    assert "\n" not in str(error.value)


def test_limiter_is_wired_to_the_settings():
    limiter = make_data(num_workers=2, envs_per_worker=8, warmup_steps=100, max_env_steps=301).limiter
    assert (limiter.samples_per_insert, limiter.request) == (8, 32)
    # Whole vector steps of one worker: the warm-up rounded up, the end rounded down.
    assert (limiter.warmup, limiter.max_inserts) == (104, 296)
    assert limiter.band == 2 * (32 + 16 * 8)


# -- whole runs in lock-step --------------------------------------------------------------------------------------


class Journal(UpdateCallback):
    """Steps and updates at each training step and each validation."""

    def __init__(self):
        self.steps, self.validations, self.versions = [], [], []

    def on_batch_sampled(self, trainer, module, batch):
        self.steps.append((trainer.datamodule.env_steps, module.updates))
        self.versions.append(int(batch.version.max()))

    def on_validation_end(self, trainer, module):
        self.validations.append((module.env_steps, module.updates))


@pytest.mark.parametrize("num_options", [1, 4])
def test_lockstep_runs_are_bit_exact_for_a_seed(tmp_path, num_options):
    def final(seed):
        return dict(tensors(fit_lockstep(tmp_path, seed, model={"num_options": num_options}, limit_val_batches=0)[1]))

    first, again, other = final(3), final(3), final(4)
    assert {"moments.mean", "policy.normalizer.mean"} <= set(first)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["moments.mean"], other["moments.mean"])
    assert any(not torch.equal(first[n], other[n]) for n in first if n.startswith("critic"))


def test_a_run_ends_at_max_env_steps_with_a_last_validation(tmp_path):
    journal = Journal()
    trainer, module, data = fit_lockstep(tmp_path, callbacks=[journal])
    assert data.finished and data.env_steps == module.env_steps == 300
    # (300 - 100) steps x 8 samples per step / 16 samples per update
    assert module.updates == 100 and data.limiter.achieved == 8.0
    assert journal.validations == [(300, 100)]
    assert {"val/return", "val/length", "val/return_std"} <= set(trainer.callback_metrics)
    assert float(trainer.callback_metrics["val/length"]) == 200.0
    # Learning began at the warm-up and never outran what was owed.
    assert journal.steps[0][0] >= 100
    assert all(updates * 16 <= (steps - 100) * 8 for steps, updates in journal.steps)


def test_evaluation_repeats_for_a_seed_and_a_policy(tmp_path):
    data, module = make_data(), make_module()
    data.setup("validate")
    module.build(data.spec)
    first, again = (data.evaluate(module.policy, module.agent_settings(), 3, 11) for _ in range(2))
    other = data.evaluate(module.policy, module.agent_settings(), 3, 12)
    data.close()
    assert len(first["return"]) == 3 and first == again
    assert other["return"] != first["return"]
    assert sum(first["option"]) == pytest.approx(1.0)


# -- resuming -----------------------------------------------------------------------------------------------------


def stored(data):
    """State as a checkpoint brings it back: tensors and plain containers alone."""
    file = io.BytesIO()
    torch.save(data.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_state_is_plain_and_owes_no_burst():
    data, resumed = make_data(max_env_steps=0), make_data(max_env_steps=0)
    data.limiter.inserted, data.limiter.sampled = 300, 8 * 200 - 32
    resumed.load_state_dict(stored(data))
    assert resumed.env_steps == 300
    assert not resumed.limiter.can_sample
    resumed.limiter.inserted = 399
    assert not resumed.limiter.can_sample, "the memory is filled to the warm-up size first"
    resumed.limiter.inserted = 400
    assert resumed.limiter.can_sample
    assert resumed.limiter.error == data.limiter.error == 32


def test_a_run_stopped_while_it_filled_its_memory_waits_for_one_warm_up_only():
    data = make_data(max_env_steps=0)
    for inserted in (60, 80):  # stopped twice
        data.limiter.inserted = inserted
        state, data = data.state_dict(), make_data(max_env_steps=0)
        data.load_state_dict(state)
        assert data.limiter.warmup == inserted + 100


def test_resumed_run_refills_and_continues_counters_and_versions(tmp_path):
    keep, journal = RunCheckpoint(dirpath=str(tmp_path), replay=False), Journal()
    settings = {"enable_checkpointing": True}
    _, module, _ = fit_lockstep(tmp_path, callbacks=[keep], limit_val_batches=0, **settings)
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert (stored["claw"]["updates"], stored["claw"]["env_steps"]) == (100, 300)
    trainer, resumed, data = fit_lockstep(
        tmp_path, callbacks=[journal], data={"max_env_steps": 500}, ckpt=tmp_path / "last.ckpt", limit_val_batches=0
    )
    assert journal.steps[0][1] == 100 and 400 <= journal.steps[0][0] <= 412
    # What a resumed run collects is the work of the policy it resumed from, not of version 0.
    assert journal.versions[0] == 100
    # One hundred steps refilled the memory, one hundred were learned from.
    assert (data.env_steps, resumed.updates) == (500, 150)
    assert trainer.global_step == 75


@pytest.mark.parametrize("changes", [{}, {"capacity": 3000}, {"envs_per_worker": 2}])
def test_resumed_run_has_its_experience_again(tmp_path, changes):
    """In rings of the same shapes or of others; it learns on at once and owes nothing."""
    keep, journal = RunCheckpoint(dirpath=str(tmp_path)), Journal()
    settings = {"enable_checkpointing": True}
    _, _, before = fit_lockstep(tmp_path, callbacks=[keep], limit_val_batches=0, **settings)
    trainer, resumed, data = fit_lockstep(
        tmp_path, callbacks=[journal], data={"max_env_steps": 500, **changes}, ckpt=tmp_path / "last.ckpt",
        limit_val_batches=0,
    )  # fmt: skip
    assert journal.steps[0][1] == 100 and 300 <= journal.steps[0][0] <= 304
    assert (data.env_steps, resumed.updates, trainer.global_step) == (500, 200, 100)
    assert resumed.moments.count == 500 and data.limiter.achieved == pytest.approx(8.0, rel=0.4)
    [old], [new] = before.memory.rings, data.memory.rings
    start, stop = old.layout.fields["obs"][0], old.layout.fields["flags"][0]
    lanes = [old.rows[: old.head, lane, start:stop] for lane in range(old.num_lanes)]
    if changes.get("envs_per_worker"):  # lanes behind one another, each with a border behind it
        gap = np.zeros((1, stop - start), np.float32)
        lanes = [np.concatenate([lanes[lane], gap, lanes[lane + 2]]) for lane in range(2)]
    for lane, rows in enumerate(lanes):
        assert (new.rows[: len(rows), lane, start:stop].view("i4") == rows.view("i4")).all()


def test_a_resume_of_a_resume_with_other_lanes_loses_nothing(tmp_path):
    keep, settings = RunCheckpoint(dirpath=str(tmp_path)), {"enable_checkpointing": True, "limit_val_batches": 0}
    fit_lockstep(tmp_path, callbacks=[keep], **settings)
    last = tmp_path / "last.ckpt"
    for steps, lanes in ((400, 2), (500, 4)):
        _, _, data = fit_lockstep(tmp_path, callbacks=[keep], ckpt=last, **settings,
                                  data={"max_env_steps": steps, "envs_per_worker": lanes})  # fmt: skip
        assert data.env_steps == steps and data.memory.stored > 0.97 * steps - 10
        assert len(data.memory.rings) == 1


def test_a_replay_of_another_run_is_not_taken_for_ones_own(tmp_path, caplog):
    keep, settings = RunCheckpoint(dirpath=str(tmp_path)), {"enable_checkpointing": True, "limit_val_batches": 0}
    fit_lockstep(tmp_path, callbacks=[keep], **settings)
    other = tmp_path / "other"
    fit_lockstep(tmp_path, seed=1, callbacks=[RunCheckpoint(dirpath=str(other), replay=False)], **settings)
    shutil.copy(other / "last.ckpt", tmp_path)  # beside the first run's replay
    with caplog.at_level("WARNING"):
        _, _, data = fit_lockstep(tmp_path, ckpt=tmp_path / "last.ckpt", data={"max_env_steps": 500}, **settings)
    assert "is the replay of another run" in caplog.text
    assert data.memory.inserted == 200
    # A run that stores its own in that folder takes the place of the other one, as its checkpoint does.
    fit_lockstep(tmp_path, seed=2, callbacks=[keep], data={"envs_per_worker": 2}, **settings)
    _, _, data = fit_lockstep(tmp_path, ckpt=tmp_path / "last.ckpt", data={"max_env_steps": 500, "envs_per_worker": 2},
                              **settings)  # fmt: skip
    assert data.memory.inserted == 500


def test_steps_that_are_newer_than_the_checkpoint_are_of_no_later_policy(tmp_path):
    keep, settings = RunCheckpoint(dirpath=str(tmp_path)), {"enable_checkpointing": True, "limit_val_batches": 0}
    fit_lockstep(tmp_path, callbacks=[keep], data={"max_env_steps": 200}, **settings)
    early = (tmp_path / "last.ckpt").read_bytes()
    fit_lockstep(tmp_path, callbacks=[keep], ckpt=tmp_path / "last.ckpt", data={"max_env_steps": 400}, **settings)
    (tmp_path / "early.ckpt").write_bytes(early)  # as best.ckpt may be older than the replay
    journal = Journal()
    _, module, data = fit_lockstep(tmp_path, callbacks=[journal], ckpt=tmp_path / "early.ckpt", limit_val_batches=0,
                                   data={"max_env_steps": 300})  # fmt: skip
    assert journal.steps[0] == (200, 50) or journal.steps[0][1] == 50
    assert max(journal.versions[:1]) <= 50 and data.env_steps == 300


def test_a_replay_in_files_may_be_larger_than_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(data_room, "available_memory", lambda: 2_000_000)
    with pytest.raises(ConfigError, match="data.capacity"):
        make_data(capacity=200_000).setup("fit")
    make_data(capacity=200_000, replay_path=str(tmp_path)).setup("fit")


def test_the_normaliser_counts_initial_experience_once(tmp_path):
    keep, settings = RunCheckpoint(dirpath=str(tmp_path / "b")), {"enable_checkpointing": True, "limit_val_batches": 0}
    fit_lockstep(tmp_path, callbacks=[RunCheckpoint(dirpath=str(tmp_path / "a"))], **settings)
    initial = {"initial_replay": str(tmp_path / "a" / "replay")}
    _, first, _ = fit_lockstep(tmp_path, callbacks=[keep], data={**initial, "max_env_steps": 200}, **settings)
    _, second, _ = fit_lockstep(
        tmp_path, ckpt=tmp_path / "b/last.ckpt", data={**initial, "max_env_steps": 300}, **settings
    )
    assert float(second.moments.count) == float(first.moments.count) + 100


def test_a_stored_replay_that_was_cut_is_an_error_of_one_line(tmp_path):
    fit_lockstep(tmp_path, callbacks=[RunCheckpoint(dirpath=str(tmp_path))], limit_val_batches=0,
                 enable_checkpointing=True)  # fmt: skip
    rows = tmp_path / "replay" / "ring_0.rows"
    os.truncate(rows, rows.stat().st_size // 2)
    with pytest.raises(ConfigError, match="replay") as error:
        fit_lockstep(tmp_path, data={"max_env_steps": 500}, ckpt=tmp_path / "last.ckpt")
    assert "\n" not in str(error.value)


def test_a_run_begins_with_the_experience_of_another_one(tmp_path):
    fit_lockstep(tmp_path, callbacks=[RunCheckpoint(dirpath=str(tmp_path))], limit_val_batches=0,
                 enable_checkpointing=True)  # fmt: skip
    journal = Journal()
    _, module, data = fit_lockstep(
        tmp_path, seed=1, callbacks=[journal], limit_val_batches=0,
        data={"initial_replay": str(tmp_path / "replay"), "envs_per_worker": 2, "max_env_steps": 200},
    )  # fmt: skip
    # What another run has collected is neither counted as a step of this one nor learned from less.
    assert (data.env_steps, module.updates) == (200, 50) and journal.steps[0][0] >= 100
    assert data.memory.stored > 200 + 250
    assert module.moments.count > 450


@pytest.mark.parametrize(
    "path, message", [("nowhere", "nowhere"), ("minari:no/such-v0", "minari"), ("", None)]
)  # fmt: skip
def test_experience_that_is_not_there_is_named_in_one_line(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    if message is None:
        assert make_data(initial_replay=path).initial_replay is None
        return
    with pytest.raises(ConfigError, match=message) as error:
        fit_lockstep(tmp_path, data={"initial_replay": path})
    assert "\n" not in str(error.value)


def test_rings_in_files_that_nobody_else_sees(tmp_path):
    folder = tmp_path / "rings"
    _, plain, _ = fit_lockstep(tmp_path, limit_val_batches=0)
    _, module, data = fit_lockstep(tmp_path, limit_val_batches=0, data={"replay_path": str(folder)})
    assert list(folder.iterdir()) == []  # gone, although the rings live
    assert str(folder) in os.readlink(f"/proc/self/fd/{data.memory.rings[0].block.fd}")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors(plain), tensors(module), strict=True))


def test_a_folder_for_rings_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data.replay_path: no rings can be made in .*file"):
        fit_lockstep(tmp_path, data={"replay_path": str(tmp_path / "file")})


# -- samplers -----------------------------------------------------------------------------------------------------

SAMPLERS = {
    "prioritized": (Prioritized(anneal_steps=300), {}),
    "by option": (ByOption(correct=True), {}),
    "recent": (Recent(half_life=100.0), {}),
    "fresh": (Fresh(scale=10.0, max_staleness=100), {}),
    "option segments": (OptionSegments(), {"n_step": 4}),
    "mixture": (Mixture([Uniform(), Prioritized()], [1.0, 3.0]), {}),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_runs_with_every_sampler_are_bit_exact_too(tmp_path, name):
    def final():
        sampler, model = copy.deepcopy(SAMPLERS[name])
        return fit_lockstep(tmp_path, 3, model=model, data={"sampler": sampler}, limit_val_batches=0)

    (_, first, data), (_, again, _) = final(), final()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors(first), tensors(again), strict=True))
    assert all(math.isfinite(value) for value in data.sampler.metrics().values())
    if "prioritized" in data.state_dict()["sampler"]:
        assert data.state_dict()["sampler"]["prioritized"]["maximum"] > 0


@pytest.mark.parametrize(
    "sampler, model, message",
    [
        (OptionSegments(), {}, "data.sampler OptionSegments draws segments"),
        (Prioritized(), {"policy_gradient": PolicyGradient(), "actor": "gaussian"}, "has none"),
    ],
)
def test_samplers_that_do_not_fit_the_model_are_refused(tmp_path, sampler, model, message):
    with pytest.raises(ConfigError, match=message) as error:
        fit_lockstep(tmp_path, model=model, data={"sampler": sampler})
    assert "\n" not in str(error.value)


def test_hindsight_needs_goals(tmp_path):
    with pytest.raises(ConfigError, match="task Pendulum-v1 has no achieved_goal"):
        fit_lockstep(tmp_path, data={"hindsight": Hindsight()})


def test_a_closed_data_module_says_so_instead_of_waiting(tmp_path):
    trainer, module, data = fit_lockstep(tmp_path, limit_val_batches=0)
    with pytest.raises(ConfigError, match="closed"):
        data.start_workers()


def test_without_virtual_epochs_the_warm_up_is_uniform_too(tmp_path):
    """Without `limit_train_batches` Lightning fetches a batch before `on_train_start`."""

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.actions = batch.action.abs().mean()
            trainer.should_stop = True

    stop = Stop()
    fit_lockstep(tmp_path, callbacks=[stop], limit_train_batches=None, limit_val_batches=0)
    assert float(stop.actions) == pytest.approx(0.5, abs=0.15)


def test_a_simulator_that_leaves_in_lock_step_is_an_error(monkeypatch):
    def leave(*arguments):
        raise SystemExit(0)

    monkeypatch.setattr("claw_lightning.data.make_env", leave)
    with pytest.raises(WorkerError, match=r"the simulator called exit\(0\)"):
        make_data().describe()


def test_simulators_are_never_built_from_plain_dictionaries():
    with pytest.raises(ConfigError, match="EnvConfig"):
        ReplayDataModule(env={"class_path": "GymnasiumEnv"})
    assert EnvConfig().class_path == "EnvPoolEnv"


# -- background processes -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [None, True])
def test_overlapped_run_and_evaluation_in_processes_of_their_own(tmp_path, prefetch):
    journal = Journal()
    data = {"mode": "overlapped", "num_workers": 2, "envs_per_worker": 2, "prefetch": prefetch}
    trainer, module, data = fit_lockstep(tmp_path, callbacks=[journal], data=data)
    assert data.env_steps == 300 and module.updates == 100
    assert journal.validations == [(300, 100)]
    assert float(trainer.callback_metrics["val/length"]) == 200.0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "describe.log",
        "evaluator.log",
        "learner.log",
        "worker_0.log",
        "worker_1.log",
    ]
    assert data.pool.workers == [] and data._evaluator is None


# -- settings of running simulators -------------------------------------------------------------------------------

CONFIGURABLE = EnvConfig(f"{ConfigurableEnv.__module__}.ConfigurableEnv")


@pytest.mark.parametrize("value", [math.nan, math.inf, None, [1.0], torch.tensor(1.0)])
def test_settings_of_simulators_that_no_pipe_carries_are_named(value):
    with pytest.raises(ConfigError, match="configure_envs: bonus is"):
        make_data(env=CONFIGURABLE).configure_envs(bonus=value)


def test_lock_step_is_configured_at_once_and_evaluations_only_on_request(tmp_path):
    class Change(UpdateCallback):
        def __init__(self):
            self.before = self.after = None
            self.returns = []

        def on_batch_sampled(self, trainer, module, batch):
            data = trainer.datamodule
            simulator = data._local.env
            if self.before is not None:
                return
            self.before = simulator.bonus
            for evaluation in (False, True):
                self.returns.append(self.evaluate(data, module))
                data.configure_envs(bonus=100, evaluation=evaluation)
            self.returns.append(self.evaluate(data, module))
            self.after = simulator.bonus
            data.configure_envs()
            with pytest.raises(ConfigError, match="this hand has no.*mass"):
                data.configure_envs(mass=1.0)

        @staticmethod
        def evaluate(data, module):
            return sorted(data.evaluate(module.policy, module.agent_settings(), 2, 1)["return"])

    change, data = Change(), {"env": CONFIGURABLE}
    fit_lockstep(tmp_path, callbacks=[change], data=data, limit_val_batches=0)
    assert (change.before, change.after) == (0.0, 100)
    assert change.returns == [[6.0, 15.0], [6.0, 15.0], [306.0, 515.0]]


def test_what_was_configured_before_the_start_holds_from_the_first_step(tmp_path):
    class Early(pl.Callback):
        def on_fit_start(self, trainer, module):
            trainer.datamodule.configure_envs(bonus=100)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.lowest = float(batch.reward.min())

    early = Early()
    fit_lockstep(tmp_path, callbacks=[early], data={"env": CONFIGURABLE}, limit_val_batches=0)
    assert early.lowest >= 100


@pytest.mark.slow
def test_workers_are_configured_and_so_are_those_that_take_their_place(tmp_path, monkeypatch):
    monkeypatch.chdir(FAKES)

    class Script(UpdateCallback):
        """Configures, waits until both workers' rows show it, kills one, and stops at its successor's rows."""

        killed_at = rewards = None

        def on_batch_sampled(self, trainer, module, batch):
            data = trainer.datamodule
            rings, worker = data.memory.rings, data.pool.workers[0]
            if module.updates == 0:
                data.configure_envs(bonus=100)
            elif self.killed_at is None and all(self.reward(ring, ring.head - 1) >= 100 for ring in rings):
                os.kill(worker.process.pid, signal.SIGKILL)
                worker.process.wait()
                self.killed_at = rings[0].head
            elif self.killed_at is not None and rings[0].head >= self.killed_at + 4:
                self.rewards = [self.reward(rings[0], self.killed_at + step) for step in range(4)]
                self.restarts = data.pool.restarts
                trainer.should_stop = True

        @staticmethod
        def reward(ring, step):
            return float(ring.layout.view(ring.rows[step % ring.num_steps], "reward").min())

    script = Script()
    data = {
        "env": EnvConfig("fake_envs.ConfigurableEnv"), "mode": "overlapped", "num_workers": 2, "envs_per_worker": 2,
        "max_env_steps": 0, "capacity": 20_000,
    }  # fmt: skip
    fit_lockstep(tmp_path, callbacks=[script], data=data, limit_val_batches=0)
    # Its first row is in the first step of an episode, which pays 1.
    assert script.restarts == 1 and script.rewards[0] == 101.0 and min(script.rewards) >= 100.0


@pytest.mark.parametrize(
    "script, deadlines, said",
    [
        ("sleep 600", {"start": 0.3}, ["data.deadlines.start", "data.worker_python", "its log is empty"]),
        ("echo hello", {}, ["data.worker_python", "exited with status 0", "hello"]),
    ],
)
def test_what_is_named_as_an_interpreter_and_is_none_is_told_with_its_key(
    tmp_path, monkeypatch, script, deadlines, said
):
    monkeypatch.chdir(tmp_path)
    wrapper = tmp_path / "python"
    wrapper.write_text(f"#!/bin/sh\n{script}\n")
    wrapper.chmod(0o755)
    data = ReplayDataModule(EnvConfig("FourRoomsEnv"), worker_python=str(wrapper), deadlines=deadlines)
    with pytest.raises(WorkerError) as error:
        data.describe()
    assert all(each in str(error.value) for each in [*said, str(wrapper), "describe.log"]), str(error.value)
    assert "\n" not in str(error.value)


def test_listeners_hear_of_workers_in_plain_words():
    data, heard = make_data(), []
    data.worker_listeners.append(lambda *told: heard.append(told))
    worker = SimpleNamespace(command=SimpleNamespace(settings={"worker": 1, "mode": "collect"}))
    data._on_event("start", worker, pid=5, generation=0)
    data._on_event("failure", worker, pid=5, what="was silent", head=3, delay=0.0, cause="hang")
    data._on_event("start", worker, pid=6, generation=1)
    data._on_event("recycle", worker, pid=6, head=40)
    data._on_event("lost", worker, pid=6, what="ended", reason="budget spent", cause="death")
    assert heard == [
        ("start", "worker_1", "pid 5"), ("hang", "worker_1", "was silent"), ("restart", "worker_1", "pid 6"),
        ("recycle", "worker_1", "after 40 vector steps"), ("death", "worker_1", "ended"),
        ("give_up", "worker_1", "budget spent"),
    ]  # fmt: skip
