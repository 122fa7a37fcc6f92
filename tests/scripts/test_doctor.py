"""The doctor: what it says of machines that this one is not, and that nothing missing ends it."""

import ast
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.loading import ROOT, load_script

doctor = load_script("doctor")
OK, LIMITED, MISSING = doctor.OK, doctor.LIMITED, doctor.MISSING
GIB = 2**30

HEALTHY = {
    "torch": doctor.Answer({"version": "2.13.0+cpu", "cuda": None, "archs": [], "sees_gpu": False}),
    "step": doctor.Answer({"version": "1.2.5", "finite": True}),
    "draw": doctor.Answer({"version": "3.11.0"}),
}
GYM_PYTHON = {"version": (3, 8, 18), "libpython": "/lib/libpython3.8.so.1.0", "modules": ["numpy", "torch", "isaacgym"]}


def gpu(name="NVIDIA GeForce RTX 4090", capability=(8, 9), driver="580.1", memory=24576):
    return doctor.Gpu(name, capability, driver, memory)


def statuses(findings):
    return {finding.name: finding.status for finding in findings}


@pytest.fixture
def machine(monkeypatch):
    """A healthy machine without a GPU; tests change its answers. No program is started."""
    answers = dict(HEALTHY, gpus=([], "no nvidia-smi"), pythons={}, pythons_38=[])

    def ask_python(python, code, *patience, **environment):
        probe = {doctor.TORCH_PROBE: "torch", doctor.STEP_PROBE: "step", doctor.DRAW_PROBE: "draw"}[code]
        return answers[probe]

    def look_at_python(path):
        known = {"version": (3, 11, 7), "modules": ["numpy", "torch", "envpool"], "versions": {"envpool": "1.2.5"}}
        return doctor.Interpreter(path, **answers["pythons"].get(path, known))

    monkeypatch.setattr(doctor, "ask_python", ask_python)
    monkeypatch.setattr(doctor, "look_at_python", look_at_python)
    monkeypatch.setattr(doctor, "look_at_gpus", lambda: answers["gpus"])
    monkeypatch.setattr(doctor, "pythons_38", lambda: answers["pythons_38"])
    monkeypatch.setattr("claw_lightning.limits.tightest_room", lambda: (10 * GIB, 16 * GIB, "this machine"))
    monkeypatch.setattr("claw_lightning.limits.usable_cores", lambda: 8.0)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: resource_usage(100 * GIB))
    return answers


def resource_usage(free):
    return type("Usage", (), {"free": free})


# -- the whole --------------------------------------------------------------------------------------------------------


def test_a_healthy_machine_without_a_gpu_would_train(machine, tmp_path, capsys):
    assert doctor.main(["--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "hand_reach_dense) would train." in printed
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["trains"] is True
    assert len(written["findings"]) == sum(line.split()[0] in (OK, LIMITED, MISSING) for line in printed.splitlines())
    assert {finding["status"] for finding in written["findings"]} == {OK, LIMITED, MISSING}  # other simulators are
    for finding in written["findings"]:
        assert finding["status"] == OK or finding["cure"], finding
        assert "\n" not in finding["text"] + finding["cure"]


@pytest.mark.parametrize(
    "change, name",
    [
        ({"step": doctor.Answer({}, "No module named 'envpool'")}, "default simulator"),
        ({"step": doctor.Answer({"version": "1.2.5", "finite": False})}, "default simulator"),
        ({"torch": doctor.Answer({}, "ended with signal 4")}, "torch"),
    ],
)
def test_what_the_default_needs_decides_the_status(machine, change, name, capsys):
    machine.update(change)
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("missing %s:" % name))
    assert lines[at + 1].strip().startswith("-> ")
    assert "would NOT train" in lines[-1]


def test_other_simulators_and_interpreters_do_not_decide_it(machine, capsys):
    machine["pythons"]["/no/python"] = {"problem": "[Errno 2] No such file or directory"}
    machine["draw"] = doctor.Answer({}, "No module named 'mujoco'")
    assert doctor.main(["--worker-python", "/no/python"]) == 0
    assert "missing worker Python /no/python: [Errno 2]" in capsys.readouterr().out


def test_an_interpreter_that_was_not_named_and_does_not_start_is_not_mentioned(machine, capsys):
    machine["pythons_38"] = ["/shims/python3.8"]
    machine["pythons"]["/shims/python3.8"] = {"problem": "command not found"}
    assert doctor.main([]) == 0
    assert "/shims" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "broken",
    ["judge_gpus", "judge_drawing", "judge_process_limits", "judge_absent", "judge_interpreter", "judge_cores",
     "judge_bfloat16"],
)  # fmt: skip
def test_a_look_that_fails_becomes_a_line(machine, broken, monkeypatch, capsys):
    def fail(*args):
        raise KeyError("not there")

    monkeypatch.setattr(doctor, broken, fail)
    assert doctor.main([]) == 0
    assert "could not be looked at (KeyError: 'not there')" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["judge_memory", "judge_torch", "judge_default", "look_at_limits"])
def test_a_needed_look_that_fails_counts_as_missing(machine, broken, monkeypatch):
    monkeypatch.setattr(doctor, broken, lambda *args: 1 / 0)
    assert doctor.main([]) == 1


def test_a_json_file_that_cannot_be_written_is_one_line(machine, tmp_path, capsys):
    assert doctor.main(["--json", str(tmp_path / "no" / "file.json")]) == 1
    said = capsys.readouterr()
    assert said.err.strip().startswith("--json: cannot write") and not said.out  # before anything was looked at


@pytest.mark.parametrize(
    "answer", ["{}", '{"version": "new"}', '{"version": [3, 8, 1], "libpython": "", "modules": 5}']
)
def test_an_interpreter_that_answers_something_else_is_a_line(tmp_path, answer):
    wrapper = tmp_path / "python"
    wrapper.write_text("#!/bin/sh\necho '%s'\n" % answer)
    wrapper.chmod(0o755)
    assert doctor.look_at_python(str(wrapper)).problem.startswith("answers as no Python does: {")


def test_what_a_hanging_interpreter_has_started_ends_with_it(tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text("#!/bin/sh\nsleep 600 &\necho $! > %s/child\nwait\n" % tmp_path)
    wrapper.chmod(0o755)
    assert doctor.ask([str(wrapper)], patience=1.0).problem == "no answer within 1 s"
    child = int((tmp_path / "child").read_text())
    status = Path("/proc/%d/stat" % child)  # killed, it may wait for whoever adopted it
    assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] in "ZX"


@pytest.mark.slow
def test_this_machine_for_real(tmp_path):
    """The suite runs here, so the default would train here; the interpreter that is named does not exist."""
    command = [sys.executable, "scripts/doctor.py", "--worker-python", "/no/such/python", "--json", tmp_path / "a.json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in run.stdout + run.stderr
    findings = {each["name"]: each for each in json.loads((tmp_path / "a.json").read_text())["findings"]}
    assert findings["default simulator"]["status"] == OK
    assert findings["worker Python /no/such/python"]["status"] == MISSING
    assert findings["shared memory"]["status"] == OK


def test_an_old_python_can_read_it():
    ast.parse((ROOT / "scripts" / "doctor.py").read_text(), feature_version=(3, 8))


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, capability, status, words",
    [
        ("Tesla V100-SXM2-32GB", (7, 0), OK, "reported to work"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), OK, "reported to work"),
        ("NVIDIA GeForce RTX 3090", (8, 6), OK, "reported to work"),
        ("NVIDIA GeForce RTX 4090", (8, 9), OK, "torch 1.13"),
        ("NVIDIA H100 PCIe", (9, 0), MISSING, "segmentation fault"),
        ("NVIDIA H200", (9, 0), MISSING, "segmentation fault"),
        ("NVIDIA B200", (10, 0), LIMITED, "no torch for Python 3.8"),
        ("NVIDIA GeForce RTX 5090", (12, 0), LIMITED, "no torch for Python 3.8"),
        ("Tesla P100", (6, 0), LIMITED, "no report"),
    ],
)
def test_generations_and_isaac_gym(name, capability, status, words):
    found = {f.name: f for f in doctor.judge_gpus([gpu(name, capability)], "")}
    assert found["GPU"].status == OK
    line = found["Isaac Gym on " + name]
    assert line.status == status and words in line.text
    assert status == OK or line.cure
    without_rt = any(word in name for word in ("V100", "A100", "H100", "H200", "B200"))
    assert ("Isaac Sim on " + name in found) == without_rt


def test_drivers_that_crash_isaac_sim():
    found = statuses(doctor.judge_gpus([gpu(driver="590.48")], ""))
    assert found["Isaac Sim on NVIDIA GeForce RTX 4090"] == LIMITED


def test_equal_gpus_are_one_line():
    found = list(doctor.judge_gpus([gpu(), gpu()], ""))
    assert [f.name for f in found].count("GPU") == 1 and found[0].text.startswith("2 x ")


@pytest.mark.parametrize(
    "line, expected",
    [
        ("NVIDIA H200, 9.0, 570.124.06, 143771", doctor.Gpu("NVIDIA H200", (9, 0), "570.124.06", 143771)),
        ("NVIDIA GB10, 12.1, 580.95, [N/A]", doctor.Gpu("NVIDIA GB10", (12, 1), "580.95", 0)),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", None),
        ("Tesla K80, [N/A], 470, 11441", None),
        ("", None),
    ],
)
def test_lines_of_the_gpu_table(line, expected):
    assert doctor.parse_gpu(line) == expected


@pytest.mark.parametrize(
    "capability, archs, expected",
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_86"], True),  # same major version
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),  # compiled by the driver
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_90a", "sm_120"], True),
        ((8, 0), ["nonsense"], False),
    ],
)
def test_kernels_for_a_gpu(capability, archs, expected):
    assert doctor.has_kernels(capability, archs) is expected


def test_torch_and_the_gpu():
    cuda = {"version": "2.8.0+cu128", "cuda": "12.8", "archs": ["sm_80", "sm_90"], "sees_gpu": True}
    judge = doctor.judge_torch
    assert judge(doctor.Answer(cuda), [gpu("NVIDIA H200", (9, 0))]).status == OK
    old = judge(doctor.Answer(cuda), [gpu("RTX 5090", (12, 0))])
    assert old.status == LIMITED and "sm_120" in old.text and "sm_120" in old.cure
    assert "sees no GPU" in judge(doctor.Answer(dict(cuda, sees_gpu=False)), [gpu()]).text
    assert judge(HEALTHY["torch"], []).status == OK
    assert judge(HEALTHY["torch"], [gpu()]).status == LIMITED


@pytest.mark.parametrize(
    "python, name, status",
    [
        (dict(GYM_PYTHON, modules=[*GYM_PYTHON["modules"], "isaacgymenvs"]), "Isaac Gym", OK),
        (GYM_PYTHON, "Isaac Gym", LIMITED),  # without its tasks
        (dict(GYM_PYTHON, libpython=""), "Isaac Gym", MISSING),
        (dict(GYM_PYTHON, version=(3, 11, 7)), "Isaac Gym", MISSING),
        ({"version": (3, 12, 1), "modules": ["numpy", "torch", "isaaclab"]}, "Isaac Lab", OK),
        ({"version": (3, 12, 1), "modules": ["numpy", "torch", "mujoco_playground"]}, "Playground", OK),
    ],
)
def test_simulators_of_an_interpreter(python, name, status):
    found = statuses(doctor.judge_interpreter(doctor.Interpreter("/py", **python), has_gpu=True))
    assert found[name + " in /py"] == status
    without = statuses(doctor.judge_interpreter(doctor.Interpreter("/py", **python), has_gpu=False))
    assert without[name + " in /py"] == (LIMITED if status == OK else status)


@pytest.mark.parametrize("robotics, mujoco, status", [("1.4.2", "3.11.0", OK), ("1.4.2", "4.0.0", LIMITED),
                                                     ("1.4.2", "3.12.0", LIMITED), ("1.5.0", "4.0.0", OK)])  # fmt: skip
def test_gymnasium_robotics_and_its_mujoco(robotics, mujoco, status):
    versions = {"gymnasium-robotics": robotics, "mujoco": mujoco}
    python = doctor.Interpreter("/py", (3, 11, 0), "", ["numpy", "torch", "gymnasium_robotics"], versions)
    assert statuses(doctor.judge_interpreter(python, False))["Gymnasium-Robotics in /py"] == status


@pytest.mark.parametrize("jax, status", [("0.9.0", OK), ("0.10.2", LIMITED)])
def test_playground_and_its_jax(jax, status):
    versions = {"playground": "0.2.0", "jax": jax}
    python = doctor.Interpreter("/py", (3, 11, 0), "", ["numpy", "torch", "mujoco_playground"], versions)
    assert statuses(doctor.judge_interpreter(python, True))["Playground in /py"] == status


def test_interpreters_that_cannot_run_workers():
    judge = doctor.judge_interpreter
    (old,) = judge(doctor.Interpreter("/py", (3, 7, 1)), False)
    assert old.status == MISSING and "3.8" in old.text
    bare = next(iter(judge(doctor.Interpreter("/py", (3, 9, 1), "", ["numpy"]), False)))
    assert bare.status == LIMITED and bare.cure == "/py -m pip install torch"


def test_this_python_and_its_packages():
    first, second = doctor.judge_this_python((3, 10, 2), lambda name: None if name == "lightning" else "1")
    assert (first.status, second.status) == (MISSING, MISSING) and first.needed and second.needed
    assert second.text == "lightning not installed"


@pytest.mark.parametrize("cores, affinity, status, words", [
    (1.5, 4, LIMITED, "quota"), (2.0, 2, OK, "data.num_workers: 1, data.learner_threads: 1"),
    (8.0, 8, OK, "data.num_workers: 6, data.learner_threads: 2"), (16.0, 64, OK, "16 of 64"),
])  # fmt: skip
def test_cores_and_their_split(cores, affinity, status, words):
    found = doctor.judge_cores(cores, affinity)
    assert found.status == status and words in found.text
    workers, learner = doctor.split_cores(max(2, int(cores)))
    assert workers + learner == max(2, int(cores))


def test_memory_disk_and_limits_of_processes():
    assert doctor.judge_memory(GIB // 2, 4 * GIB, "group").status == MISSING
    assert doctor.judge_memory(2 * GIB, 4 * GIB, "group").status == LIMITED
    assert doctor.judge_disk(GIB // 4, "/runs").status == MISSING
    assert doctor.judge_disk(2 * GIB, "/runs").status == LIMITED
    files, _ = doctor.judge_process_limits(256, 65536)
    assert files.status == LIMITED and files.cure == "ulimit -n 4096"
    assert [f.text for f in doctor.judge_process_limits(-1, -1)][0] == "no limit"


def test_shared_memory_that_is_forbidden(monkeypatch):
    (found,) = doctor.judge_shared_memory("Operation not permitted", None)
    assert found.status == MISSING and found.needed

    def forbid(*args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(doctor.os, "memfd_create", forbid)
    (found,) = doctor.look_at_shared_memory()
    assert found.status == MISSING and "not permitted" in found.text


def test_images():
    broken, works = doctor.Answer({}, "no EGL"), doctor.Answer({"version": "3"})
    assert "osmesa" in doctor.judge_drawing({"egl": broken, "osmesa": works}).text
    assert "libegl1" in doctor.judge_drawing({"egl": broken, "osmesa": broken}).cure
    assert "robotics" in doctor.judge_drawing({"egl": doctor.Answer({}, "No module named 'mujoco'")}).cure


# -- probes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code, problem", [
    ("print('noise'); print('{\"a\": 1}')", ""), ("import no_such_module", "No module named"),
    ("import sys; sys.exit(3)", "status 3"), ("print('{')", "status 0"), ("print('[1]')", "status 0"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "signal 4"),
])  # fmt: skip
def test_programs_that_are_asked(code, problem):
    answer = doctor.ask([sys.executable, "-S", "-c", code], 60.0)
    assert answer.found == ({} if problem else {"a": 1}) and problem in answer.problem


def test_programs_that_are_not_there_or_do_not_answer():
    assert "No such file" in doctor.ask(["/no/such/program"]).problem
    assert "Permission denied" in doctor.ask(["/"]).problem
    assert doctor.ask(["sleep", "60"], 0.1).problem == "no answer within 0.1 s"


def test_the_interpreter_is_looked_at_for_real():
    found = doctor.look_at_python(sys.executable)
    assert found.version == tuple(sys.version_info[:3]) and {"numpy", "torch", "envpool"} <= set(found.modules)
    assert found.versions["envpool"] and not found.problem


def test_a_gpu_tool_that_is_not_there_or_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.look_at_gpus() == ([], "no nvidia-smi")
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "NVIDIA-SMI has failed"; exit 9\n')
    tool.chmod(0o755)
    assert doctor.look_at_gpus() == ([], "NVIDIA-SMI has failed")
    tool.write_text("#!/bin/sh\necho 'NVIDIA A100-SXM4-80GB, 8.0, 550.54, 81920'\n")
    assert doctor.look_at_gpus()[0] == [doctor.Gpu("NVIDIA A100-SXM4-80GB", (8, 0), "550.54", 81920)]


def test_limits_of_this_process_are_read(machine, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = {finding.name: finding for finding in doctor.examine([])}
    assert found["open files"].text == "no limit"
