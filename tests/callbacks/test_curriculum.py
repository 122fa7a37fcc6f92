"""When a stage ends, what is sent to the simulators, and that a resumed run goes on in its stage."""

import logging
import math
from types import SimpleNamespace

import pytest
import torch

from callbacks import Curriculum, RunCheckpoint
from claw_lightning.data import EnvConfig
from claw_lightning.errors import ConfigError
from claw_lightning.hooks import UpdateCallback
from claw_lightning.metrics import EpisodeStatistics
from claw_lightning.rollout.collector import Episode
from tests.fakes.fake_envs import ConfigurableEnv
from tests.runs import fit_lockstep

STAGES = [0.0, 0.2, 0.4]


class Stage:
    """As much of trainer, module and data module as Curriculum asks for."""

    def __init__(self, curriculum):
        self.curriculum, self.sent = curriculum, []
        self.data = SimpleNamespace(
            env_steps=0, episodes=EpisodeStatistics(), configure_envs=lambda **settings: self.sent.append(settings)
        )
        self.trainer = SimpleNamespace(
            datamodule=self.data, state=SimpleNamespace(fn="fit"), sanity_checking=False, callback_metrics={}
        )
        self.module = SimpleNamespace(latest_metrics={})
        curriculum.on_fit_start(self.trainer, self.module)

    def play(self, steps, success, episodes=100):
        """Steps and episodes of that success, a logging step, and the training step after it."""
        self.data.env_steps += steps
        self.data.episodes.add([Episode(0.0, 10, success)] * episodes)
        self.log(**self.data.episodes.compute())

    def log(self, **metrics):
        self.module.latest_metrics = metrics
        self.curriculum.on_batch_sampled(self.trainer, self.module, None)

    @property
    def figures(self):
        metrics = self.curriculum.metrics()
        return metrics["curriculum/stage"], metrics["curriculum/value"]


def test_stages_follow_success_and_end_at_the_last():
    stage = Stage(Curriculum("slip", STAGES, min_env_steps=1000))
    assert stage.sent == [{"slip": 0.0}] and stage.figures == (0.0, 0.0)
    stage.play(999, 1.0)
    assert stage.figures == (0.0, 0.0), "too few steps"
    stage.play(1, 0.7)
    assert stage.figures == (0.0, 0.0), "below the threshold"
    stage.play(1, 0.875)
    assert stage.figures == (1.0, 0.2) and stage.sent[1:] == [{"slip": 0.2}]
    stage.play(999, 1.0)
    assert stage.figures == (1.0, 0.2), "the steps count from the stage's beginning"
    stage.play(1, 1.0)
    stage.play(5000, 1.0)
    assert stage.figures == (2.0, 0.4) and stage.sent[2:] == [{"slip": 0.4}]


def test_an_average_over_episodes_of_the_stage_before_counts_for_nothing():
    stage = Stage(Curriculum("slip", STAGES, min_env_steps=100))
    stage.play(100, 1.0)
    stage.play(5000, 0.0, episodes=10)  # the average is still 0.9
    stage.play(5000, 1.0, episodes=89)
    assert stage.figures[0] == 1.0
    stage.play(5000, 1.0, episodes=1)
    assert stage.figures[0] == 2.0


def test_a_logged_value_is_looked_at_once():
    stage = Stage(Curriculum("slip", STAGES, metric="q/mean", min_env_steps=0))
    stage.log(**{"q/mean": 0.9})
    assert stage.figures[0] == 1.0
    stage.curriculum.on_batch_sampled(stage.trainer, stage.module, None)
    assert stage.figures[0] == 1.0
    stage.log(**{"q/mean": math.nan})
    assert stage.figures[0] == 1.0


def test_values_of_validations_count_after_validations_of_a_fit():
    stage = Stage(Curriculum("slip", STAGES, metric="val/return", threshold=-5.0, min_env_steps=0))
    stage.trainer.callback_metrics["val/return"] = torch.tensor(-4.0)
    stage.log(**{"val/return": 0.0})
    stage.trainer.state.fn = "validate"
    stage.curriculum.on_validation_end(stage.trainer, stage.module)
    assert stage.figures[0] == 0.0
    stage.trainer.state.fn = "fit"
    stage.curriculum.on_validation_end(stage.trainer, stage.module)
    assert stage.figures[0] == 1.0


def test_a_metric_that_nobody_logs_is_told_once(caplog):
    stage = Stage(Curriculum("slip", STAGES, metric="rollout/succes", min_env_steps=10))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stage.play(10, 1.0)
    assert [r.getMessage() for r in caplog.records if "rollout/succes " in r.getMessage()] == [
        "Curriculum.metric: nothing has logged rollout/succes so far; the stage stays until then"
    ]


def test_state_is_plain_and_kept_per_setting():
    first = Stage(Curriculum("slip", STAGES, min_env_steps=100))
    first.play(100, 1.0)
    resumed = Curriculum("slip", STAGES, min_env_steps=100)
    resumed.load_state_dict(first.curriculum.state_dict())
    stage = Stage(resumed)
    assert stage.sent == [{"slip": 0.2}]
    stage.data.env_steps = 150
    stage.play(0, 1.0)
    assert stage.figures[0] == 1.0, "its stage began at step 100"
    fewer = Curriculum("slip", STAGES[:1])
    fewer.load_state_dict({"stage": 2, "env_steps": 0, "episodes": 0})
    assert fewer.value == 0.0
    assert len({Curriculum(name, STAGES).state_key for name in ("slip", "goal", "slip")}) == 2


@pytest.mark.parametrize(
    "arguments, key",
    [
        ({"setting": "two words"}, "setting"),
        ({"setting": "evaluation"}, "setting"),
        ({"stages": []}, "stages"),
        ({"stages": [0.0, math.inf]}, "stages"),
        ({"metric": ""}, "metric"),
        ({"threshold": math.nan}, "threshold"),
        ({"min_env_steps": -1}, "min_env_steps"),
    ],
)
def test_bad_arguments_are_named(arguments, key):
    with pytest.raises(ConfigError, match=rf"Curriculum\.{key}") as error:
        Curriculum(**{"setting": "slip", "stages": STAGES, **arguments})
    assert "\n" not in str(error.value)


class Rewards(UpdateCallback):
    """The smallest reward, over the episode's step, of the newest vector step at each batch."""

    def __init__(self):
        self.bonuses = []

    def on_batch_sampled(self, trainer, module, batch):
        ring = trainer.datamodule.memory.rings[0]
        view, rows = ring.layout.view, ring.rows[(ring.head - 1) % ring.num_steps]
        self.bonuses.append(float(view(rows, "reward").min() // 100 * 100))


def test_whole_runs_change_the_simulator_and_resume_in_the_stage(tmp_path):
    data = {"env": EnvConfig(f"{ConfigurableEnv.__module__}.ConfigurableEnv"), "max_env_steps": 1200}
    settings = {"data": data, "limit_val_batches": 0, "enable_checkpointing": True}

    def run(**more):
        # Half of the episodes end as solved ones.
        curriculum = Curriculum("bonus", [100.0, 300.0], threshold=0.2, min_env_steps=50)
        rewards = Rewards()
        callbacks = [curriculum, rewards, RunCheckpoint(dirpath=str(tmp_path))]
        _, module, _ = fit_lockstep(tmp_path, callbacks=callbacks, **{**settings, **more})
        return curriculum, rewards.bonuses, module

    curriculum, bonuses, module = run()
    assert bonuses[0] == 100.0 and bonuses[-1] == 300.0 and bonuses == sorted(bonuses)
    assert module.latest_metrics["curriculum/stage"] == 1.0 and module.latest_metrics["curriculum/value"] == 300.0
    stored = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert stored["callbacks"][curriculum.state_key]["stage"] == 1
    resumed, bonuses, _ = run(data={**data, "max_env_steps": 1500}, ckpt=tmp_path / "last.ckpt")
    assert resumed.stage == 1 and set(bonuses) == {300.0}
