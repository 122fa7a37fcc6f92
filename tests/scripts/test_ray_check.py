"""The check of workers on a Ray: it sees rows that are lost or changed, and divides what they cost."""

import json
from types import SimpleNamespace

import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.pool import LocalWorker
from claw_lightning.rollout.envs.diagnostic import CodedEnv
from tests.builders import collector_of
from tests.scripts.loading import load_script

LANES, STEPS = 4, 200


@pytest.fixture(scope="module")
def check():
    """The script as a module."""
    return load_script("ray_check")


class Pool:
    """One worker of coded rows in this process; ``harm`` is called with the ring after each step."""

    def __init__(self, check, harm=lambda ring: None):
        env = CodedEnv(num_envs=LANES, seed=3, max_length=9)
        self.collector, ring, _ = collector_of(env, num_steps=check.RING_STEPS)
        self.workers = [SimpleNamespace(ring=ring, control=SimpleNamespace(steps_allowed=0))]
        self.harm = harm

    def poll(self):
        worker = self.workers[0]
        while worker.ring.head < worker.control.steps_allowed:
            self.collector.step()
            self.harm(worker.ring)


def drive(check, pool):
    return check.drive(pool, STEPS, lambda: 5.0, lambda: {"learner": 1.0, "worker": 2.0})


def test_whole_rows_are_found_whole(check):
    pool = Pool(check)
    turns = [drive(check, pool) for _ in range(2)]
    assert [turn["faults"] for turn in turns] == [0, 0] and pool.workers[0].ring.head == 2 * STEPS
    assert turns[0]["rows"] == STEPS * LANES and turns[0]["store_most"] == 5.0
    assert turns[0]["parts"] == {"learner": 0.0, "worker": 0.0}


def twice(ring):
    """One step lies where its successor should."""
    if ring.head == 50:
        ring.rows[49 % ring.num_steps] = ring.rows[48 % ring.num_steps]


def torn(ring):
    """The end of one observation is that of another row."""
    if ring.head == 50:
        ring.layout.view(ring.rows[49 % ring.num_steps], "obs")[0, -1] += 1


@pytest.mark.parametrize("harm", [twice, torn])
def test_rows_that_are_not_whole_or_there_twice_are_seen(check, harm):
    assert drive(check, Pool(check, harm))["faults"] > 0


@pytest.mark.parametrize(
    "command_line, part",
    [
        (["/usr/bin/python", "/x/claw_lightning/rollout/bootstrap.py"], "worker"),
        (["ray::Host.collect", ""], "host"),
        (["/x/ray/core/src/ray/raylet/raylet"], "ray"),
        ([], "ray"),
    ],
)
def test_processes_are_told_apart(check, command_line, part):
    assert check.part_of(command_line) == part


def turns(seconds, faults=0, store=1e6, **parts):
    turn = {"rows": 1000, "seconds": seconds, "cpu_seconds": sum(parts.values()), "parts": parts}
    return [dict(turn, faults=faults, store_last=1e6), dict(turn, faults=0, store_last=store)]


def test_costs_and_ratios(check, tmp_path):
    local = turns(1.0, learner=0.5, worker=0.5)
    remote = turns(2.0, learner=0.6, worker=0.5, host=0.3, ray=0.2)
    path = tmp_path / "ray.json"
    assert check.report({"local": local, "ray": remote}, 2_000_000, 4000, path) == 0
    found = json.loads(path.read_text())
    assert found["ratio"] == {"wall": 0.5, "cpu": pytest.approx(1.0 / 1.6)}
    costs = {"row_bytes": 1000, "policy_bytes": 4000, "learner_us_per_row": 100, "ray_us_per_row": 200,
             "host_us_per_row": 300, "worker_us_per_row": 500}  # fmt: skip
    assert found["costs"] == pytest.approx(costs)


@pytest.mark.parametrize("fault", [{"faults": 1}, {"store": 40e6}])
def test_a_fault_or_a_store_that_grows_is_a_failure(check, fault):
    local, parts = turns(1.0, learner=0.5, worker=0.5), {"learner": 0.6, "worker": 0.5, "host": 0.3, "ray": 0.2}
    assert check.report({"local": local, "ray": turns(2.0, **fault, **parts)}, 1, 1, None) == 1


class Nearby:
    """A cluster whose workers are processes of this machine."""

    def __init__(self, config, mailbox):
        self.mailbox, self.received_bytes = mailbox, 0

    def connect(self, num_workers):
        self.num_workers = num_workers

    def worker(self, name, command, fds, log_path, ring):
        command.settings.update(
            layout=ring.layout.settings(), num_steps=ring.num_steps, ring_fd=ring.block.fd,
            mailbox_fd=self.mailbox.block.fd,
        )  # fmt: skip
        return LocalWorker(name, command, fds, log_path, ring)

    def store_used(self):
        self.received_bytes += 1000
        return 1e6

    def close(self):
        self.num_workers = 0


def test_a_whole_check_of_real_workers(check, monkeypatch, tmp_path, capsys):
    path = tmp_path / "ray.json"
    monkeypatch.setattr(check, "RayCluster", Nearby)
    arguments = "--rows 640 --lanes 8 --rounds 2 --obs 12 --actions 2 --simulator-us 50"
    monkeypatch.setattr("sys.argv", ["ray_check.py", *arguments.split(), "--json", str(path)])
    assert check.main() == 0
    found = json.loads(path.read_text())
    assert found["faults"] == 0 and [turn["rows"] for turn in found["turns"]["ray"]] == [320, 320]
    # Both kinds of workers are told apart, and both compute.
    assert all(turn["parts"]["worker"] >= 320 * 40e-6 for turns in found["turns"].values() for turn in turns)
    assert "costs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--rows", "0"], "--rows"),
        (["--obs", "9"], "--obs must be at least 10"),
        (["--simulator-us", "-1"], "--simulator-us"),
        (["--json", "no/such/folder/x.json"], "no/such/folder"),
    ],
)
def test_bad_input_is_told_in_one_line(check, monkeypatch, capsys, arguments, word):
    monkeypatch.setattr("sys.argv", ["ray_check.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        check.main()
    text = capsys.readouterr().err
    assert caught.value.code == 2 and text.startswith("ray_check: error: ") and text.count("\n") == 1 and word in text


def test_a_missing_package_is_told_in_one_line(check, monkeypatch, capsys):
    def connect(*_):
        raise ConfigError("data.collector ray needs the package ray")

    monkeypatch.setattr(check.RayCluster, "connect", connect)
    monkeypatch.setattr("sys.argv", ["ray_check.py"])
    with pytest.raises(SystemExit) as caught:
        check.main()
    assert caught.value.code == 2 and capsys.readouterr().err.count("\n") == 1
