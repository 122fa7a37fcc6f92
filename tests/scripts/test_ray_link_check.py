"""The check of a node behind a slow link: what it needs, what it judges, what it leaves. The nodes are fakes."""

import contextlib
import json

import pytest

from claw_lightning.errors import ConfigError
from tests.scripts.loading import load_script

FOUND = {
    "faults": 0, "noticed_s": 1.0, "back_s": 9.0, "restarts": 1, "is_clean": True, "link_bytes_per_s": 1e7,
    "rows_per_s": [1.0, 1.0], "link_share": [0.9, 0.8], "store_mb": [1.0, 2.0],
}  # fmt: skip


@pytest.fixture
def check(monkeypatch):
    """The script as a module, in which links and nodes are made and ended in name only."""
    script = load_script("ray_link_check")
    script.ended = []
    monkeypatch.setattr(script.os, "geteuid", lambda: 0)
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(script, "link", lambda mbit: contextlib.nullcontext())
    monkeypatch.setattr(script, "listening", lambda: None)
    monkeypatch.setattr(script, "ray_start", lambda *arguments, before=(): "head" if "--head" in arguments else "far")
    monkeypatch.setattr(script, "end_node", script.ended.append)
    monkeypatch.setattr(script, "RAY_SETTINGS", {})
    return script


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["ray_link_check.py", *arguments])
    return script.main()


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, 0), ({"faults": 1}, 1), ({"is_clean": False}, 1), ({"store_mb": [1.0, 40.0]}, 1),
     ({"link_share": [1.2, 0.9]}, 1)],
)  # fmt: skip
def test_what_was_found_is_judged_and_written(change, status, check, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(check, "check", lambda args: {**FOUND, **change})
    assert run(check, monkeypatch, "--json", str(tmp_path / "x.json")) == status
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads(capsys.readouterr().out) == {**FOUND, **change}
    assert check.ended == ["head", "far"]


def refused(script, monkeypatch, capsys, *arguments):
    with pytest.raises(SystemExit) as leave:
        run(script, monkeypatch, *arguments)
    assert leave.value.code == 2
    return capsys.readouterr().err


def test_a_phase_that_does_not_go_on_is_one_line_and_leaves_no_node(check, monkeypatch, capsys):
    def fail(args):
        raise ConfigError("after 120 s the lost node was not noticed")

    monkeypatch.setattr(check, "check", fail)
    assert refused(check, monkeypatch, capsys) == "ray_link_check: error: after 120 s the lost node was not noticed\n"
    assert check.ended == ["head", "far"]


def test_what_is_missing_is_named(check, monkeypatch, capsys, tmp_path):
    assert "--mbit" in refused(check, monkeypatch, capsys, "--mbit", "0")
    assert "there is no folder" in refused(check, monkeypatch, capsys, "--json", str(tmp_path / "no" / "x.json"))
    monkeypatch.setattr(check.shutil, "which", lambda name: None)
    assert "iproute2" in refused(check, monkeypatch, capsys)
    monkeypatch.setattr(check.os, "geteuid", lambda: 1000)
    assert "root" in refused(check, monkeypatch, capsys)
