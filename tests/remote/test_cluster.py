"""Workers on a real Ray: two nodes in processes of this machine, of which one is lost."""

import importlib.util
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.pool import FailurePolicy, WorkerCommand, WorkerPool
from claw_lightning.remote.cluster import RayCluster, keeping_handlers
from claw_lightning.remote.config import RayConfig
from claw_lightning.rollout.envs.diagnostic import check_rows
from claw_lightning.rollout.mailbox import Mailbox
from claw_lightning.rollout.networks import Policy
from claw_lightning.rollout.ring import BORDER, FIRST, TERMINATED, TRUNCATED, LaneRing, RowLayout
from tests.builders import policy_settings, poll_until

has_ray = importlib.util.find_spec("ray") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_ray, reason="Ray is not installed: pip install 'claw-lightning[ray]'"),
]

LANES, OBS, STORE = 4, 16, 100 << 20
#: Of the cluster's processes: a lost node is noticed after three seconds, not thirty.
RAY_SETTINGS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes; the head has room for both workers, the other one for one of them.

    What no test looks at is left out: the autoscaler's process, the log monitors, most of the dashboard.
    """
    from claw_lightning.remote.cluster import import_ray

    import_ray()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False, "no_monitor": True, "include_log_monitor": False}
    with pytest.MonkeyPatch.context() as patch, keeping_handlers():
        for name, value in RAY_SETTINGS.items():
            patch.setenv(name, value)
        cluster = Cluster(initialize_head=True, head_node_args={**head, "object_store_memory": STORE})
        node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
        yield cluster, node
        cluster.shutdown()


@pytest.fixture
def rig(tmp_path, nodes):
    """A pool of two workers of coded rows on the cluster; ended at the end."""
    policy = policy_settings(obs_size=OBS)
    values = Policy(**policy).flatten()
    mailbox = Mailbox(len(values))
    mailbox.publish(values, 1)
    handler = signal.getsignal(signal.SIGTERM)
    cluster = RayCluster(RayConfig(address=nodes[0].address), mailbox)
    cluster.connect(2)
    assert signal.getsignal(signal.SIGTERM) is handler
    workers = []
    for index in range(2):
        env = {"class_path": "claw_lightning.rollout.envs.diagnostic.CodedEnv", "init_args": {"max_length": 9}}
        settings = {
            "mode": "collect", "worker": index, "env": env, "num_envs": LANES, "num_threads": 1, "seed": 10_007 * index,
            "pull_every": 1, "agent": {"policy": policy}, "configure": {},
        }  # fmt: skip
        command = WorkerCommand(sys.executable, settings)
        ring = LaneRing(RowLayout(OBS, 2), 4096, LANES)
        workers.append(cluster.worker(f"worker {index}", command, (), tmp_path / f"worker_{index}.log", ring))
    pool = WorkerPool(list(workers), policy=FailurePolicy(budget=20, deadlines={"wait": 20.0, "step": 20.0}))
    yield pool, cluster, mailbox
    pool.close()
    cluster.close()


def judge(ring):
    """Faults of all stored rows by kind, and in how many places another process goes on for the one before."""
    view, rows = ring.layout.view, ring.rows[: ring.head]
    flags, obs = view(rows, "flags"), view(rows, "obs")
    ends = (flags & FIRST) != 0
    usable = ((flags[:-1] & BORDER) == 0) & (~ends[1:] | ((flags[:-1] & TERMINATED) != 0))
    found = check_rows(
        obs[:-1], obs[1:], view(rows, "reward")[:-1], (flags[:-1] & TERMINATED) != 0, (flags[:-1] & TRUNCATED) != 0,
        view(rows, "action")[:-1], usable,
    )  # fmt: skip
    del found["rows"], found["without_final"]  # the latter at a gap, where nothing is bootstrapped
    breaks = np.flatnonzero((np.diff(obs[:, :, 2], axis=0) != 0).any(1)) + 1
    assert ends[breaks].all()  # nothing crosses a gap
    return sum(found.values()), len(breaks)


def test_rows_are_whole_and_a_worker_of_a_lost_node_goes_on_at_another(rig, nodes):
    pool, cluster, mailbox = rig
    pool.start(wait=False)
    poll_until(pool, lambda: pool.alive == 2)
    assert len({worker.link.host._actor_id for worker in pool.workers}) == 2
    for worker in pool.workers:
        worker.control.steps_allowed = 300
    poll_until(pool, lambda: all(worker.head == 300 for worker in pool.workers))
    assert cluster.received_bytes == sum(worker.ring.rows[:300].nbytes for worker in pool.workers)
    mailbox.publish(mailbox.read()[2], 7)
    for worker in pool.workers:
        worker.control.steps_allowed = 1000
    poll_until(pool, lambda: all(worker.control.version == 7 for worker in pool.workers))
    fixture, node = nodes
    fixture.remove_node(node, allow_graceful=False)
    poll_until(pool, lambda: pool.restarts >= 1 and pool.alive == 2)
    assert pool.restarts == 1 and sum(each["Alive"] for each in cluster._ray.nodes()) == 1
    for worker in pool.workers:
        worker.control.steps_allowed = 1500
    poll_until(pool, lambda: all(worker.head == 1500 for worker in pool.workers))
    judged = [judge(worker.ring) for worker in pool.workers]
    assert [faults for faults, _ in judged] == [0, 0] and sum(breaks for _, breaks in judged) == 1
    assert "lanes of coded" in Path(pool.workers[0].log_path).read_text()


def test_a_cluster_that_does_not_answer_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        ConfigError, match=r"data\.ray\.address: the cluster at 127\.0\.0\.1:1 cannot be joined .*this machine$"
    ):
        RayCluster(RayConfig(address="127.0.0.1:1"), Mailbox(1)).connect(1)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    with pytest.raises(ConfigError, match=r"cannot be joined .*; if .* a token .*, set RAY_AUTH_MODE=token here too$"):
        RayCluster(RayConfig(address="127.0.0.1:1"), Mailbox(1)).connect(1)
