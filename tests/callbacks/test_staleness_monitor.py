"""Ages of samples, lag of collection, and one warning."""

import logging

import numpy as np
import pytest

from callbacks import StalenessMonitor
from claw_lightning.errors import ConfigError
from tests.runs import FakeData, fit_fake, make_batch, make_module


class Histograms:
    def __init__(self):
        self.calls = []

    def add_histogram(self, name, values, step):
        self.calls.append((name, sorted(values.tolist()), step))


def monitor_run(monitor, versions, collection_version=None, updates=10, steps_per_log=1):
    module = make_module()
    module.updates = updates
    batches = [make_batch(1, version=np.array([v])) for v in versions]
    data = FakeData(batches)
    data.collection_version = collection_version
    logged = []
    module_log = module._to_loggers
    module._to_loggers = lambda metrics: (logged.append(metrics), module_log(metrics))
    fit_fake(module, batches, [monitor], data=data, log_every_n_steps=steps_per_log)
    return logged


def test_mean_and_maximum_over_the_batches_since_the_last_log():
    # Updates 10 and 11 when the batches are drawn; ages 1..8 and 1 (never below 0 for a newer version).
    versions = [np.arange(2, 10), np.full(8, 10)]
    logged = monitor_run(StalenessMonitor(), versions, steps_per_log=2)
    assert [m["staleness/mean"] for m in logged] == [(4.5 + 1.0) / 2]
    assert [m["staleness/max"] for m in logged] == [8.0]
    assert "staleness/collection" not in logged[0]


def test_figures_start_anew_after_each_log():
    logged = monitor_run(StalenessMonitor(), [np.zeros(8), np.full(8, 99)])
    assert [(m["staleness/mean"], m["staleness/max"]) for m in logged] == [(10.0, 10.0), (0.0, 0.0)]


def test_warns_once_when_collection_lags(caplog):
    with caplog.at_level(logging.WARNING):
        logged = monitor_run(StalenessMonitor(limit=5), [np.zeros(8)] * 3, collection_version=4)
    assert [m["staleness/collection"] for m in logged] == [6.0, 7.0, 8.0]
    lines = [r.getMessage() for r in caplog.records if "updates old" in r.getMessage()]
    assert len(lines) == 1 and "6 updates old (limit 5)" in lines[0] and "PolicyPublisher.every" in lines[0]


def test_old_samples_alone_are_no_reason_to_warn(caplog):
    with caplog.at_level(logging.WARNING):
        monitor_run(StalenessMonitor(limit=5), [np.zeros(8)] * 3, updates=10_000)
    assert not [r for r in caplog.records if "updates old" in r.getMessage()]


@pytest.mark.parametrize("histogram", [True, False])
def test_histogram_goes_to_a_logger_that_knows_them(histogram, monkeypatch):
    monitor, histograms = StalenessMonitor(histogram=histogram), Histograms()
    logger = type("L", (), {"experiment": histograms})()

    class Trainer:
        loggers = [logger]
        lightning_module = type("M", (), {"env_steps": 77})()
        datamodule = FakeData([])

    module = make_module()
    module.updates = 10
    monitor.setup(Trainer(), module, "fit")
    monitor.on_batch_sampled(Trainer(), module, make_batch(1, version=np.arange(2, 10)[None]))
    monitor.metrics()
    assert histograms.calls == ([("staleness/histogram", [1, 2, 3, 4, 5, 6, 7, 8], 77)] if histogram else [])


def test_wrong_limit_is_named():
    with pytest.raises(ConfigError, match=r"StalenessMonitor\.limit"):
        StalenessMonitor(limit=0)
