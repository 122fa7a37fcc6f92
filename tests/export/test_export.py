"""Exported files against agents: every kind of policy, checked in a process that cannot import the package."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from claw_lightning.errors import ConfigError
from claw_lightning.export import check, command
from claw_lightning.export.check import ExportError, compare, draw_inputs, play_agent
from claw_lightning.export.files import describe, format_of, write
from claw_lightning.export.graph import PolicyGraph
from claw_lightning.settings import Distillation
from tests.runs import ROOT, SPEC, fit_lockstep, make_module

pytest.importorskip("onnxruntime")

BOUNDED = replace(SPEC, action_low=[-2.0, 0.0], action_high=[2.0, 5.0])
DISCRETE = replace(SPEC, action_size=1, num_actions=3, action_low=[0.0], action_high=[2.0])
STUDENT = Distillation(kind="student", student_hidden_sizes=(8,))
DRAWN = {"max_option_duration": 5, "min_option_duration": 2, "greedy_options": False, "interruption": 0.1}
#: Settings, task, whether the student is exported, format. The script's test has deterministic options besides.
FAMILIES = {
    "durations, sampling, separate heads": (
        {**DRAWN, "actor": "gaussian", "option_heads": "separate"}, BOUNDED, False, "onnx",
    ),
    "gaussian, K = 1": ({"num_options": 1, "actor": "gaussian"}, BOUNDED, False, "onnx"),
    "image alone, discrete": (
        {"actor": "categorical", "option_selection": "random"},
        replace(DISCRETE, obs_size=0, image_shape=(3, 13, 13)), False, "onnx",
    ),
    "student": ({"distillation": STUDENT, "normalize_observations": False}, BOUNDED, True, "onnx"),
    "everything, torch": (DRAWN, replace(BOUNDED, image_shape=(1, 9, 9)), False, "torch"),
    "options": ({"policy_average": 0.1}, BOUNDED, False, ""),
    "durations, sampling, interruption": (DRAWN, BOUNDED, False, ""),
}  # fmt: skip


def make_policy(settings, spec):
    """A module whose options end and begin often, with statistics of its own in the normaliser."""
    module = make_module(**settings)
    module.build(spec)
    for policy in filter(None, (module.policy, module.average)):
        with torch.no_grad():
            for network in filter(None, (policy.termination, policy.option_policy)):
                network[-1].weight.mul_(300.0)
                network[-1].bias.zero_()
            policy.actor.body[-1].weight.mul_(30.0)
            policy.normalizer.mean.normal_()
            policy.normalizer.std.uniform_(0.5, 2.0)
    return module


def made(name):
    settings, spec, student, kind = FAMILIES[name]
    module = make_policy(settings, spec)
    graph = PolicyGraph(module.agent(student=student), spec)
    return module, graph, describe(graph, module, student), kind


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name][3]])
def test_a_file_does_what_the_agent_does(name, tmp_path):
    module, graph, metadata, kind = made(name)
    path = tmp_path / f"policy{'.onnx' if kind == 'onnx' else '.pt2'}"
    write(graph, metadata, path, kind)
    found = compare(path, graph, module, metadata)
    assert found.observations >= 1000 and found.difference < 1e-6 and found.probabilities < 1e-5
    assert (found.switches > 50) == graph.has_options
    if kind == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        told = session.get_modelmeta().custom_metadata_map
        assert {key: json.loads(text) for key, text in told.items()} == metadata
        assert session.get_inputs()[0].shape[0] == "N"
    assert str(ROOT).encode() not in path.read_bytes(), "stack traces, with the paths of this machine"


def test_inputs_and_outputs_are_named_as_documented():
    names = {name: (list(m["inputs"]), list(m["outputs"])) for name, m in ((n, made(n)[2]) for n in FAMILIES)}
    looks = ["option_probs", "termination"]
    assert names["gaussian, K = 1"] == names["student"] == (["obs"], ["action"])
    assert names["options"] == (["obs", "option", "first"], ["action", "next_option", *looks])
    assert names["image alone, discrete"][0] == ["image", "option", "first", "uniform"]
    assert names["everything, torch"] == (
        ["obs", "image", "option", "first", "steps", "uniform"], ["action", "next_option", "next_steps", *looks],
    )  # fmt: skip
    page = (ROOT / "docs/export.md").read_text()
    for inputs, outputs in names.values():
        assert all(f"| `{name}` |" in page for name in (*inputs, *outputs))
    assert all(f"`{key}`" in page for key in made("options")[2])


def test_raw_numbers_go_in():
    """Also those that are not finite, which the agent replaces."""
    module, graph, _, _ = made("options")
    inputs = draw_inputs(graph, np.random.default_rng(0))
    inputs["obs"][:, :2, 0], inputs["obs"][:, 2:4, 1] = np.nan, np.inf
    agent = module.agent(num_lanes=check.NUM_LANES)
    agent.load_state_dict({**agent.state_dict(), "option": torch.from_numpy(inputs["option"].astype(np.int32))})
    decision = agent.act(inputs["obs"][0], inputs["first"][0])
    found = graph(**{name: torch.from_numpy(v if name == "option" else v[0]) for name, v in inputs.items()})
    expected = np.array([-2.0, 0.0]) + (decision.action + 1) / 2 * np.array([4.0, 5.0])
    np.testing.assert_allclose(found["action"].numpy(), expected, atol=1e-5)
    np.testing.assert_array_equal(found["next_option"].numpy(), decision.option)


@pytest.fixture
def played_by_the_graph(monkeypatch):
    """In place of the other process: a graph, which a test may have changed, plays here."""

    def replace_player(graph, metadata):
        def play(inputs):
            kept = {k: torch.from_numpy(v) for k, v in inputs.items() if k in check.alone.KEPT}
            outputs = []
            for t in range(check.NUM_STEPS):
                given = {k: torch.from_numpy(v[t]) for k, v in inputs.items() if k not in kept}
                found = graph(**given, **kept)
                kept = {k: found[check.alone.KEPT[k]] for k in kept}
                outputs.append({k: v.numpy() for k, v in found.items()})
            return {k: np.stack([each[k] for each in outputs]) for k in outputs[0]}

        def play_file(path, inputs):
            found = play(inputs)
            return {**found, **{f"alone_{k}": v[:, :1] for k, v in found.items()}}, metadata

        monkeypatch.setattr(check, "play_file", play_file)

    return replace_player


CHANGES = {
    "half_range": lambda graph: graph.half_range.mul_(1.0001),
    "normalizer": lambda graph: graph.policy.normalizer.mean.add_(0.001),
    "min_duration": lambda graph: setattr(graph, "min_duration", 3),
    "max_duration": lambda graph: setattr(graph, "max_duration", 6),
    "interruption": lambda graph: setattr(graph, "interruption", None),
    "greedy": lambda graph: setattr(graph, "greedy", True),
    "greedy_choice": lambda graph: setattr(graph, "greedy_choice", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_check_notices_what_is_wrong(change, played_by_the_graph):
    module, graph, metadata, _ = made("durations, sampling, interruption")
    module.policy.switch_cost.fill_(-0.1)  # so that interruption decides something
    graph = PolicyGraph(module.agent(), BOUNDED)
    wrong = PolicyGraph(module.agent(), BOUNDED)
    played_by_the_graph(graph, metadata)
    assert compare(Path("p.onnx"), graph, module, metadata).difference < 1e-6
    CHANGES[change](wrong)
    played_by_the_graph(wrong, metadata)
    with pytest.raises(ExportError, match="agent's"):
        compare(Path("p.onnx"), graph, module, metadata)


def test_too_many_ties_are_told(played_by_the_graph):
    module, graph, metadata, _ = made("options")
    for policy in (module.policy, module.average):
        torch.nn.init.zeros_(policy.option_policy[-1].weight)
    graph = PolicyGraph(module.agent(), BOUNDED)
    played_by_the_graph(graph, metadata)
    with pytest.raises(ExportError, match="undecided"):
        compare(Path("p.onnx"), graph, module, metadata)


def test_options_run_that_the_policy_would_not_choose():
    module, graph, _, _ = made("options")
    ours = play_agent(module.agent(num_lanes=check.NUM_LANES), graph, draw_inputs(graph, np.random.default_rng(0)))
    assert (ours["next_option"][0] != ours["option_probs"][0].argmax(1)).any()


@pytest.mark.parametrize(
    "output, wanted, said",
    [
        ("policy.h5", None, "must end in .onnx, or in .pt2"),
        ("policy", "onnx", "must end in .onnx"),
        ("policy.onnx", "torch", "a name for --format onnx; use .pt2"),
        ("policy.pt2", "onnx", "a name for --format torch; use .onnx"),
    ],
)
def test_names_that_say_nothing_are_refused(output, wanted, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        format_of(Path(output), wanted)


def test_a_package_that_is_missing_is_told_with_its_cure(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert format_of(Path("policy.pt2")) == "torch"
    with pytest.raises(ConfigError, match=r"onnxruntime: pip install 'claw-lightning\[export\]'"):
        format_of(Path("policy.onnx"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Of a short run of Pendulum, K = 2."""
    folder = tmp_path_factory.mktemp("run")
    trainer, _, _ = fit_lockstep(folder, model={"num_options": 2})
    path = folder / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(path)
    return path


def refused(capsys, *arguments):
    assert command.main([str(each) for each in arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("export: error: ") and len(line) < 400
    return line


def test_what_is_wrong_is_one_line_and_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.ckpt").write_text("no checkpoint")
    Path("short.ckpt").write_bytes(checkpoint.read_bytes()[:2000])
    content = torch.load(checkpoint, weights_only=True)
    name = next(name for name in content["state_dict"] if name.startswith("policy.actor"))
    content["state_dict"][name] = torch.zeros(3)
    torch.save(content, "shape.ckpt")
    Path("there.onnx").write_text("precious")
    out = ("--output", "policy.onnx")
    assert "nowhere.ckpt does not exist" in refused(capsys, "nowhere.ckpt", *out)
    assert "CHECKPOINT: text.ckpt is not a readable checkpoint" in refused(capsys, "text.ckpt", *out)
    assert "truncated" in refused(capsys, "short.ckpt", *out)
    assert refused(capsys, "", *out).endswith("CHECKPOINT is empty; give a file, a run's folder, last or best")
    assert refused(capsys, "last", *out).endswith("no run in runs has written checkpoints; give a file")
    assert "shape.ckpt cannot be loaded" in refused(capsys, "shape.ckpt", *out)
    assert "distilled no student" in refused(capsys, checkpoint, *out, "--student")
    assert "there.onnx exists; --force" in refused(capsys, checkpoint, "--output", "there.onnx")
    assert "no folder nowhere" in refused(capsys, checkpoint, "--output", "nowhere/p.onnx")
    Path("folder.onnx").mkdir()
    assert "is a folder" in refused(capsys, checkpoint, "--output", "folder.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "folder.onnx", "shape.ckpt", "short.ckpt", "text.ckpt", "there.onnx",
    ]  # fmt: skip
    assert Path("there.onnx").read_text() == "precious"


def test_a_file_that_differs_gets_no_name(checkpoint, tmp_path, monkeypatch, capsys):
    def differs(*_):
        raise ExportError("action differs from the agent's by 0.1, more than 1e-05")

    monkeypatch.setattr(command, "compare", differs)
    monkeypatch.setattr(command, "write", lambda graph, metadata, path, kind: path.write_text(""))
    line = refused(capsys, checkpoint, "--output", tmp_path / "policy.onnx")
    assert "was not written: action differs" in line and not list(tmp_path.iterdir())


def test_a_full_disk_is_told_as_such():
    """Of torch's own writer it would be the end of the process."""
    module = make_module(num_options=2, build=True).eval()
    graph = PolicyGraph(module.agent(), module.spec)
    with pytest.raises(OSError, match="No space left on device"):
        write(graph, describe(graph, module, False), Path("/dev/full"), "torch")


def test_sigterm_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def stopped(graph, metadata, path, kind):
        path.write_text("half")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command, "write", stopped)
    before = signal.getsignal(signal.SIGTERM)
    # Where nothing is done about it, this process is not to end here.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught:
            command.main([str(checkpoint), "--output", str(tmp_path / "policy.onnx")])
        assert caught.value.code == 143 and not list(tmp_path.iterdir())
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_the_script_and_the_example(checkpoint, tmp_path):
    """The policy of a run, taken away: the example plays it without this package and without torch."""
    out = tmp_path / "policy.onnx"
    script = [sys.executable, str(ROOT / "scripts/export.py"), str(checkpoint), "--output", str(out)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "Pendulum-v1, K = 2" in done.stdout and re.search(
        r"on 1,\d{3} observations.*: largest difference", done.stdout
    )
    blocked = "import sys; sys.modules.update(dict.fromkeys(('claw_lightning', 'callbacks', 'torch', 'lightning'))); "
    example = str(ROOT / "scripts/examples/run_onnx.py")
    code = (
        f"{blocked}import runpy; sys.argv = ['run_onnx', {str(out)!r}, '--episodes', '2']; runpy.run_path({example!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(re.fullmatch(r"episode \d: return -\d+\.\d", line) for line in lines)
