"""Configuration of an Isaac Gym task as a plain dict, from the YAML files that come with the tasks; no hydra.

The files are read where they lie, in the worker, which needs PyYAML (Isaac Gym itself asks for it). What hydra and
OmegaConf make of them is little, and is made here: the ``defaults`` list, relative references (``${...num_envs}``) and
the four functions that isaacgymenvs registers (``eq``, ``contains``, ``if``, ``resolve_default``).
"""

from __future__ import annotations

import copy
import difflib
import math
import numbers
import os
import re
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from claw_lightning.rollout.envs.base import EnvError

#: Settings that the worker gives; what a user should set instead.
OWNED = {
    "env.numEnvs": "data.envs_per_worker",
    "sim.use_gpu_pipeline": "data.worker_device (and data.env.init_args.pipeline)",
    "sim.physx.use_gpu": "data.worker_device",
    "physics_engine": "nothing: PhysX is the only engine supported",
    "sim.physx.num_threads": "data.env.init_args.num_threads",
    "sim.physx.num_subscenes": "data.env.init_args.num_threads",
    "name": "data.env.init_args.task",
    "env.subtask": "data.env.init_args.subtask",
}
#: Groups of settings that every task has, whether its files mention them or not.
GROUPS = ("env", "sim", "sim.physx")
#: Control steps of an episode below which there is nothing to learn from: the first one is lost at a reset, and the
#: simulator calls the last but one the end.
SHORTEST = 3

_EXPONENT = re.compile(r"[-+]?\d[\d_]*\.?[\d_]*[eE][-+]?\d+$")


def nearest(name: str, known: Sequence[str]) -> str:
    """Ending of a message: the names most like a misspelt one; empty where there are none."""
    lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.5)
    return "; did you mean %s?" % " or ".join(lower[each] for each in found) if found else ""


def read_yaml(path: str) -> Dict[str, Any]:
    """Content of a YAML file.

    Raises:
        EnvError: PyYAML is missing, or the file cannot be read or is no mapping.
    """
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise EnvError(
            "data.worker_python: reading the task's configuration needs PyYAML there; run pip install pyyaml with it"
        ) from error
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.load(file, _loader(yaml))
    except (OSError, yaml.YAMLError) as error:
        raise EnvError("%s: cannot be read (%s)" % (path, " ".join(str(error).split()))) from error
    if not isinstance(content, dict):
        raise EnvError("%s: holds no settings" % path)
    return content


def _loader(yaml: Any) -> Any:
    """PyYAML's safe loader, which knows ``1e-3`` for a number, as OmegaConf's does."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789."))
    return Loader


def merge(base: Dict[str, Any], over: Dict[str, Any]) -> Dict[str, Any]:
    """``base`` with what ``over`` says; mappings are merged, all else is replaced."""
    found = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merge(found[key], value) if both else value
    return found


def compose(folder: str, name: str, groups: Dict[str, str], used: Optional[Set[str]] = None) -> Dict[str, Any]:
    """A file of ``folder`` with all that its ``defaults`` list names, later entries over earlier ones.

    Args:
        name: file without its ending.
        groups: which file of a subfolder is taken, by the subfolder's name, in place of the one that the list names.
        used: takes the names of all subfolders from which a file was taken.

    Raises:
        EnvError: a file is missing or cannot be read.
    """
    own = read_yaml(os.path.join(folder, name + ".yaml"))
    entries = own.pop("defaults", [])
    if "_self_" not in entries:
        entries = [*entries, "_self_"]
    found: Dict[str, Any] = {}
    for entry in entries:
        if entry == "_self_":
            part = own
        elif isinstance(entry, dict):
            part = {}
            for group, choice in entry.items():
                group = group.split()[-1]  # "override env" replaces a choice as "env" makes it
                if used is not None:
                    used.add(group)
                part[group] = _choice(folder, group, groups.get(group, str(choice)))
        else:
            part = compose(folder, str(entry), groups, used)
        found = merge(found, part)
    return found


def _choice(folder: str, group: str, name: str) -> Dict[str, Any]:
    inside = os.path.join(folder, group)
    known = sorted(each[:-5] for each in os.listdir(inside) if each.endswith(".yaml"))
    if name not in known:
        raise EnvError(
            "data.env.init_args.subtask: there is no %s%s (known: %s)" % (name, nearest(name, known), ", ".join(known))
        )
    return read_yaml(os.path.join(inside, name + ".yaml"))


def dotted_keys(config: Dict[str, Any], prefix: str = "") -> Iterator[str]:
    """All keys of nested mappings, as paths."""
    for key, value in config.items():
        yield prefix + str(key)
        if isinstance(value, dict):
            yield from dotted_keys(value, prefix + str(key) + ".")


def override(config: Dict[str, Any], overrides: Dict[str, Any], machine: Dict[str, Any]) -> Dict[str, Any]:
    """The configuration with other values at dotted keys; ``+key`` adds one that the files do not have.

    Args:
        overrides: ``{env.episodeLength: 50}`` and ``{env: {episodeLength: 50}}`` say the same.
        machine: what references lead to, see :func:`task_config`.

    Raises:
        EnvError: a key is unknown (the message names the nearest), is not the user's to set, or has a value of another
            kind than the task's own.
    """
    if not isinstance(overrides, dict):
        raise EnvError(
            "data.env.init_args.overrides: must hold settings such as {env.episodeLength: 600}, not %.60r"
            % (overrides,)
        )
    before, config = config, copy.deepcopy(config)
    known, changed = list(dotted_keys(config)), []
    for key, value, is_added in _assignments(config, overrides):
        where = "data.env.init_args.overrides.%s" % key
        if key in OWNED:
            raise EnvError("%s: set %s instead" % (where, OWNED[key]))
        if key in GROUPS or isinstance(_look_up(config, key), dict):
            raise EnvError("%s: is a group of settings, not %.60r; write %s.<setting>" % (where, value, key))
        if key not in known and not is_added:
            raise EnvError("%s: the task has no such setting%s (+%s adds one)" % (where, nearest(key, known), key))
        _place(config, key, value, where)
        changed.append(key)
    for key in changed:
        _check_kind(key, _resolved(before, machine, key), _resolved(config, machine, key))
    return config


def _assignments(
    config: Dict[str, Any], overrides: Dict[str, Any], prefix: str = "", is_added: bool = False
) -> Iterator[Tuple[str, Any, bool]]:
    """Dotted key, value and whether a ``+`` stands before it, of each setting in nested overrides."""
    for name, value in overrides.items():
        if not isinstance(name, str) or not all(name.lstrip("+").split(".")):
            raise EnvError(
                "data.env.init_args.overrides: %.60r is no key; write dotted names such as env.episodeLength" % (name,)
            )
        key, adds = prefix + name.lstrip("+"), is_added or name.startswith("+")
        is_group = key in GROUPS or isinstance(_look_up(config, key), dict)
        # An empty mapping is a value where there was nothing, and changes nothing in a group.
        if isinstance(value, dict) and (is_group or (value and _look_up(config, key) is None)):
            yield from _assignments(config, value, key + ".", adds)
        else:
            yield key, value, adds


def _look_up(config: Dict[str, Any], key: str) -> Any:
    """What lies at a dotted key; None: nothing."""
    place: Any = config
    for step in key.split("."):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def _place(config: Dict[str, Any], key: str, value: Any, where: str) -> None:
    *path, last = key.split(".")
    place = config
    for step in path:
        if place.get(step) is None:
            place[step] = {}
        place = place[step]
        if not isinstance(place, dict):
            raise EnvError("%s: %s is a value, not a group of settings" % (where, step))
    place[last] = value


def _resolved(config: Dict[str, Any], machine: Dict[str, Any], key: str) -> Any:
    """The value at a dotted key without references; None: nothing, or one that leads nowhere, which is told later."""
    try:
        return Resolver(dict(machine, task=config)).resolve(("task", *key.split(".")))
    except (EnvError, KeyError):
        return None


def is_number(value: Any) -> bool:
    """Whether it can be reckoned with: a number that is neither a switch nor NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value)


def is_whole(value: Any) -> bool:
    """Whether it counts something."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_kind(key: str, before: Any, after: Any) -> None:
    """Refuse a text in a number's place and the like; where the files say nothing (null, empty), all is let pass."""
    kinds = (
        (isinstance(before, bool), isinstance(after, bool), "true or false"),
        (is_number(before), is_number(after), "a number"),
        (isinstance(before, str) and before != "", isinstance(after, str), "a text"),
        (isinstance(before, list), isinstance(after, list), "a list"),
        (isinstance(before, dict), isinstance(after, dict), "a group of settings"),
    )
    for is_of_kind, fits, name in kinds:
        if is_of_kind and not fits:
            raise EnvError(
                "data.env.init_args.overrides.%s: must be %s, such as the task's own %.60r, not %.60r"
                % (key, name, before, after)
            )


def check_clock(config: Dict[str, Any]) -> None:
    """Refuse plain settings that give no episodes to learn from.

    Raises:
        EnvError: one of the numbers that make up a task's clock is none, or too small.
    """
    for key, smallest in (("env.episodeLength", SHORTEST), ("env.controlFrequencyInv", 1)):
        value = _look_up(config, key)
        if value is not None and not (is_whole(value) and value >= smallest):
            raise EnvError(
                "data.env.init_args.overrides.%s: must be a whole number from %d, not %.60r" % (key, smallest, value)
            )
    value = _look_up(config, "env.maxConsecutiveSuccesses")
    if value is not None and not is_whole(value):
        raise EnvError(
            "data.env.init_args.overrides.env.maxConsecutiveSuccesses: must be a whole number (0: none), not %.60r"
            % (value,)
        )
    value = _look_up(config, "sim.dt")
    if value is not None and not (is_number(value) and 0 < value < math.inf):
        raise EnvError("data.env.init_args.overrides.sim.dt: must be a number of seconds above 0, not %.60r" % (value,))


# -- references -------------------------------------------------------------------------------------------------------

_FUNCTIONS = {
    "eq": lambda x, y: str(x).lower() == str(y).lower(),
    "contains": lambda x, y: str(x).lower() in str(y).lower(),
    "if": lambda condition, a, b: a if condition else b,
    "resolve_default": lambda default, given: default if given == "" else given,
}
_CALL = re.compile(r"\s*(\w+)\s*:(.*)", re.S)


class Resolver:
    """Replaces references in a tree of settings.

    ``${a.b}`` is looked up from the root. Leading dots climb: one dot is the mapping or list that holds the setting,
    each further one what is around that. ``${function:x,y}`` calls one of four functions.

    Args:
        root: all settings; the task's lie under ``task``.
    """

    def __init__(self, root: Dict[str, Any]) -> None:
        self.root = root
        self._open: List[Tuple[str, ...]] = []

    def resolve(self, path: Tuple[str, ...] = ()) -> Any:
        """Copy of what lies at a path, without references."""
        return self._value(self._at(path), path)

    def _at(self, path: Sequence[str]) -> Any:
        place: Any = self.root
        for step in path:
            if isinstance(place, list) and step.isdigit() and int(step) < len(place):
                place = place[int(step)]
            elif isinstance(place, dict) and step in place:
                place = place[step]
            else:
                raise KeyError(step)
        return place

    def _value(self, value: Any, path: Tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: self._value(each, (*path, str(key))) for key, each in value.items()}
        if isinstance(value, list):
            return [self._value(each, (*path, str(index))) for index, each in enumerate(value)]
        return self._text(value, path) if isinstance(value, str) and "${" in value else value

    def _text(self, text: str, path: Tuple[str, ...]) -> Any:
        parts: List[Any] = []
        while text:
            begin = text.find("${")
            if begin < 0:
                parts.append(text)
                break
            if begin > 0:
                parts.append(text[:begin])
            end = _closing(text, begin, path)
            parts.append(self._reference(text[begin + 2 : end], path))
            text = text[end + 1 :]
        return parts[0] if len(parts) == 1 else "".join(map(str, parts))

    def _reference(self, inner: str, path: Tuple[str, ...]) -> Any:
        call = _CALL.fullmatch(inner)
        if call is None:
            return self._lookup(inner.strip(), path)
        if call.group(1) not in _FUNCTIONS:
            raise EnvError("task configuration, %s: ${%s:...} is unknown" % (".".join(path), call.group(1)))
        arguments = [self._argument(each, path) for each in _split(call.group(2))]
        try:
            return _FUNCTIONS[call.group(1)](*arguments)  # type: ignore[operator]
        except TypeError as error:
            raise EnvError("task configuration, %s: ${%s} (%s)" % (".".join(path), inner, error)) from error

    def _argument(self, text: str, path: Tuple[str, ...]) -> Any:
        text = text.strip()
        if "${" in text:
            return self._text(text, path)
        return _scalar(text)

    def _lookup(self, name: str, path: Tuple[str, ...]) -> Any:
        dots = len(name) - len(name.lstrip("."))
        base = path[: max(0, len(path) - dots)] if dots else ()
        target = (*base, *name[dots:].split("."))
        if target in self._open:
            raise EnvError("task configuration, %s: refers to itself" % ".".join(path))
        self._open.append(target)
        try:
            return self.resolve(target)
        except KeyError as error:
            raise EnvError("task configuration, %s: ${%s} refers to nothing" % (".".join(path), name)) from error
        finally:
            self._open.pop()


def _closing(text: str, begin: int, path: Tuple[str, ...]) -> int:
    depth = 0
    for at in range(begin, len(text)):
        if text.startswith("${", at):
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
    raise EnvError("task configuration, %s: '%s' is not closed" % (".".join(path), text))


def _split(text: str) -> List[str]:
    """Arguments of a function: at commas that are in no reference and in no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _scalar(text: str) -> Any:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- the whole --------------------------------------------------------------------------------------------------------


def task_config(
    package: str, task: str, overrides: Dict[str, Any], machine: Dict[str, Any], subtask: str = ""
) -> Dict[str, Any]:
    """Settings of a task of IsaacGymEnvs, plain and complete.

    Args:
        package: folder of isaacgymenvs.
        task: name of a file of ``cfg/task``.
        overrides: see :func:`override`.
        machine: what ``cfg/config.yaml`` holds for all tasks: ``num_envs``, ``sim_device``, ``pipeline``, ...
        subtask: file of ``cfg/task/env`` (AllegroKuka); empty: the task's own choice.

    Raises:
        EnvError: see :func:`compose`, :func:`override` and :class:`Resolver`.
    """
    used: Set[str] = set()
    config = compose(os.path.join(package, "cfg", "task"), task, {"env": subtask} if subtask else {}, used)
    if subtask and "env" not in used:
        raise no_subtasks(task)
    return plain(override(config, overrides, machine), machine)


def no_subtasks(task: str) -> EnvError:
    """That a subtask was given to a task without any."""
    return EnvError("data.env.init_args.subtask: %s has no subtasks, those of AllegroKuka have; leave it out" % task)


def plain(config: Dict[str, Any], machine: Dict[str, Any]) -> Dict[str, Any]:
    """References resolved, and all that depends on number and device set to what the worker has."""
    found: Dict[str, Any] = Resolver(dict(machine, task=config)).resolve(("task",))
    is_gpu = str(machine["sim_device"]).startswith("cuda")
    found["physics_engine"] = "physx"
    for key in GROUPS:
        if _look_up(found, key) is None:
            _place(found, key, {}, "task configuration, %s" % key)
        elif not isinstance(_look_up(found, key), dict):
            raise EnvError("task configuration, %s: must be a group of settings" % key)
    sim, physx = found["sim"], found["sim"]["physx"]
    found["env"]["numEnvs"] = machine["num_envs"]
    sim["use_gpu_pipeline"] = is_gpu and machine["pipeline"] == "gpu"
    physx["use_gpu"] = is_gpu
    if not is_gpu:  # a GPU does not look at them; some files ask for more threads than a worker has cores
        physx["num_threads"] = machine["num_threads"]
        physx["num_subscenes"] = machine["num_subscenes"]
    return found
