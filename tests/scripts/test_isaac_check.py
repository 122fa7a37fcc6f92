"""Arguments of the check with the stand-in's hand are refused before anything runs."""

import pytest

from tests.scripts.loading import load_script

check = load_script("isaac_check")


@pytest.mark.parametrize(
    "arguments, key",
    [
        (["--seeds", "0", "-1"], "--seeds -1"),
        (["--least", "nan"], "--least nan"),
        (["--json", "no/a.json"], "--json no"),
    ],
)
def test_wrong_arguments_are_named_before_anything_runs(monkeypatch, capsys, arguments, key):
    monkeypatch.setattr(check, "python_38", lambda: pytest.fail("something ran"))
    monkeypatch.setattr("sys.argv", ["isaac_check", *arguments])
    with pytest.raises(SystemExit) as end:
        check.main()
    assert end.value.code == 2 and key in capsys.readouterr().err.splitlines()[-1]


def test_a_run_that_fails_is_one_line(monkeypatch, capsys):
    def train(*arguments):
        raise RuntimeError("fit ended with status 1:\nfirst\n second")

    monkeypatch.setattr(check, "train", train)
    monkeypatch.setattr(check, "best_return", lambda: 1.0)
    monkeypatch.setattr("sys.argv", ["isaac_check", "--python", "python"])
    assert check.main() == 1
    assert capsys.readouterr().err == "isaac_check: seed 0: fit ended with status 1: first second\n"
