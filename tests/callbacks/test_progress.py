"""What the bar shows."""

from types import SimpleNamespace

import torch

from callbacks import TrainingProgress
from tests.runs import make_module


def test_short_names_for_the_latest_values():
    module = make_module()
    module.env_steps = 12345
    module.latest_metrics = {"time/updates_per_s": 99.6, "rollout/return": -123.456, "staleness/collection": 8.0}
    trainer = SimpleNamespace(callback_metrics={"val/return": torch.tensor(-100.0)})
    shown = TrainingProgress().get_metrics(trainer, module)
    assert shown == {"env_steps": "12,345", "upd/s": "100", "return": "-123", "lag": "8", "val": "-100"}
