"""Several ranks: real processes over gloo, in lock-step where simulators are needed."""

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from claw_lightning import ranks
from claw_lightning.checkpoints import read_checkpoint
from claw_lightning.errors import ConfigError, RankError
from claw_lightning.module import OptionCritic
from claw_lightning.ranks import Ranks, Watch, deal_state, env_steps_of, merge_metrics
from claw_lightning.rollout.normalizer import batch_moments, merged_moments
from claw_lightning.rollout.ring import FIRST, TERMINATED
from tests import rank_runs
from tests.rank_runs import free_port, run_ranks
from tests.runs import ENDLESS, FAST, alive, descendants, learning, start, wait_until


def largest_error(one, other):
    """Over all parameters, relative to the largest gradient of each."""
    return max(float((one[n] - x).abs().max() / x.abs().max().clamp_min(1e-12)) for n, x in other.items())


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"num_options": 1, "target_noise": 0.1},
        {"num_options": 1, "actor": "gaussian"},
        {"num_options": 4, "target_noise": 0.1, "max_grad_norm": 0.5},
    ],
    ids=["TD3", "SAC", "K4"],
)
def test_two_ranks_with_half_a_batch_each_have_the_gradient_of_the_whole(settings):
    rng = np.random.default_rng(5)
    first, ended = (rng.random((1, 32)) < np.repeat([p, q], 16) for p, q in ((0.1, 0.6), (0.5, 0.2)))  # uneven
    previous = np.where(first, -1, min(1, settings["num_options"] - 1))
    rows = {"size": 32, "num_options": settings["num_options"], "flags": FIRST * first + TERMINATED * ended,
            "previous_option": previous}  # fmt: skip
    (whole,) = run_ranks(rank_runs.gradients, rows, settings, size=1)
    one, two = run_ranks(rank_runs.gradients, rows, settings)
    assert isinstance(whole, dict) and isinstance(one, dict), (whole, one, two)
    assert len(whole) > 8
    assert all(torch.equal(one[name], two[name]) for name in whole)
    assert largest_error(one, whole) < 1e-5


# -- runs -------------------------------------------------------------------------------------------------------------


def test_two_ranks_agree_on_everything_and_collect_different_experience(tmp_path):
    one, two = run_ranks(rank_runs.lockstep, tmp_path, {"max_env_steps": 500}, {"num_options": 2})
    assert isinstance(one, dict) and isinstance(two, dict), (one, two)
    for name, tensor in one["tensors"].items():
        assert torch.equal(tensor, two["tensors"][name]), name
    assert one["updates"] == two["updates"] > 50
    assert one["env_steps"] == two["env_steps"] == (496, 496, 248)  # 250 steps each, in vector steps of four
    assert one["sampled"] == 16 * one["updates"]
    assert one["moments"] == 496  # statistics of all observations, of both
    assert one["val"] == two["val"]  # both know what one has played
    assert not torch.equal(one["obs"], two["obs"])
    shared = {name: x for name, x in one["metrics"].items() if not name.endswith("_per_s")}
    assert shared.items() <= two["metrics"].items()
    assert {"rate/rank_wait_0", "rate/rank_wait_1"} <= shared.keys()
    assert shared["replay/steps"] == one["stored"] + two["stored"]


def test_a_checkpoint_of_two_ranks_resumes_on_one_and_the_reverse(tmp_path):
    first = run_ranks(rank_runs.lockstep, tmp_path / "a", {}, {"num_options": 2})
    assert isinstance(first[0], dict), first
    ckpt = str(tmp_path / "a/checkpoints/last.ckpt")
    more = {"max_env_steps": 600}
    (single,) = run_ranks(rank_runs.lockstep, tmp_path / "b", more, {"num_options": 2}, ckpt, size=1)
    assert isinstance(single, dict), single
    assert single["env_steps"] == (600, 600, 600)
    assert single["sampled"] == 16 * (single["updates"] + first[0]["updates"])  # counted on from both
    ckpt = str(tmp_path / "b/checkpoints/last.ckpt")
    assert (tmp_path / "b/checkpoints/replay/DONE").is_file()
    again = run_ranks(rank_runs.lockstep, tmp_path / "c", {"max_env_steps": 1000}, {"num_options": 2}, ckpt)
    assert isinstance(again[0], dict), again
    one, two = again
    assert all(torch.equal(x, two["tensors"][name]) for name, x in one["tensors"].items())
    assert one["env_steps"][:2] == two["env_steps"][:2] == (one["env_steps"][2] + two["env_steps"][2],) * 2
    assert 990 <= one["env_steps"][0] <= 1000
    assert one["sampled"] + two["sampled"] == 2 * 16 * (one["updates"] - single["updates"]) + single["sampled"]
    assert one["stored"] + two["stored"] >= 950  # little of the experience is lost on the way: what borders cost


@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_rank_dies_the_others_end_and_say_so(tmp_path, killed):
    group = rank_runs.Group(rank_runs.lockstep, tmp_path, {"max_env_steps": 0}, {"num_options": 1})
    rank_runs.wait_for(tmp_path / "checkpoints/last.ckpt.done", group)
    group.processes[killed].kill()
    found = group.join()
    assert found[killed] is None
    assert found[1 - killed].startswith("RankError: "), found
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["claw"]["updates"] > 0


def test_a_signal_to_one_rank_ends_all_after_the_same_step(tmp_path):
    group = rank_runs.Group(rank_runs.lockstep, tmp_path, {"max_env_steps": 0}, {"num_options": 1})
    rank_runs.wait_for(tmp_path / "checkpoints/last.ckpt.done", group)
    group.processes[1].terminate()
    one, two = group.join()
    assert isinstance(one, dict) and isinstance(two, dict), (one, two)
    assert one["received"] == two["received"] == 15
    assert one["updates"] == two["updates"]
    assert all(torch.equal(x, two["tensors"][name]) for name, x in one["tensors"].items())


@pytest.mark.parametrize("kind", ["settings", "drift", "error"])
def test_what_goes_wrong_on_one_rank_is_told_on_all(tmp_path, kind):
    one, two = run_ranks(rank_runs.wrong, tmp_path, kind)
    said = {
        "settings": ("ConfigError: data.batch_size is 24 on rank 1 and 16 on rank 0",) * 2,
        "drift": ("RankError: policy.actor.",) * 2,
        "error": ("RankError: rank 1 failed: model.nonsense", "ConfigError: model.nonsense"),
    }[kind]
    assert one.startswith(said[0]), one
    assert two.startswith(said[1]), two
    assert kind != "drift" or "differs between rank 0 and rank 1" in one


@pytest.fixture
def store(monkeypatch):
    """The store that rank 0's process group would hold; beats and patience are short, and nobody is ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setattr(ranks, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(ranks, "LOST_SECONDS", 0.5)
    ended = []
    monkeypatch.setattr(ranks, "end_unless_over", ended.append)
    yield ended
    del server  # it ends with the last reference


def test_a_rank_that_is_silent_counts_as_lost_and_one_that_has_finished_does_not(store):
    one = Watch(Ranks(0, 2), 0)
    two = Watch(Ranks(1, 2), 0)
    two.close("")
    time.sleep(1.0)
    one.check()
    one.close("")
    three = Watch(Ranks(0, 2), 1)  # the other one never comes to the next run
    wait_until(lambda: store, 30.0, "the silence was not noticed")
    with pytest.raises(RankError, match="rank 1 has not been heard of"):
        three.check()


def test_last_words_reach_the_others(store):
    one, two = Watch(Ranks(0, 2), 0), Ranks(1, 2)
    two._watch = Watch(two, 0)
    two.fail(ConfigError("data.x is wrong"))
    wait_until(lambda: store, 30.0, "the words did not arrive")
    with pytest.raises(RankError, match="rank 1 failed: data.x is wrong"):
        one.check()
    assert two.is_over
    assert two.gather("mine") == ["mine"]  # calls nobody any more


# -- the command in processes of its own ------------------------------------------------------------------------------

LONG = 900.0  # seconds: only a run that hangs takes them, or a machine that is busy with much else
SLOW = """
import time
from pathlib import Path
from claw_lightning.rollout.envs.base import VectorEnv
class Sim(VectorEnv):
    def __init__(self, task: str, num_envs: int = 1, seed: int = 0) -> None:
        Path("starting").touch()
        time.sleep(600)
"""


@pytest.mark.slow
def test_an_interrupt_while_two_ranks_start_up_is_status_130_and_leaves_no_process(tmp_path):
    """As from a terminal: the signal comes to all of them."""
    (tmp_path / "slow_sim.py").write_text(SLOW)
    process = start(tmp_path, *FAST, "--trainer.devices=2", "--data.env.class_path=slow_sim.Sim")
    try:
        is_there = (tmp_path / "starting").exists
        wait_until(lambda: is_there() or process.poll() is not None, 240.0, "it never started")
        family = descendants(process)
        assert process.poll() is None and family
        for each in (psutil.Process(process.pid), *family):
            each.send_signal(signal.SIGINT)
        assert process.wait(120.0) == 128 + signal.SIGINT, (tmp_path / "err.txt").read_text()
        wait_until(lambda: not alive(family), 60.0, "a rank outlived the first one")
    finally:
        process.kill()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_signal_to_the_command_ends_two_ranks_with_a_checkpoint_and_leaves_no_process(tmp_path):
    """As from a scheduler that knows only the process it has started."""
    process = start(tmp_path, *ENDLESS, "--trainer.devices=2", "--trainer.check_val_every_n_epoch=1")
    try:
        wait_until(lambda: learning(tmp_path) or process.poll() is not None, LONG, "it never began to learn")
        family = descendants(process)
        assert process.poll() is None and len(family) >= 4, (tmp_path / "err.txt").read_text()  # a rank, workers
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 128 + signal.SIGTERM, (tmp_path / "err.txt").read_text()
        wait_until(lambda: not alive(family), 60.0, "a process outlived the first rank")
    finally:
        end(process)
    assert "Traceback" not in (tmp_path / "err.txt").read_text()
    last = tmp_path / "runs/version_0/checkpoints/last.ckpt"
    stored = read_checkpoint(str(last), training=True)
    marker = json.loads(Path(f"{last}.done").read_text())
    assert marker["updates"] == stored["claw"]["updates"] > 0
    assert marker["env_steps"] == stored["claw"]["env_steps"] > 0
    assert OptionCritic.load_from_checkpoint(last).updates == marker["updates"]
    assert not [path.name for path in last.parent.iterdir() if path.name.startswith(".")]  # nothing half written
    assert len(list(tmp_path.glob("runs/*"))) == 1


@pytest.mark.slow
def test_torchrun_starts_two_ranks_of_one_run(tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    if not torchrun.is_file():
        pytest.skip("no torchrun beside this interpreter")
    command = [str(torchrun), "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}", "-m",
               "claw_lightning", *FAST, "--trainer.devices=2", "--data.max_env_steps=400"]  # fmt: skip
    process = start(tmp_path, command=command)
    try:
        family: list[psutil.Process] = []

        def is_over():
            family.extend(each for each in descendants(process) if each not in family)
            return process.poll() is not None

        wait_until(is_over, LONG, "it did not end")
    finally:
        end(process)
    assert process.returncode == 0, (tmp_path / "err.txt").read_text()
    assert not alive(family)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]
    assert (tmp_path / "out.txt").read_text().count("run folder: ") == 1
    stored = read_checkpoint(str(tmp_path / "runs/version_0/checkpoints/last.ckpt"), training=True)
    # Each rank has collected its half, up to the last whole step of all.
    assert stored["ReplayDataModule"]["world"] == 2
    one, two = (part["limiter"]["inserted"] for part in stored["ReplayDataModule"]["ranks"])
    assert one == two and one + two == stored["claw"]["env_steps"]
    assert 390 <= stored["claw"]["env_steps"] <= 400


def end(process):
    """A command and all that it has started, where it still runs."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in (*descendants(process), psutil.Process(process.pid)):
            each.kill()
    process.wait(60.0)


# -- arithmetic -------------------------------------------------------------------------------------------------------


def test_merged_moments_are_those_of_all_observations():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3.0, size=(n, 4)) for n in (5, 0, 17)]
    count, mean, squares = merged_moments([batch_moments(part) for part in parts], 4)
    whole = batch_moments(np.concatenate(parts))
    assert count == whole[0]
    np.testing.assert_allclose(mean, whole[1], rtol=1e-12)
    np.testing.assert_allclose(squares, whole[2], rtol=1e-12)


def test_merged_metrics_are_sums_extremes_or_means():
    found = [
        {"replay/steps": 10.0, "loss/critic": 1.0, "staleness/max": 3.0, "rate/learner_wait": 0.5, "memory/free_gb": 2},
        {"replay/steps": 20.0, "loss/critic": 3.0, "staleness/max": 1.0, "rate/learner_wait": 0.1, "rollout/return": 7},
    ]  # fmt: skip
    merged = merge_metrics(found)
    assert (merged["replay/steps"], merged["loss/critic"], merged["staleness/max"]) == (30.0, 2.0, 3.0)
    assert (merged["rate/learner_wait_0"], merged["rate/learner_wait_1"]) == (0.5, 0.1)
    assert (merged["rollout/return"], merged["memory/free_gb"]) == (7.0, 2.0)


def state(inserted, sampled, total=3):
    limiter = {"inserted": inserted, "sampled": sampled, "warmup": 10}
    return {"limiter": limiter, "episodes": {"recent": [], "total": total}, "sampler": {}, "run": "r", "other": 1}


def test_counters_are_dealt_so_that_their_sums_stay():
    two = {**state(101, 64), "ranks": [state(101, 64), state(100, 64)], "world": 2}
    assert deal_state(two, 1, 2)["limiter"]["inserted"] == 100 and deal_state(two, 1, 2)["other"] == 1
    assert env_steps_of(two) == 201
    for size in (1, 3):
        dealt = [deal_state(two, rank, size) for rank in range(size)]
        assert sum(each["limiter"]["inserted"] for each in dealt) == 201
        assert sum(each["limiter"]["sampled"] for each in dealt) == 128
        assert sum(each["episodes"]["total"] for each in dealt) == 6
        assert "other" not in dealt[0]  # another rank's own, of whatever kind
    lost = {**state(100, 64), "ranks": [state(100, 64)], "world": 2}  # saved when the other one had gone
    assert env_steps_of(lost) == 200
    assert deal_state(lost, 1, 2)["limiter"] == {"inserted": 100, "sampled": 64, "warmup": 10}
    assert deal_state(state(100, 64), 0, 1)["limiter"]["inserted"] == 100


def test_one_rank_alone_costs_and_changes_nothing():
    alone = Ranks()
    loss, weight = torch.tensor(2.0, requires_grad=True), torch.ones(3)
    (part,) = alone.share(weight)
    assert ranks.times(part, loss) is loss
    assert alone.mean(weight)[0] is weight
    assert alone.everyone(True) and not alone.anyone(False)
    assert alone.gather("x") == ["x"] and alone.broadcast("x") == "x"
