"""Checks of numbers in settings: one line that names the key, the value and what would do."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from claw_lightning.errors import ConfigError


def check_numbers(group: str, values: Mapping[str, float | None], *, above: float | None = None,
                  least: float | None = None) -> None:  # fmt: skip
    """Refuse what is no number, not finite, not above ``above`` or below ``least``; None passes.

    Raises:
        ConfigError: names the first offending key as ``group.key``.
    """
    for name, value in values.items():
        if value is None:
            continue
        wanted = "finite"
        if above is not None:
            wanted = f"finite and above {above:g}"
        elif least is not None:
            wanted = f"finite and at least {least:g}"
        if not _is_number(value):
            raise ConfigError(f"{group}.{name} is {value!r}; it must be a number, {wanted}")
        if not math.isfinite(value) or (above is not None and value <= above) or (least is not None and value < least):
            raise ConfigError(f"{group}.{name} is {value}; it must be {wanted}")


def check_types(group: str, values: Mapping[str, Any], constructor: Callable[..., Any]) -> None:
    """Refuse values that are not of the types that a constructor's annotations name.

    The command's parser has done so already; this is for values that come from Python, of which a wrong one would be
    taken for another (``True`` for 1) or ignored. A whole number passes for a float, NumPy's numbers for Python's, any
    sequence but a string for any other. Annotations of other kinds (functions, mappings) are not looked into.

    Raises:
        ConfigError: names the first offending key as ``group.key``, the value and what would do.
    """
    hints = _hints(constructor)
    for name, value in values.items():
        hint = hints.get(name, Any)
        if not _fits(value, hint):
            raise ConfigError(f"{group}.{name} is {value!r}; give {_in_words(hint)}")


def check_fields(group: str, settings: Any) -> None:
    """The same for the fields of a dataclass of settings."""
    check_types(group, {each.name: getattr(settings, each.name) for each in fields(settings)}, type(settings).__init__)


@cache
def _hints(constructor: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(constructor)


def _fits(value: Any, hint: Any) -> bool:
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(_fits(value, each) for each in arguments)
    if kind is Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if kind is float:
        return _is_number(value)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind in (tuple, list, Sequence):
        return _is_sequence(value, kind, arguments)
    # A callable's signature cannot be checked, nor those of mappings without knowing their keys.
    return not isinstance(kind, type) or kind.__module__ == "collections.abc" or isinstance(value, kind)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_sequence(value: Any, kind: Any, arguments: tuple[Any, ...]) -> bool:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return False
    if kind is tuple and arguments and arguments[-1] is not ...:
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    return all(_fits(each, arguments[0] if arguments else Any) for each in value)


def _in_words(hint: Any) -> str:
    """``a number or None`` of ``float | None``."""
    kind, arguments = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(map(_in_words, arguments))
    if kind is Literal:
        return ", ".join(map(str, arguments[:-1])) + " or " * (len(arguments) > 1) + str(arguments[-1])
    if kind in (tuple, list, Sequence):
        several = kind is not tuple or arguments[-1:] == (...,)
        return "a list" if several else f"a list of {len(arguments)} numbers"
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a text", type(None): "None"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))
