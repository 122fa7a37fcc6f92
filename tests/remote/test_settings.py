"""data.collector and data.ray among the other settings: what does not go together is refused in one line."""

import importlib.util

import pytest

from claw_lightning.data import EnvConfig, ReplayDataModule
from claw_lightning.errors import ConfigError
from claw_lightning.remote.config import RayConfig


def data_of(**settings):
    return ReplayDataModule(EnvConfig("GymnasiumEnv", {"task": "Pendulum-v1"}), **settings)


@pytest.fixture(autouse=True)
def has_ray(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"ray": RayConfig(num_cpus=2)}, "data.ray does nothing with data.collector local; set data.collector ray"),
        ({"collector": "ray", "mode": "lockstep"}, "data.collector ray: lock-step mode is one process"),
        ({"collector": "ray", "record_events": True}, "data.record_events is for runs on one machine"),
        ({"collector": "ray", "worker_device": "cuda:0"}, "data.worker_device cuda:0 and data.ray.num_gpus 0"),
        ({"collector": "ray", "ray": RayConfig(num_gpus=0.5)}, "data.worker_device cpu and data.ray.num_gpus 0.5"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, line):
    with pytest.raises(ConfigError) as caught:
        data_of(**settings)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_missing_package_is_told_with_its_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'claw-lightning\[ray\]'"):
        data_of(collector="ray")
    data_of()  # nobody else needs it


def test_workers_elsewhere_take_no_cores_here():
    assert data_of(collector="ray", num_workers=7, ray=RayConfig(address="auto"))._local_workers == 0
    assert data_of(collector="ray", num_workers=7)._local_workers == 7
