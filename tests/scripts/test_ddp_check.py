"""What the check of several ranks makes of their files; the runs themselves are in tests/test_ranks.py."""

import pytest

from tests.scripts.loading import load_script


def ranks(**second):
    first = {"networks": {"a": 1, "b": 2}, "updates": 500, "env_steps": 20, "own_steps": 10, "experience": 1.0,
             "samples_per_insert": 8.0}  # fmt: skip
    return [first, {**first, "experience": 2.0, **second}]


@pytest.mark.parametrize(
    "second, broken",
    [
        ({}, None),
        ({"networks": {"a": 1, "b": 3}}, 0),
        ({"updates": 499}, 1),
        ({"own_steps": 9}, 2),
        ({"experience": 1.0}, 3),
        ({"samples_per_insert": 7.0}, 4),
    ],
)
def test_each_line_fails_for_its_own_reason(second, broken):
    found = load_script("ddp_check").judge(ranks(**second), 500)
    assert [index for index, (_, holds) in enumerate(found) if not holds] == ([] if broken is None else [broken])


def test_too_few_updates_are_told():
    assert not load_script("ddp_check").judge(ranks(), 501)[1][1]
