"""What the bar shows, and the lines where there is no terminal."""

from types import SimpleNamespace

import torch

from callbacks import TrainingProgress
from tests.runs import fit_fake, make_batch, make_module


def test_short_names_for_the_latest_values():
    module = make_module()
    module.latest_metrics = {"time/updates_per_s": 99.6, "rollout/return": -123.456, "staleness/collection": 8.0}
    trainer = SimpleNamespace(callback_metrics={"val/return": torch.tensor(-100.0)})
    shown = TrainingProgress().get_metrics(trainer, module)
    assert shown == {"upd/s": "100", "return": "-123", "lag": "8", "val": "-100"}


def test_lines_in_place_of_a_bar_where_there_is_no_terminal(capsys):
    bar = TrainingProgress(line_seconds=1e-9)
    fit_fake(make_module(), [make_batch(2), make_batch(2)], [bar], enable_progress_bar=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    assert [line.split("  ")[:2] for line in lines] == [["steps 100", f"updates {n}"] for n in (2, 4)]


def test_one_bar_over_environment_steps_in_a_terminal(capsys):
    bar = TrainingProgress(refresh_rate=1)
    bar._is_terminal = True
    fit_fake(make_module(), [make_batch(2)] * 3, [bar], enable_progress_bar=True, max_epochs=2)
    out = capsys.readouterr().out
    assert "100 steps" in out or "100" in out
    assert "Epoch" not in out
    assert bar.train_progress_bar.n == 100
