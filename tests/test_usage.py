"""What the user wrote: files, environment, names."""

import pytest

from claw_lightning.errors import UsageError
from claw_lightning.usage import (
    check_config,
    environment_settings,
    replaced_callbacks,
    take_topic,
    with_environment,
)


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "the file is empty"),
        ("# nothing yet\n", "the file is empty"),
        ("- a\n- b\n", "this is a list"),
        ("hello\n", "this is a mere text"),
        ("model:\n  gamma: 0.9\n  gamma: 0.8\n", "line 3: 'gamma' is given a second time (first in line 2)"),
        ("model: {gamma: 1}\ndata: {}\nmodel: {}\n", "line 3: 'model' is given a second time"),
        ("a:\n- class_path: x\n  init_args: {b: 1, b: 2}\n", "line 3: 'b' is given a second time"),
        ("trainer:\nmodel:\n  gamma: 0.9\n", "line 1: nothing stands below 'trainer:'"),
        ("data: {}\nmodel: 5\n", "line 2: 'model' takes settings below it, by name"),
        ("model: &all {gamma: *all}\n", "line 1: this part refers to itself"),
        ("trainer:\n  callbacks:\n  - class_path: A\n    init_arg: {b: 1}\n", "line 4: 'init_arg' beside class_path"),
        ("model:\n\tgamma: 0.9\n", "line 2: found character '\\t'"),
        ("---\n...\n", "the file is empty"),
        ("model: {gamma: 0.9}\n---\ndata: {}\n", "line 3: a second document begins here"),
        ("model:\n  gamma: \0 0.5\n", "special characters are not allowed"),
    ],
)
def test_files_that_cannot_mean_what_they_say(tmp_path, text, said):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        check_config(tmp_path / "own.yaml")
    assert said in str(error.value) and str(tmp_path / "own.yaml") in str(error.value)


def test_binary_files_and_files_that_cannot_be_read(tmp_path):
    (tmp_path / "own.yaml").write_bytes(bytes(range(256)))
    with pytest.raises(UsageError, match="own.yaml: not a text file"):
        check_config(tmp_path / "own.yaml")
    with pytest.raises(UsageError, match=r"--config .*none.yaml cannot be read"):
        check_config(tmp_path / "none.yaml")


def test_a_list_that_replaces_another_is_told_with_what_it_leaves_out(tmp_path):
    texts = [
        "trainer: {callbacks: [{class_path: a.A, init_args: {tau: 1}}, B]}", "trainer: {callbacks+: [C]}",
        "model: {}", "trainer:\n  callbacks: [B, D]", "trainer: {callbacks: A", "trainer: {callbacks: D}",
    ]  # fmt: skip
    paths = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    first, second = replaced_callbacks(paths)
    assert first.startswith(f"{paths[3]}: ") and "left out: A, C (" in first
    assert second.startswith(f"{paths[5]}: ") and "left out: B (" in second
    assert replaced_callbacks(paths[:3]) == []


def test_files_that_mean_something(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "model: &m\n  gamma: 0.9\n  trace: null\ntrainer:\n  callbacks: [A]\n  callbacks+: [B]\ndata:\n  <<: *m\n"
    )
    check_config(tmp_path / "own.yaml")


def test_variables_of_the_command_that_runs():
    found = environment_settings(
        "fit",
        {"CLAW_FIT__MODEL__GAMMA": "0.9", "CLAW_TEST__MODEL__GAMMA": "1", "CLAW_ERROR_LOG": "x", "PATH": "/bin"},
    )
    assert found == {"model.gamma": ("CLAW_FIT__MODEL__GAMMA", "0.9")}


@pytest.mark.parametrize("group", ["MODEL", "DATA", "TRAINER"])
def test_a_group_is_no_setting(group):
    with pytest.raises(UsageError, match=f"CLAW_FIT__{group}: .* is a group of settings; name one, such as CLAW_FIT__"):
        environment_settings("fit", {f"CLAW_FIT__{group}": "5"})
    whole = {f"CLAW_FIT__{group}": "{a: 5}"}
    assert list(environment_settings("fit", whole)) == [group.lower()]


@pytest.mark.parametrize("name", ["CLAW_MODEL__GAMMA", "CLAW_FIT_MODEL_GAMMA", "CLAW_FTI__MODEL__GAMMA", "CLAW_FIT__"])
def test_variables_that_look_like_settings_and_are_none(name):
    with pytest.raises(UsageError, match=name):
        environment_settings("fit", {name: "0.9"})


def test_settings_of_the_environment_come_after_files_and_before_what_is_typed():
    settings = {"model.gamma": ("A", "0.9"), "data.seed": ("B", "3")}
    typed = ["fit", "--config", "a", "-c=b", "--model.gamma", "0.8", "--trainer.max_steps=1"]
    assert with_environment(typed, settings) == [
        "fit", "--config", "a", "-c=b", "--data.seed=3", "--model.gamma", "0.8", "--trainer.max_steps=1",
    ]  # fmt: skip
    once = with_environment(["fit"], {**settings, "config": ("C", "f.yaml")})
    assert once == ["fit", "--config", "f.yaml", "--model.gamma=0.9", "--data.seed=3"]
    assert with_environment(once, {**settings, "config": ("C", "f.yaml")}) == once  # as a further rank sees it


@pytest.mark.parametrize(
    "typed, rest, topic",
    [
        (["fit", "--help"], ["fit", "--help"], None),
        (["fit", "--help", "model"], ["fit", "--help"], "model"),
        (["fit", "-h", "--model.gamma"], ["fit", "--help", "--model.gamma"], None),
        (["fit", "--help=data.env"], ["fit", "--help"], "data.env"),
        (["fit", "--config", "a"], ["fit", "--config", "a"], None),
    ],
)
def test_topics_of_the_help(typed, rest, topic):
    assert take_topic(typed) == (rest, topic)
