"""Arms in processes of their own: both ends of the protocol, and ends that die, hang or say nothing."""

import importlib.util
import io
import json
import os
import sys
import textwrap
from types import SimpleNamespace

import psutil
import pytest

from tests.scripts.loading import ROOT, load_script

measuring = load_script("measuring")
served = load_script("served")
SERVE = """
import json, os, sys, time
first = json.loads(sys.stdin.readline())
how = first["arm"]
if how == "unbuilt":
    print(json.dumps({"error": "ImportError: no such package"}), flush=True)
    sys.exit(1)
print(json.dumps({"ready": True, "affinity": first["affinity"], "threads": first["threads"]}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if how == "dies":
        print("out of memory", file=sys.stderr)
        os._exit(3)
    if how == "hangs":
        time.sleep(60)
    if how == "babbles":
        print("hello", flush=True)
    elif how == "fails":
        print(json.dumps({"error": "ValueError: not like this"}), flush=True)
    else:
        seconds = request.get("seconds") or 2.0
        print(json.dumps({"count": request.get("count") or 10, "seconds": seconds, "cpu": 0.5}), flush=True)
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """A suite whose arms speak the protocol without doing anything."""
    (tmp_path / "serve.py").write_text(SERVE)
    monkeypatch.setattr(served, "ARMS", tmp_path)
    args = SimpleNamespace(against=("skrl",), peers_folder=tmp_path, rounds=2, seconds=0.5, json=None)
    rows = {"1": measuring.Row("g", ("one", "two"), "one over two", measuring.Target(1.0, True))}
    return measuring.Bench(args, measuring.Results("learner", {}, {}, {}), rows)


def arm(name, **settings):
    return served.Arm("claw", name, settings)


def start(bench, name, tmp_path, deadline=20.0):
    return served.Server(arm(name), sys.executable, tmp_path / "x.log", deadline)


def test_arms_take_turns_and_their_rates_become_rows(bench):
    found = served.measure_served(bench, "g", {"one": arm("fine"), "two": arm("fine")}, "updates/s")
    bench.add_group("g", served.rates(found))
    assert [len(figures) for figures in found.values()] == [2, 2]  # the first round does not count
    assert bench.results.ratios == {"1": 1.0} and bench.results.units == {"g": "updates/s"}
    assert bench.results.rows_per_second["g/one"]["median"] == 20.0
    assert bench.results.cpu_share == {"g/one": 1.0, "g/two": 1.0}
    assert bench.results.arms["one"]["affinity"] == [0]


def test_whole_runs_of_so_much_work_need_no_round_of_warming_up(bench):
    found = served.measure_served(bench, "g", {"one": arm("fine")}, "steps/s", count={"one": 300}, rounds=3)
    assert [figure.done for figure in found["one"]] == [300] * 3


@pytest.mark.parametrize(
    "how, text",
    [("dies", "ended with status 3: out of memory"), ("fails", "ValueError: not like this"),
     ("babbles", "no JSON"), ("unbuilt", "ImportError: no such package")],
)  # fmt: skip
def test_an_arm_that_fails_costs_its_own_rows_and_says_why(how, text, bench):
    found = served.measure_served(bench, "g", {"one": arm("fine"), "two": arm(how)}, "updates/s")
    bench.add_group("g", served.rates(found))
    assert len(found["one"]) == 2 and "two" not in found
    assert text in bench.results.skipped["1"] and "log: " in bench.results.skipped["1"]


def test_an_arm_that_hangs_is_given_up_at_its_deadline_and_ended(bench, tmp_path):
    server = start(bench, "hangs", tmp_path)
    with pytest.raises(served.ServedError, match=r"claw hangs: gave no answer in 0\.2 s"):
        server.run(0.1, deadline=0.2)
    server.process.wait = lambda seconds=None, wait=server.process.wait: wait(0.1 if seconds else None)
    server.close()
    assert not psutil.pid_exists(server.pid)


def test_nothing_is_left_of_a_measurement_that_is_broken_off(bench):
    seen = []

    def measure():
        with served.serving(bench, {"one": arm("fine")}) as servers:
            seen.append(servers["one"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert not psutil.pid_exists(seen[0].pid) and not (seen[0].log.parent / "tmp").exists()


def test_packages_that_are_not_there_or_not_wanted_are_skipped_with_the_reason(bench):
    arms = {"one": served.Arm("skrl", "td3", {}), "two": served.Arm("torchrl", "td3", {})}
    assert served.measure_served(bench, "g", arms, "updates/s") == {}
    assert "peers --against skrl" in bench.reason("one") and "--against" in bench.reason("two")


def test_arms_get_no_import_paths_of_this_process(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    (tmp_path / "serve.py").write_text(
        SERVE.replace('"ready": True', '"ready": True, "path": os.environ["PYTHONPATH"]')
    )
    server = start(bench, "fine", tmp_path)
    server.close()
    assert server.about["path"] == str(ROOT)


# -- the other end ----------------------------------------------------------------------------------------------------


@pytest.fixture
def serve(monkeypatch):
    spec = importlib.util.spec_from_file_location("serve", ROOT / "scripts" / "peers" / "serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import torch

    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(module.os, "sched_setaffinity", lambda pid, cores: None)
    monkeypatch.setattr(module.os, "environ", dict(os.environ))
    return module


def talk(serve, path, *requests):
    source = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    target = io.StringIO()
    serve.serve(serve.Channel(source, target), str(path))
    return [json.loads(line) for line in target.getvalue().splitlines()]


def arms_file(tmp_path, text):
    path = tmp_path / "arms.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_call_is_built_once_and_asked_for_seconds_or_for_a_count(serve, tmp_path):
    path = arms_file(
        tmp_path,
        """
        calls = []
        def make(settings):
            return lambda: calls.append(1) or settings["step"]
        ARMS = {"plain": make}
        """,
    )
    first = {"arm": "plain", "settings": {"step": 3}, "affinity": [0], "threads": 1}
    runs = [{"do": "run", "count": 7}, {"do": "run", "seconds": 1e-9}, {"do": "close"}, {"do": "run", "count": 1}]
    ready, counted, timed = talk(serve, path, first, *runs)
    assert ready["ready"] and ready["threads"] == 1 and "torch" in ready["versions"]
    assert counted["count"] == 9 and timed["count"] == 3 and timed["seconds"] > 0
    assert len(sys.modules["benchmark_arms"].calls) == 1 + 3 + 1  # the first is warming up


def test_an_arm_may_answer_in_its_own_way(serve, tmp_path):
    path = arms_file(
        tmp_path,
        """
        class Own:
            def __init__(self, settings): pass
            def drive(self, channel):
                while (request := channel.receive()) is not None:
                    channel.answer(echo=request["do"])
        ARMS = {"own": Own}
        """,
    )
    assert talk(serve, path, {"arm": "own"}, {"do": "dance"}) == [{"echo": "dance"}]


def test_cores_are_places_among_those_that_there_are(serve, monkeypatch):
    monkeypatch.setattr(serve, "CORES", [4, 5])
    assert serve.cores([0, 1]) == {4, 5} and serve.cores([1, 7]) == {5}


def test_the_whole_program_keeps_prints_apart_and_tells_an_error_in_one_line(tmp_path):
    path = arms_file(
        tmp_path,
        """
        import subprocess, sys
        print("imported"); subprocess.run(["echo", "from a child"])
        def make(settings):
            raise ValueError("two\\nlines")
        ARMS = {"broken": make}
        """,
    )
    served_arm = served.Arm("claw", "broken", {})
    log = tmp_path / "x.log"

    class Here(served.Arm):
        file = path

    with pytest.raises(served.ServedError, match="ValueError: two lines"):
        served.Server(Here(*served_arm), sys.executable, log, 60.0)
    assert {"imported", "from a child"} <= set(log.read_text().splitlines())
