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
        ({"subtask": "tow"}, r"init_args.subtask: there is no tow; did you mean two\? \(known: one, two\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_refused_with_the_cure(package, arguments, message):
    with pytest.raises(EnvError, match=message):
        settings(package, "Last", **arguments)


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
