"""README.md and docs/*.md: blocks of code run, configurations and command lines are taken, links lead somewhere."""

import ast
import functools
import os
import re
import sys
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from claw_lightning import cli
from claw_lightning.export.files import describe, write
from claw_lightning.export.graph import PolicyGraph
from tests import pages
from tests.runs import FAST, SPEC, make_module

#: Blocks that name a file, and the test that runs them.
RUN_ELSEWHERE = {
    "README.md": "tests/test_plugins.py",
    "docs/plugins.md": "tests/test_plugins.py",
    "docs/new_callback.md": "tests/test_plugins.py",
    "docs/new_simulator.md": "tests/test_plugins.py",
    "docs/python.md": "tests/test_plugins.py",
}
BLOCKS = pages.blocks()
PYTHON = [each for each in BLOCKS if each.language == "python" and each.name is None and each.reason is None]
YAML = [each for each in BLOCKS if each.language == "yaml" and each.name is None and each.reason is None]
COMMANDS = pages.commands()
QUIET = ["--trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as the pages assume it: a run, files of the user's own, the pages' named files."""
    where, before = tmp_path_factory.mktemp("desk"), (os.getcwd(), list(sys.argv), list(sys.path))
    os.chdir(where)
    sys.argv[:] = ["lightning"]
    try:
        pendulum = ["--data.env.init_args.task=Pendulum-v1", "--model.num_options=1"]
        small = ["--data.max_env_steps=200", "--data.eval_episodes=1", "--data.eval_envs=1"]
        assert cli.main([*FAST, *pendulum, *small]) == 0, Path("error.log").read_text()
        Path("mine.yaml").write_text(
            (pages.ROOT / "conf/debug/fast.yaml").read_text().replace("lockstep", "overlapped")
        )
        Path("runs/version_0/events.jsonl").write_text("")
        pages.write_named(where)
        module = make_module(num_options=1, build=True)
        graph = PolicyGraph(module.agent(), SPEC)
        write(graph, describe(graph, module, False), Path("policy.pt2"), "torch")
    finally:
        os.chdir(before[0])
        sys.argv[:], sys.path[:] = before[1], before[2]
    return where


@pytest.fixture
def parse(folder, monkeypatch):
    """Runs a command up to the point where its work begins."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["lightning"])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(cli, "say", lambda line: None)

    def take(arguments):
        begun = []
        with monkeypatch.context() as patch:
            for name in ("fit", "validate", "test", "predict"):
                # Of the same signature, from which the command has its options.
                real = getattr(Trainer, name)
                patch.setattr(Trainer, name, functools.wraps(real)(lambda *_, **__: begun.append(1) or []))
            status = cli.main(arguments)
        return status, begun

    return take


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_runs(block, folder, monkeypatch):
    monkeypatch.chdir(folder)
    exec(compile("\n" * block.line + block.text, block.page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", YAML, ids=str)
def test_settings_are_taken(block, parse, capsys):
    Path("block.yaml").write_text(block.text)
    status, begun = parse([*FAST, *QUIET, "--config", "block.yaml"])
    assert status == 0 and begun, capsys.readouterr().err


@pytest.mark.parametrize("where, arguments", COMMANDS, ids=[where for where, _ in COMMANDS])
def test_command_lines_are_taken(where, arguments, parse, monkeypatch, capsys):
    if any(each.startswith("conf/") for each in arguments):  # given from the repository's folder
        arguments = [str(pages.ROOT / each) if each.startswith("conf/") else each for each in arguments]
    shows = any(each in ("--help", "--print_config") for each in arguments)
    try:
        status, begun = parse([*arguments, *([] if shows else QUIET)])
    except SystemExit as end:
        status, begun = end.code or 0, []
    assert status == 0 and (begun or shows), capsys.readouterr().err


def test_every_block_is_executed_or_says_why_not():
    """By a first line that names its file, for the tests of its page, or a comment above with the reason."""
    for block in BLOCKS:
        if block.name is not None:
            test = (pages.ROOT / RUN_ELSEWHERE[block.page]).read_text()
            assert block.page in test and block.name in test, block
        assert block.reason is None or len(block.reason) > 10, block
    assert len(PYTHON) >= 2 and len(YAML) >= 4 and len(COMMANDS) >= 20
    for path in pages.PAGES:
        marks = re.findall(r"^<!--.*$", path.read_text(), re.M)
        assert all(re.fullmatch(r"<!-- not executed: .+ -->", mark) for mark in marks), path


def test_links_lead_to_files_and_headings():
    for path in pages.PAGES:
        text = re.sub(r"```.*?^```", "", path.read_text(), flags=re.S | re.M)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http:", "https:")):
                continue
            name, _, heading = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            assert file.exists(), f"{path.name}: {target}"
            if heading and file.suffix == ".md":
                titles = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
                slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in slugs, f"{path.name}: {target}"


def test_links_to_lines_of_code_lead_to_what_they_name():
    """The equations' pages: `losses.state_value` at the line where it is defined."""
    wrong, count = [], 0
    for page in pages.PAGES:
        for name, target, line in re.findall(r"\[`([\w.]+)`\]\(([^)#]+\.py)#L(\d+)\)", page.read_text()):
            count += 1
            source = (page.parent / target).resolve()
            module = ast.parse(source.read_text())
            body, parts = module.body, [part for part in name.split(".") if part != source.stem]
            for part in parts:
                node = next(each for each in body if getattr(each, "name", None) == part)
                body = getattr(node, "body", [])
            if node.lineno != int(line):
                wrong.append(f"{page.name}: {name} is at line {node.lineno}, not {line}")
    assert not wrong, "\n".join(wrong)
    assert count > 15


def test_the_index_lists_every_page():
    index = (pages.ROOT / "docs/README.md").read_text()
    listed = re.findall(r"^\d+\. \[[^\]]+\]\((\S+\.md)\): ", index, re.M)
    here = {path.name for path in pages.PAGES if path.parent.name == "docs"} - {"README.md"}
    assert len(listed) == len(set(listed)) and set(listed) == here
