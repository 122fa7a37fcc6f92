"""Chaos: what the figures say of hand-made runs, and one small real run that is broken at random moments."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from claw_lightning.data import EnvConfig
from tests.runs import fit_lockstep

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    if "chaos" not in sys.modules:
        spec = importlib.util.spec_from_file_location("chaos", ROOT / "scripts" / "chaos.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["chaos"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules["chaos"]


chaos = load_script()
CLEAN = {"rows": 10, "not_finite": 0, "quarantined": 0, **dict.fromkeys(chaos.BROKEN_ROWS, 0)}


def life(time, event, worker=0, **content):
    return {"event": event, "time": time, "worker": worker, **content}


def draws(start, stop, step, rate, heads=None):
    """Draws at even times; one worker's head rises by ``rate`` per second, from ``heads`` on."""
    count = round((stop - start) / step)
    first = heads or 0
    return [
        {"event": "draw", "time": start + i * step, "heads": [first + rate * i * step]} for i in range(count + 1)
    ]  # fmt: skip


def broken_off_run():
    """2 lanes, 100 vector steps per second; process 11 dies at 10.0, nothing comes until 13.0, when 12 is ready."""
    events = [{"event": "run", "time": 0.0, "settings": {"data.envs_per_worker": 2}}]
    events += [life(0.0, "start", pid=11, head=0), life(0.5, "ready", pid=11)]
    events += draws(1.0, 10.0, 0.1, 100)
    events += [{"event": "draw", "time": 10.0 + i * 0.1, "heads": [900]} for i in range(31)]
    events += draws(13.0, 30.0, 0.1, 100, heads=900)
    events += [life(10.25, "failure", pid=11, what="was killed by signal 9", head=900, delay=0.0)]
    events += [life(10.3, "start", pid=12, head=900), life(13.0, "ready", pid=12)]
    return sorted(events, key=lambda event: event["time"])


def test_a_death_is_followed_from_the_signal_to_the_full_rate():
    (found,) = chaos.outcomes(broken_off_run(), [chaos.Fault("kill", 10.0, 11)], window=2.0)
    assert (found.worker, found.what) == (0, "was killed by signal 9")
    assert found.detected == pytest.approx(0.25) and found.ready == pytest.approx(3.0)
    assert found.rate_before == pytest.approx(200.0) and found.rate_after == pytest.approx(0.0)
    assert 2.8 <= found.whole <= 3.05 and found.judged_until == pytest.approx(20.0)


def test_rates_are_of_windows_that_the_run_covers():
    collected = chaos.Collected(broken_off_run())
    assert collected.median_rate(2.0) == pytest.approx(200.0)
    assert collected.rate(2.03, 4.07) == pytest.approx(200.0)  # between two draws
    assert collected.rate(0.0, 2.0) is None and collected.rate(29.0, 31.0) is None
    assert collected.whole_after(29.0, 2.0, 1.0) is None
    nothing = chaos.Collected([])
    assert nothing.median_rate(2.0) is None and nothing.rate(0.0, 1.0) is None


def test_a_worker_may_be_one_of_several_and_its_successor_fail_before_it_is_ready():
    events = [
        life(0.0, "start", 0, pid=1, head=0), life(0.0, "start", 1, pid=2, head=0), life(1.0, "ready", 0, pid=1),
        life(1.0, "ready", 1, pid=2), life(5.0, "failure", 1, pid=2, what="x", head=9, delay=0.0),
        life(5.0, "start", 1, pid=3, head=9), life(6.0, "failure", 1, pid=3, what="y", head=9, delay=1.0),
        life(6.5, "failure", 0, pid=1, what="z", head=9, delay=0.0), life(6.5, "start", 0, pid=5, head=9),
        life(7.0, "start", 1, pid=4, head=9), life(7.5, "ready", 0, pid=5), life(8.0, "ready", 1, pid=4),
    ]  # fmt: skip
    first, second = chaos.outcomes(events, [chaos.Fault("raise", 6.25, 1), chaos.Fault("stop", 4.5, 2)])
    assert (first.worker, first.detected, first.ready) == (1, 0.5, 3.5)
    assert (second.worker, second.detected, second.ready) == (0, 0.25, 1.25)


def test_numbers_that_are_not_finite_are_no_failures():
    (found,) = chaos.outcomes(broken_off_run(), [chaos.Fault("nan_obs", 5.0, 11)])
    assert found.detected is None and found.ready is None and found.whole == pytest.approx(0.0)


def judged(outcome, checks=None, coded=True):
    found = chaos.Outcome(**{"kind": "kill", "time": 0.0, "pid": 7, "judged_until": 60.0, "whole": 3.0, **outcome})
    return chaos.broken_promises([found], chaos.Limits(), {**CLEAN, **(checks or {})}, coded)


@pytest.mark.parametrize(
    "outcome, words",
    [
        ({"detected": 0.9, "ready": 5.0}, None),
        ({"detected": 1.5, "ready": 5.0}, "noticed after 1.50 s, promised 1 s"),
        ({"kind": "stop", "detected": 5.9, "ready": 9.0}, None),
        ({"kind": "hang_gil", "detected": 6.5, "ready": 9.0}, "promised 6 s"),
        ({}, "not noticed within 60.0 s"),
        ({"judged_until": 0.5}, None),  # the run ended right after it
        ({"detected": 0.5, "ready": 11.0}, "ready again 10.5 s after"),
        ({"detected": 0.5}, "not ready again 59.5 s after"),
        ({"detected": 0.5, "judged_until": 9.0}, None),
        ({"detected": 0.5, "ready": 5.0, "whole": 10.4}, None),
        ({"detected": 0.5, "ready": 5.0, "whole": 10.6}, "back at 95 % of the rate after 10.1 s"),
        ({"detected": 0.5, "ready": 5.0, "whole": None}, "back at 95 % of the rate never"),
        ({"detected": 0.5, "ready": 5.0, "whole": 10.6, "alone_until": 8.0}, None),  # something else broke by then
        ({"kind": "print"}, None),
        ({"kind": "nan_obs"}, "0 rows quarantined after 1 numbers"),
    ],
)
def test_promises(outcome, words):
    lines = judged(outcome)
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]


@pytest.mark.parametrize(
    "checks, coded, words",
    [
        ({"torn": 2}, True, "2 of 10 sampled rows: torn"),
        ({"cross_episode": 1}, True, "cross_episode"),
        ({"torn": 2}, False, None),
        ({"not_finite": 1}, False, "not finite"),
        ({"rows": 0}, True, "no row was checked"),
    ],
)
def test_promises_about_rows(checks, coded, words):
    lines = judged({"detected": 0.1, "ready": 1.0}, checks, coded)
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]


def test_a_run_without_a_summary_of_its_rows_is_broken():
    assert chaos.broken_promises([], chaos.Limits(), None, False) == ["the run wrote no summary of its rows"]


def test_summary_and_report():
    events = broken_off_run()
    found = chaos.outcomes(events, [chaos.Fault("kill", 10.0, 11), chaos.Fault("print", 5.0, 11)])
    result = chaos.summary(events, found)
    assert result["faults"]["kill"]["detected"] == {"count": 1, "median": 0.25, "max": 0.25}
    assert "detected" not in result["faults"]["print"] and result["faults"]["print"]["injected"] == 1
    assert result["events"] == {"start": 2, "failure": 1, "recycle": 0, "lost": 0}
    assert result["env_steps"] == pytest.approx(5200.0) and result["seconds"] == pytest.approx(29.0)
    result |= {"checks": CLEAN, "exit_status": 130, "exit_seconds": 1.0, "orders_not_taken": [], "skipped": 0}
    text = chaos.report({**result, "broken": []})
    assert "0.25" in text and "median rate 200/s" in text and text.endswith("nothing promised was broken")
    assert chaos.report({"broken": ["no start"]}) == "BROKEN: no start"


# -- reading and injecting --------------------------------------------------------------------------------------------


def test_the_tail_of_a_log_that_is_being_written(tmp_path):
    tail = chaos.EventTail(tmp_path)
    assert tail.ready() == [] and not tail.is_learning
    path = tmp_path / "version_0" / "events.jsonl"
    path.parent.mkdir()
    lines = [json.dumps(event) + "\n" for event in (
        life(0.0, "start", pid=1, head=0), life(1.0, "ready", pid=1),
        {"event": "draw", "time": 2.0, "heads": [0], "updates": 0, "draw": {}},
        {"event": "draw", "time": 2.1, "heads": [3], "updates": 1, "draw": {}},
        life(3.0, "failure", pid=1, what="x", head=3, delay=0.0),
    )]  # fmt: skip
    expected = [([], False), ([], False), ([], True), ([1], True), ([], True)]
    for line, (ready, is_learning) in zip(lines, expected):
        with path.open("a") as file:
            file.write(line[:10])
        before = len(tail.read().events)
        with path.open("a") as file:
            file.write(line[10:])
        assert tail.ready() == ready and tail.is_learning == is_learning
        assert len(tail.events) == before + 1
    assert tail.started == [1] and set(tail.events[2]) == {"event", "time", "heads"}


def test_a_plan_has_every_fault_in_a_part_of_the_time_of_its_own():
    kinds = ["kill"] * 3 + ["stop", "raise"]
    found = chaos.plan(kinds, 60.0, 15.0, 0)
    assert sorted(kind for _, kind in found) == sorted(kinds)
    times = [moment for moment, _ in found]
    assert times == sorted(times) and times[0] >= 4.0 and times[-1] <= 45.0
    assert found == chaos.plan(kinds, 60.0, 15.0, 0) != chaos.plan(kinds, 60.0, 15.0, 1)
    assert chaos.plan([], 60.0, 15.0, 0) == []


def test_each_process_is_hit_once_and_simulators_get_orders(tmp_path):
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        pids = [process.pid for process in processes]
        injector = chaos.Chaos(lambda: pids, [(0.0, "kill"), (0.1, "kill"), (0.05, "raise")], orders=tmp_path)
        injector.run()
        assert [process.wait(10.0) for process in processes] == [-9, -9]
    finally:
        for process in processes:
            process.kill()
    assert {fault.pid for fault in injector.faults} == set(pids)
    assert [path.name for path in tmp_path.iterdir()] == ["raise.1"]
    injector = chaos.Chaos(list, [(0.0, "kill"), (60.0, "kill")])
    injector.run(goes_on=lambda: False)
    assert injector.faults == [] and injector.skipped == 1


# -- the command line -------------------------------------------------------------------------------------------------


def test_arguments():
    assert chaos.parse_args([]).kinds_planned == ["kill"] * 3 + ["stop", "nan_obs", "nan_reward", "inf_obs", "raise"]
    args = chaos.parse_args(["--coded", "--kills", "2", "--", "--data.batch_size", "64"])
    assert (args.kinds_planned, args.extra, args.config) == (["kill"] * 2, ["--data.batch_size", "64"], None)
    args = chaos.parse_args(["--minutes", "1", "--every", "15", "--kinds", "print"])
    assert args.kinds_planned == ["kill", "stop", "print", "kill"]


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--minutes", "0"], "--minutes"),
        (["--kills", "-1"], "--kills"),
        (["--config", "no.yaml"], "no.yaml"),
        (["--config", str(ROOT / "conf/pendulum.yaml"), "--coded"], "--coded"),
        (["--json", "/no/such/folder/file"], "--json"),
        (["--kinds", "explode"], "explode"),
        (["--folder", str(ROOT)], "--folder"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, word, capsys):
    with pytest.raises(SystemExit) as caught:
        chaos.parse_args(arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and word in err and err.count("\n") == 1


# -- a real run -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("autoreset, faults", [("same_step", ["kill", "stop", "kill"])])
def test_a_run_whose_workers_are_killed_and_stopped_learns_from_whole_rows_alone(tmp_path, autoreset, faults):
    """The ring goes round several times, during the faults and after them."""
    tail = chaos.EventTail(tmp_path)
    injector = chaos.Chaos(tail.ready, [(0.5 * i, kind) for i, kind in enumerate(faults)], seed=1)
    # Waits for a worker that has taken a step: begins as soon as the run learns.
    breaker = threading.Thread(target=injector.run)

    class Check(chaos.RowCheck):
        def on_batch_sampled(self, trainer, module, batch):
            super().on_batch_sampled(trainer, module, batch)
            data = trainer.datamodule
            self.restarts = data.pool.restarts
            if self.restarts == len(faults) and self.end is None:
                self.end = data.env_steps + 3 * data.capacity  # all that was written before is overwritten
            if self.end is not None and data.env_steps >= self.end:
                trainer.should_stop = True

    check = Check(str(tmp_path / "rows.json"), coded=True)
    check.end = None
    init_args = {"obs_size": 128, "max_length": 12, "autoreset": autoreset}
    data = {
        "env": EnvConfig("CodedEnv", init_args), "mode": "overlapped", "num_workers": 2, "envs_per_worker": 8,
        "capacity": 400, "max_env_steps": 0, "samples_per_insert": 4, "record_events": True,
        "deadlines": {"step": 2.0, "wait": 2.0, "pull": 2.0},
    }  # fmt: skip
    breaker.start()
    try:
        fit_lockstep(tmp_path, callbacks=[check], data=data, limit_val_batches=0)
    finally:
        injector.stop()
        breaker.join()
    assert check.restarts == len(faults)
    counts = json.loads((tmp_path / "rows.json").read_text())
    assert counts["rows"] > 1000 and {name: counts[name] for name in chaos.BROKEN_ROWS} == dict.fromkeys(
        chaos.BROKEN_ROWS, 0
    )
    found = chaos.outcomes(tail.read().events, injector.faults)
    assert {outcome.what[:10] for outcome in found if outcome.kind == "kill"} == {"was killed"}
    assert len(found) == len(faults) and all(outcome.detected is not None for outcome in found)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in tail.started)
