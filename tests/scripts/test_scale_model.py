"""The model on paper: formulas by hand, and docs/scale.md shows what the script prints."""

import json
import re
import shlex

import pytest

from tests.scripts.loading import ROOT, load_script

PAGE = (ROOT / "docs" / "scale.md").read_text()
COSTS = {"row_bytes": 1000, "policy_bytes": 500_000, "learner_us_per_row": 5.0, "ray_us_per_row": 10.0,
         "host_us_per_row": 20.0, "worker_us_per_row": 30.0}  # fmt: skip


@pytest.fixture(scope="module")
def scale():
    """The script as a module."""
    return load_script("scale_model")


def test_shares_by_hand(scale):
    found = scale.model(100_000, COSTS, 0.01, 1000, 0.5, simulator_us=940, cores=10, link_gbit=8)
    assert found.nodes == 10  # 1000 us per step: 100 cores
    assert found.shares == pytest.approx(
        {"updates": 0.5, "receiving thread": 0.5, "link, rows in": 0.1, "link, parameters out": 0.25}
    )
    assert found.learners == 1


def test_parameters_go_out_every_20_ms_at_most(scale):
    found = scale.model(1_000_000, COSTS, 0.01, 1000, 4, simulator_us=940, cores=100, link_gbit=8)
    assert found.shares["link, parameters out"] == pytest.approx(10 * 50 * 500_000 / 1e9)
    assert found.first == "updates" and found.learners == 40


def test_the_page_shows_what_the_script_prints(scale, monkeypatch, capsys):
    [line] = re.findall(r"^    python scripts/scale_model\.py (.*)$", PAGE, re.M)
    monkeypatch.chdir(ROOT)
    assert scale.main(shlex.split(line)) == 0
    assert capsys.readouterr().out in PAGE


def test_the_page_names_all_costs_and_only_those(scale):
    assert set(re.findall(r"`(\w+_(?:us_per_row|bytes))`", PAGE)) == set(scale.COSTS)
    assert set(json.loads((ROOT / "docs" / "scale.json").read_text())["costs"]) == set(scale.COSTS)


def test_the_check_writes_what_the_model_reads(scale):
    parts = {"learner": 2.0, "worker": 1.0, "host": 1.0, "ray": 1.0}
    turn = {"rows": 10, "parts": parts}
    found = load_script("ray_check").part_costs({"local": [turn], "ray": [turn]}, 1000, 4)
    assert set(found) == set(scale.COSTS)


@pytest.mark.parametrize(
    "content, word",
    [
        ("{", "cannot be read"),
        ('{"costs": 3}', "cannot be read"),
        ("{}", "'costs' is missing"),
        (json.dumps({"costs": dict(COSTS, row_bytes=-1)}), "row_bytes is -1"),
        (json.dumps({"costs": {name: COSTS[name] for name in COSTS if name != "row_bytes"}}), "'row_bytes' is missing"),
    ],
)
def test_a_file_without_costs_is_told_in_one_line(scale, tmp_path, capsys, content, word):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as caught:
        scale.main(["--costs", str(path), "--update-ms", "5"])
    text = capsys.readouterr().err
    assert caught.value.code == 2 and text.count("\n") == 1 and word in text and str(path) in text
