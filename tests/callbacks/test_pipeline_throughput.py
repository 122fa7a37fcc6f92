"""PipelineThroughput: shares of the learner's time by a clock that is set by hand, and rates."""

from types import SimpleNamespace

import pytest

from callbacks import PipelineThroughput, pipeline_throughput
from tests.runs import fit_fake, make_batch, make_module


def test_shares_and_rates_by_hand(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pipeline_throughput.time, "perf_counter", lambda: clock.now)
    module = make_module(build=True)
    memory = SimpleNamespace(layout=SimpleNamespace(row_bytes=500))
    data = SimpleNamespace(learner_wait=0.0, batch_size=32, memory=memory)
    trainer, monitor = SimpleNamespace(datamodule=data), PipelineThroughput()
    monitor.on_train_start(trainer, module)
    assert monitor.metrics() == {}  # nothing to compare with
    monitor.on_train_batch_end(trainer, module, None, None, 0)
    clock.now += 2.0
    monitor.on_validation_start(trainer, module)
    clock.now += 3.0
    monitor.on_validation_end(trainer, module)
    clock.now += 1.0
    monitor.on_train_batch_start(trainer, module, None, 1)
    data.learner_wait = 1.5
    module.phase_seconds = {"update_critic": 1.0, "update_actor": 1.0, "on_update_end": 0.5, "log_training": 0.25}
    module.updates, module.env_steps = 10, 4000
    clock.now += 4.0
    values = monitor.metrics()
    assert values == pytest.approx({
        "learner/sampling": 0.15, "learner/forward_backward": 0.2, "learner/publish": 0.05, "learner/logging": 0.025,
        "learner/validation": 0.3, "throughput/samples_per_s": 32.0, "throughput/ring_mb_per_s": 0.2,
    })  # fmt: skip
    assert module.phase_seconds == {}
    monitor.teardown(trainer, module, "fit")
    assert module.phase_seconds is None


def test_in_a_run_every_phase_is_counted_and_no_share_exceeds_one():
    module = make_module()
    fit_fake(module, [make_batch(seed=i) for i in range(4)], [PipelineThroughput()])
    found = {name: value for name, value in module.latest_metrics.items() if name.startswith("learner/")}
    assert found["learner/forward_backward"] > 0 and found["learner/logging"] > 0
    assert 0 < sum(found.values()) <= 1.001
