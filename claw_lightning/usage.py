"""What the user wrote: configuration files, environment variables, wrong names; and the help that answers."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from claw_lightning.errors import UsageError

COMMANDS = ("fit", "validate", "test", "predict")
#: Environment variables are named CLAW_<COMMAND>__<KEY>, with two underscores where the key has a dot.
PREFIX = "CLAW_"
GROUPS = ("trainer", "model", "data")
EXAMPLES = {"trainer": "TRAINER__MAX_TIME", "model": "MODEL__GAMMA", "data": "DATA__BATCH_SIZE"}
CONFIG_FLAGS = ("--config", "-c")


# -- configuration files ----------------------------------------------------------------------------------------------


def check_config(path: Path) -> None:
    """Refuse a configuration file that cannot mean what it says.

    Raises:
        UsageError: one line with file and line: no YAML, empty, no mapping, a key that is given twice (of which the
            second would silently win), a section without content, a misspelt key beside ``class_path``.
    """
    import yaml

    try:
        nodes = list(yaml.compose_all(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not valid YAML"
        raise UsageError(f"{path}{place}: {problem}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not a text file in UTF-8") from error
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read ({error.strerror or error})") from error
    if len(nodes) > 1:
        raise UsageError(
            f"{path}, line {nodes[1].start_mark.line + 1}: a second document begins here; keep one per file, and give "
            "the files by several --config"
        )
    node = nodes[0] if nodes else None
    if node is None or node.tag == "tag:yaml.org,2002:null":
        raise UsageError(f"{path}: the file is empty; it should hold trainer:, model: or data: with settings below")
    if not isinstance(node, yaml.MappingNode):
        what = "a list" if isinstance(node, yaml.SequenceNode) else "a mere text"
        raise UsageError(f"{path}: this is {what}; a configuration holds trainer:, model: or data: with settings below")
    for key, value in node.value:
        if key.value in GROUPS and value.tag == "tag:yaml.org,2002:null":
            raise UsageError(
                f"{path}, line {key.start_mark.line + 1}: nothing stands below '{key.value}:'; indent what belongs to "
                "it, or leave it out"
            )
        if key.value in ("trainer", "model", "data") and not isinstance(value, yaml.MappingNode):
            raise UsageError(f"{path}, line {key.start_mark.line + 1}: '{key.value}' takes settings below it, by name")
    _check_keys(path, node, set())


def _check_keys(path: Path, node: Any, seen: set[int], above: tuple[int, ...] = ()) -> None:
    """Walk a YAML tree; an anchored part is looked at once."""
    import yaml

    if id(node) in above:
        raise UsageError(f"{path}, line {node.start_mark.line + 1}: this part refers to itself by its anchor")
    if id(node) in seen:
        return
    seen.add(id(node))
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _check_keys(path, each, seen, above)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line, name = key.start_mark.line + 1, key.value if isinstance(key.value, str) else ""
            if name in lines and name != "<<":
                raise UsageError(f"{path}, line {line}: '{name}' is given a second time (first in line {lines[name]})")
            lines[name] = line
            _check_keys(path, value, seen, above)
        if "class_path" in lines:
            for name in lines.keys() - {"class_path", "init_args", "dict_kwargs", "<<"}:
                raise UsageError(
                    f"{path}, line {lines[name]}: '{name}' beside class_path; arguments of the class stand below "
                    "init_args"
                )


def replaced_callbacks(paths: Iterable[Path]) -> list[str]:
    """One line for each file whose ``trainer.callbacks`` takes the place of a list before that has other classes."""
    import yaml

    names: list[str] = []
    lines = []
    for path in paths:
        with contextlib.suppress(Exception):  # what is wrong with a file is told by who reads it
            trainer = (yaml.safe_load(path.read_text()) or {}).get("trainer") or {}
            if trainer.get("callbacks") is not None:
                given = _class_names(trainer["callbacks"])
                lost = [name for name in names if name not in given]
                if lost:
                    lines.append(
                        f"{path}: trainer.callbacks replaces the list of the files before; left out: {', '.join(lost)} "
                        "(callbacks+: adds to it)"
                    )
                names = given
            names += _class_names(trainer.get("callbacks+") or [])
    return lines


def _class_names(listed: Any) -> list[str]:
    each = listed if isinstance(listed, list) else [listed]
    paths = [item.get("class_path", "") if isinstance(item, dict) else str(item) for item in each]
    return [path.rpartition(".")[2] for path in paths]


# -- environment ------------------------------------------------------------------------------------------------------


def environment_settings(command: str | None, environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Settings from the environment, by key: the variable's name and its value.

    ``CLAW_FIT__MODEL__GAMMA=0.9`` gives ``{"model.gamma": ("CLAW_FIT__MODEL__GAMMA", "0.9")}`` for the command fit.

    Raises:
        UsageError: a variable that looks like a setting and names no command.
    """
    found = {}
    for name in sorted(environment):
        if not name.startswith(PREFIX):
            continue
        head, *keys = name.removeprefix(PREFIX).lower().split("__")
        if head in COMMANDS and keys and all(keys):
            if keys in ([each] for each in GROUPS) and not environment[name].lstrip().startswith("{"):
                raise UsageError(
                    f"environment variable {name}: {keys[0]} is a group of settings; name one, such as "
                    f"{PREFIX}{head.upper()}__{EXAMPLES[keys[0]]}"
                )
            if head == command:
                found[".".join(keys)] = (name, environment[name])
            continue
        words = name.removeprefix(PREFIX).lower().split("_")
        if keys or words[0] in (*COMMANDS, *GROUPS):
            raise UsageError(
                f"environment variable {name}: settings are named {PREFIX}<COMMAND>__<KEY>, with two underscores for "
                f"each dot, such as {PREFIX}FIT__MODEL__GAMMA for model.gamma"
            )
    return found


def with_environment(arguments: list[str], settings: Mapping[str, tuple[str, str]]) -> list[str]:
    """Arguments with settings of the environment: they win over files, and what the user typed wins over them."""
    typed = {argument.split("=")[0].lstrip("-").rstrip("+") for argument in arguments if argument.startswith("--")}
    ours = [f"--{key}={value}" for key, (_, value) in settings.items() if key not in typed and key != "config"]
    position = 1 if arguments[:1] and arguments[0] in COMMANDS else 0
    for index, argument in enumerate(arguments):
        if argument in CONFIG_FLAGS:
            position = max(position, index + 2)
        elif argument.partition("=")[0] in CONFIG_FLAGS:
            position = max(position, index + 1)
    merged = [*arguments[:position], *ours, *arguments[position:]]
    if "config" in settings and not typed & {"config"} and not set(CONFIG_FLAGS) & set(arguments):
        merged[1:1] = ["--config", settings["config"][1]]
    return merged


def command_of(arguments: list[str]) -> str | None:
    """The command that arguments name, if they begin with it (options of the command itself may come before)."""
    return arguments[0] if arguments and arguments[0] in COMMANDS else None


# -- errors -----------------------------------------------------------------------------------------------------------


def nearest(name: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """`` (did you mean ...?)`` with the nearest of the known names, or nothing."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


def shipped_classes() -> list[str]:
    """Classes that a configuration may name without a module."""
    import lightning.pytorch.callbacks
    import lightning.pytorch.loggers

    import callbacks
    from claw_lightning.replay import samplers
    from claw_lightning.rollout import envs

    modules = (callbacks, samplers, envs, lightning.pytorch.callbacks, lightning.pytorch.loggers)
    return [name for module in modules for name in module.__all__]


def explain_class(line: str) -> str:
    """A parser's line about a class: what is wrong with it, with the nearest name that would do."""
    line = re.sub(
        r"Expected a dot import path string: (\S+)", r"\1 is neither a shipped class nor a dotted import path", line
    )
    line = re.sub(r"- Expected a path but \S+ either not accessible or invalid - ", "", line)
    line = re.sub(r"Import path does not correspond to a subclass of (\w+)", r"the class that it names is no \1", line)
    line = re.sub(r"Import path (\S+) does not correspond to a subclass of (\w+)", r"\1 is no \2", line)
    made = re.search(r"Type collections\.abc\.Callable\[.*?\] expects a function or a callable class: (.*)", line)
    if made:  # a block that is built later
        given = re.search(r"Got value: Namespace\(class_path='([\w.]+)'", line)
        text = made.group(1).partition(" Got value: ")[0].rstrip(". ")
        text = re.sub(r"Expected '(\S+)' to be a subclass of <class '(\w+)'>", r"\1 is no \2", text)
        if text.startswith("Option ") and given:
            text = f"Problem with given class_path '{given.group(1)}': {text}"
        line = line[: made.start()] + text
    unknown = re.search(r"(\S+) is neither a shipped class nor a dotted import path", line)
    if unknown:
        return line + nearest(unknown.group(1), shipped_classes())
    argument = re.search(r"class_path '([\w.]+)': Option '([\w.]+)' is not accepted", line)
    if argument is None:
        return line
    module, _, name = argument.group(1).rpartition(".")
    try:
        parameters = list(inspect.signature(getattr(__import__(module, fromlist=[name]), name)).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return line
    hint = nearest(argument.group(2), parameters, 0.6)
    return line + (hint or (f" (it takes {', '.join(parameters)})" if parameters else " (it takes none)"))


def explain_interpolation(error: Exception, keys: Iterable[str]) -> str:
    """What OmegaConf could not resolve, on one line."""
    key = re.sub(rf"^({'|'.join(COMMANDS)})\.", "", str(getattr(error, "full_key", "") or ""))
    text = " ".join(str(error).split("\n")[0].split())
    missing = re.search(r"resolved to '([^']+)'", text) or re.search(r"Interpolation key '([^']+)' not found", text)
    if missing:
        name, known = re.sub(rf"^({'|'.join(COMMANDS)})\.", "", missing.group(1)), list(keys)
        text = f"there is no value of '{name}' to take" + nearest(name, known)
        if name in known:
            text = f"'{name}' cannot be taken: interpolations lead in a circle; give one of them a value"
    if type(error).__name__ == "GrammarParseError":
        text = "an interpolation that refers to itself, or that cannot be read; it is written ${model.gamma}"
    variable = re.search(r"Environment variable '([^']+)' not found", text)
    if variable:
        name = variable.group(1)
        text = f"environment variable {name} is not set; set it, or give a default: ${{oc.env:{name},...}}"
    return f"{key}: {text}" if key else text


# -- help -------------------------------------------------------------------------------------------------------------


def take_topic(arguments: list[str]) -> tuple[list[str], str | None]:
    """Arguments with a bare ``--help``, and what stood behind it: ``--help model.gamma`` or ``--help=model``."""
    for index, argument in enumerate(arguments):
        flag, _, topic = argument.partition("=")
        if flag not in ("--help", "-h"):
            continue
        rest = arguments[index + 1 :]
        if not topic and rest and not rest[0].startswith("-"):
            topic, rest = rest[0], rest[1:]
        return [*arguments[:index], "--help", *rest], topic.lstrip("-") or None
    return arguments, None


def _options(parser: Any) -> dict[str, Any]:
    """Options of a command by key, without the help of classes and the forms that append."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        for option in action.option_strings:
            key = option.lstrip("-")
            if option.startswith("--") and not key.endswith((".help", "+")):
                found.setdefault(key, action)
    return found


def _text(action: Any) -> str:
    text = action.help if isinstance(action.help, str) and action.help != "==SUPPRESS==" else ""
    text = re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "")
    return " ".join(text.replace("%%", "%").split())


def _value(action: Any) -> str:
    """The default as it would be typed; nothing for what has none, or a long one."""
    default = action.default
    if default is None or default == "==SUPPRESS==":
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, (list, tuple)):
        return "[" + ",".join(str(each) for each in default) + "]"
    return str(default) if isinstance(default, (int, float, str)) else ""


def _one_line(key: str, action: Any, width: int) -> str:
    value = _value(action)
    left = f"  --{key}" + (f" {value}" if 0 < len(value) <= 16 else "")
    text = textwrap.shorten(_text(action), max(20, width - max(44, len(left) + 2)), placeholder=" ...")
    return f"{left:<43} {text}".rstrip()


def _in_full(key: str, action: Any, width: int) -> list[str]:
    kind = getattr(action, "_typehint", None)
    kind = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
    kind = re.sub(r"\b[a-z_]\w*\.(?:\w+\.)*(\w+)", r"\1", kind or "")
    facts = [f"type: {kind}"] if kind and kind != "None" else []
    facts.append(f"default: {_value(action) or 'null'}")
    body = textwrap.wrap(f"{_text(action)} ({', '.join(facts)})", max(40, width - 8))
    return [f"  --{key}", *(f"        {line}" for line in body)]


def main_help(shipped: Iterable[str]) -> str:
    """What ``lightning --help`` says: what this is, the commands, and how to begin."""
    names = ", ".join(name.removesuffix(".yaml") for name in shipped)
    return (
        "\n".join(
            [
                "usage: lightning {fit,validate,test,predict} --config FILE [--config FILE ...] [--key value ...]",
                "",
                "claw-lightning trains dexterous robot hands: off-policy option-critic, with experience from",
                "background simulator processes.",
                "",
                "  fit         train; --ckpt_path last goes on with a run that was broken off",
                "  validate    play noise-free episodes with the policy of a checkpoint and print their return",
                "  test        as validate, with other seeds, for the figures that are reported",
                "  predict     play the episodes of validate and write every step of them to a file",
                "",
                "  lightning fit --config pendulum                      a sanity check, two minutes on two cores",
                "  lightning fit --config hand_reach_dense              the main job: a Shadow Hand with four options",
                "  lightning validate --config runs/version_0/config.yaml --ckpt_path best",
                "",
                "  lightning fit --help                                 all options, a line each",
                "  lightning fit --help model.gamma                     one of them in full",
                "",
                *textwrap.wrap(f"Shipped configurations: {names}", 100),
            ]
        )
        + "\n"
    )


def command_help(parser: Any, command: str, topic: str | None, shipped: Iterable[str]) -> str:
    """Help of a command: a line for each option, or, with a topic, all about the options whose names begin so.

    Raises:
        UsageError: no option begins so.
    """
    width = min(160, max(80, shutil.get_terminal_size((100, 24)).columns))
    options = _options(parser)
    if topic is not None:
        chosen = {key: each for key, each in options.items() if f"{key}.".startswith(f"{topic}.")}
        if not chosen:
            raise UsageError(f"--help {topic}: there is no option of that name" + nearest(topic, options))
        lines = [line for key, each in chosen.items() for line in _in_full(key, each, width)]
        if any(f"--{key}.help" in parser._option_string_actions for key in chosen):
            key = next(key for key in chosen if f"--{key}.help" in parser._option_string_actions)
            lines += ["", f"Arguments of a class: lightning {command} --{key}.help CLASS"]
        return "\n".join(lines) + "\n"
    lines = [
        f"usage: lightning {command} --config FILE [--config FILE ...] [--key value | --key=value ...]",
        "",
        *textwrap.wrap(
            "Later files win over earlier ones, and what is typed over all files; lists are replaced, and appended to "
            "by '--key+=value' or 'key+:' in a file. Settings of the environment come between: "
            f"{PREFIX}{command.upper()}__MODEL__GAMMA=0.9.",
            width,
        ),
        *textwrap.wrap(f"Shipped: {', '.join(name.removesuffix('.yaml') for name in shipped)}", width),
        "",
        "Each line: option, default, beginning of its description. In full:",
        f"  lightning {command} --help model.gamma        one option, or all that begin so: --help model",
        f"  lightning {command} --trainer.callbacks.help Curriculum    arguments of a class",
    ]
    for group in ("", *GROUPS):
        found = {key: each for key, each in options.items() if (key.partition(".")[0] if "." in key else "") == group}
        lines += ["", f"{group or 'the run'}:"]
        lines += [_one_line(key, each, width) for key, each in found.items() if key not in GROUPS]
    return "\n".join(lines) + "\n"
