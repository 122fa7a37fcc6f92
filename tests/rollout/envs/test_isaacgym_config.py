"""Configurations of Isaac Gym tasks without hydra: held against OmegaConf, and hand-made for what goes wrong."""

import sys
import warnings

import pytest
import yaml
from omegaconf import OmegaConf

from claw_lightning.rollout.envs import isaacgym_config as configs
from claw_lightning.rollout.envs.base import EnvError
from claw_lightning.rollout.envs.isaacgym import find_task, machine_settings
from tests.builders import FAKES

PACKAGE = FAKES / "isaac" / "isaacgymenvs"
TASKS = sorted(path.stem for path in (PACKAGE / "cfg" / "task").glob("*.yaml"))
CPU, GPU = machine_settings(8, False, None, 1), machine_settings(8, True, None, 1)


def by_omegaconf(config, machine):
    """What the four functions of isaacgymenvs and OmegaConf make of it."""
    functions = {
        "eq": lambda x, y: x.lower() == y.lower(),
        "contains": lambda x, y: x.lower() in y.lower(),
        "if": lambda condition, a, b: a if condition else b,
        "resolve_default": lambda default, given: default if given == "" else given,
    }
    for name, function in functions.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old name, which the packages of that time use
            OmegaConf.register_new_resolver(name, function, replace=True)
    try:
        return OmegaConf.to_container(OmegaConf.create(dict(machine, task=config)), resolve=True)["task"]
    finally:
        for name in functions:
            OmegaConf.clear_resolver(name)


@pytest.mark.parametrize("machine", [CPU, GPU, machine_settings(8, True, "cpu", 2)])
@pytest.mark.parametrize("task", TASKS)
def test_references_are_what_omegaconf_makes_of_them(task, machine):
    config = configs.compose(str(PACKAGE / "cfg" / "task"), task, {})
    assert configs.Resolver(dict(machine, task=config)).resolve(("task",)) == by_omegaconf(config, machine)


FORMS = {
    "near": "${.value}",
    "up": "${..top}",
    "far": "${...num_envs}",
    "root": "${task.top}",
    "quoted": '${eq:"a, b",${.text}}',
    "nested": "${if:${eq:${...pipeline},gpu},10,${resolve_default:7,${.empty}}}",
    "joined": "n ${...num_envs} of ${.text}",
    "chain": "${.near}",
    "group": "${..other}",
    "list": ["${..value}", 2, {"x": "${...value}"}, "${.1}"],
    "number": "${resolve_default:0.5,${.empty}}",
}


@pytest.mark.parametrize("machine", [CPU, GPU])
def test_all_forms_of_references(machine):
    env = {"value": 3, "text": "a, b", "empty": "", **FORMS}
    config = {"top": "t", "env": env, "other": {"x": "${..top}"}}
    found = configs.Resolver(dict(machine, task=config)).resolve(("task",))
    assert found == by_omegaconf(config, machine)
    assert found["env"]["nested"] == (10 if machine is GPU else 7) and found["env"]["quoted"] is True


@pytest.mark.parametrize(
    "value, message",
    [
        ("${.missing}", r"env.a: \$\{.missing\} refers to nothing"),
        ("${.a}", "env.a: refers to itself"),
        ("${oc.env:HOME}", "refers to nothing"),
        ("${sum:1,2}", r"\$\{sum:...\} is unknown"),
        ("${eq:1}", "env.a"),
        ("${.b", "is not closed"),
    ],
)
def test_a_reference_that_leads_nowhere_is_named(value, message):
    with pytest.raises(EnvError, match=message):
        configs.Resolver({"task": {"env": {"a": value}}}).resolve(("task",))


# -- composition --------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path):
    """A package whose tasks build on one another as those of AllegroKuka do."""
    files = {
        "cfg/task/Base.yaml": {"defaults": ["_self_", {"env": "one"}], "name": "Hand", "env": {"length": 1, "a": 1}},
        "cfg/task/Middle.yaml": {"defaults": ["Base", "_self_"], "env": {"a": 2, "b": "${...num_envs}"}},
        "cfg/task/Last.yaml": {"defaults": ["Middle"], "env": {"c": 3}},
        "cfg/task/env/one.yaml": {"subtask": "one", "length": 10},
        "cfg/task/env/two.yaml": {"subtask": "two", "length": 20},
    }
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    (tmp_path / "tasks").mkdir()
    return str(tmp_path)


def settings(package, task, overrides=None, subtask=""):
    return find_task(task, package, None).config(overrides or {}, CPU, subtask)


def test_later_files_prevail(package):
    env = settings(package, "Last")["env"]
    assert env == {"length": 10, "a": 2, "b": 8, "c": 3, "subtask": "one", "numEnvs": 8}


def test_a_subtask_brings_its_settings(package):
    assert settings(package, "Last", subtask="two")["env"]["length"] == 20


def test_overrides_prevail_over_all(package):
    env = settings(package, "Last", {"env.length": 5, "+env.extra.deep": "x"})["env"]
    assert env["length"] == 5 and env["extra"] == {"deep": "x"}


def test_number_and_devices_are_the_workers(package):
    sim = find_task("Last", package, None).config({}, GPU, "")["sim"]
    assert sim == {"use_gpu_pipeline": True, "physx": {"use_gpu": True}}
    sim = settings(package, "Last")["sim"]
    assert sim["use_gpu_pipeline"] is sim["physx"]["use_gpu"] is False and sim["physx"]["num_threads"] == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"overrides": {"env.lenght": 1}}, "overrides.env.lenght: the task has no such setting; did you mean env.le"),
        ({"overrides": {"env.numEnvs": 1}}, "overrides.env.numEnvs: set data.envs_per_worker instead"),
        ({"overrides": {"sim.physx.use_gpu": True}}, "set data.worker_device instead"),
        ({"overrides": {"+name.x": 1}}, "name is a value, not a group"),
        ({"overrides": {"env": {"numEnvs": 5}}}, "overrides.env.numEnvs: set data.envs_per_worker instead"),
        ({"overrides": {"+sim": {"physx": {"use_gpu": 1}}}}, "overrides.sim.physx.use_gpu: set data.worker_device"),
        ({"overrides": {"+sim.physx.num_threads": 4}}, "set data.env.init_args.num_threads instead"),
        ({"overrides": {"env.subtask": "two"}}, "set data.env.init_args.subtask instead"),
        ({"overrides": {"env": {"lenght": 1}}}, "overrides.env.lenght: the task has no such setting; did you mean"),
        ({"overrides": {"env": 3}}, "overrides.env: is a group of settings, not 3; write env.<setting>"),
        ({"overrides": {"+sim.physx": None}}, "overrides.sim.physx: is a group of settings, not None"),
        ({"overrides": {"env.length": "abc"}}, "overrides.env.length: must be a number, .* 10, not 'abc'"),
        ({"overrides": {"env.length": None}}, "overrides.env.length: must be a number"),
        ({"overrides": {"env.length": True}}, "overrides.env.length: must be a number"),
        ({"overrides": {"env.length": float("nan")}}, "overrides.env.length: must be a number"),
        ({"overrides": {"env.length": {"x": 1}}}, "overrides.env.length: must be a number"),
        ({"overrides": {"env.b": "x"}}, "overrides.env.b: must be a number, .* 8, not 'x'"),
        ({"overrides": {5: 1}}, "overrides: 5 is no key"),
        ({"overrides": {"env": {5: 1}}}, "overrides: 5 is no key"),
        ({"overrides": {"+env..a": 1}}, "is no key"),
        ({"overrides": "env.length=1"}, "init_args.overrides: must hold settings"),
        ({"overrides": {"+sim.dt": 0}}, "overrides.sim.dt: must be a number of seconds above 0, not 0"),
        ({"overrides": {"+sim.dt": "x"}}, "overrides.sim.dt: must be a number of seconds"),
        ({"overrides": {"+env.controlFrequencyInv": 0}}, "overrides.env.controlFrequencyInv: must be a whole number"),
        ({"overrides": {"+env.episodeLength": 2}}, "overrides.env.episodeLength: must be a whole number from 3, not 2"),
        ({"overrides": {"+env.episodeLength": 9.5}}, "overrides.env.episodeLength: must be a whole number from 3"),
        ({"overrides": {"+env.maxConsecutiveSuccesses": "x"}}, "env.maxConsecutiveSuccesses: must be a whole number"),
        ({"subtask": "tow"}, r"init_args.subtask: there is no tow; did you mean two\? \(known: one, two\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_refused_with_the_cure(package, arguments, message):
    with pytest.raises(EnvError, match=message):
        settings(package, "Last", **arguments)


def test_overrides_may_be_nested(package):
    """Only what they name changes: they are no sections that take the place of the task's."""
    flat = settings(package, "Last", {"env.length": 5, "+env.extra.deep": "x", "+sim.physx.c": 2})
    for nested in (
        {"env": {"length": 5, "+extra": {"deep": "x"}}, "+sim": {"physx": {"c": 2}}},
        {"env": {"length": 5, "+extra.deep": "x"}, "sim": {"physx": {"+c": 2}}},
        {"+env": {"extra": {"deep": "x"}, "length": 5}, "sim.physx": {"+c": 2}},
    ):
        assert settings(package, "Last", nested) == flat
    assert flat["env"]["a"] == 2 and flat["sim"]["physx"]["c"] == 2
    assert settings(package, "Last", {"env": {}}) == settings(package, "Last")


@pytest.mark.parametrize("task, key, value", [
    ("ShadowHand", "task.randomize", "yes"), ("ShadowHand", "env.objectType", 3),
    ("ShadowHand", "task.randomization_params.observations.range", 0.1), ("ShadowHand", "sim.dt", [1]),
])  # fmt: skip
def test_values_are_of_the_tasks_own_kind(task, key, value):
    with pytest.raises(EnvError, match=rf"overrides.{key}: must be .* task's own"):
        settings(str(PACKAGE), task, {key: value})


def test_a_reference_is_a_value_of_what_it_leads_to(package):
    assert settings(package, "Last", {"env.length": "${.a}"})["env"]["length"] == 2


def test_an_empty_section_of_a_file_is_filled_and_a_wrong_one_named(package):
    write(package, "Alone", "name: Hand\nenv:\nsim: {physx: }\n")
    assert settings(package, "Alone")["env"] == {"numEnvs": 8}
    write(package, "Alone", "name: Hand\nenv: {}\nsim: 3\n")
    with pytest.raises(EnvError, match="task configuration, sim: must be a group of settings"):
        settings(package, "Alone")


@pytest.mark.parametrize("task", ["ShadowHand", "Encoded"])
def test_a_subtask_is_refused_where_there_are_none(task):
    with pytest.raises(EnvError, match=f"init_args.subtask: {task} has no subtasks, .*; leave it out"):
        settings(str(PACKAGE), task, subtask="regrasping")


def test_a_subtask_is_refused_by_bidexhands():
    with pytest.raises(EnvError, match="init_args.subtask: ShadowHandOver has no subtasks"):
        find_task("ShadowHandOver", None, str(FAKES / "isaac" / "bidexhands")).config({}, CPU, "throw")


def test_folders_may_begin_with_a_tilde(package, monkeypatch):
    monkeypatch.setenv("HOME", package)
    assert find_task("Last", "~", None).folder == package
    assert find_task("ShadowHandOver", None, str(FAKES / "isaac" / "bidexhands")).package == "bidexhands"


def write(package, task, text):
    with open(f"{package}/cfg/task/{task}.yaml", "w") as file:
        file.write(text)


def test_numbers_are_numbers_however_they_are_written(package):
    text = "env: {a: 1e-3, b: 1.0e-3, c: 5E4, d: -1e+2, e: .5e1, f: 1e, g: 0.5, h: 12, i: 1.2.3}\n"
    write(package, "Last", text)
    found = configs.read_yaml(package + "/cfg/task/Last.yaml")
    assert found == OmegaConf.to_container(OmegaConf.create(text))
    assert found["env"]["a"] == 0.001 and found["env"]["f"] == "1e"


def test_a_broken_file_is_named(package):
    write(package, "Base", "a: [1\n")
    with pytest.raises(EnvError, match=r"Base.yaml: cannot be read"):
        settings(package, "Last")


def test_a_missing_yaml_library_is_named(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(EnvError, match="needs PyYAML there; run pip install pyyaml"):
        settings(package, "Last")
