"""Files of a PolicyGraph, in two formats, and what they say of themselves."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from claw_lightning import __version__
from claw_lightning.errors import ConfigError
from claw_lightning.export.graph import PolicyGraph
from claw_lightning.module import OptionCritic

#: Raised whenever inputs, outputs or metadata change their meaning.
FORMAT_VERSION = 1
#: Suffix by format.
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
#: Name of the first axis of all inputs and outputs, N.
BATCH = "N"
#: Name of the metadata inside a ``.pt2`` file.
METADATA_FILE = "metadata.json"
_NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "torch": ()}


def format_of(output: Path, wanted: str | None = None) -> str:
    """``onnx`` or ``torch``: what is wanted, or what the suffix says.

    Raises:
        ConfigError: the suffix is unknown or belongs to the other format, or a package is missing; one line.
    """
    by_suffix = {suffix: name for name, suffix in SUFFIXES.items()}.get(output.suffix)
    if by_suffix is None:
        raise ConfigError(f"--output {output}: the name must end in .onnx, or in .pt2 for torch.export")
    if wanted not in (None, by_suffix):
        raise ConfigError(f"--output {output} is a name for --format {by_suffix}; use {SUFFIXES[str(wanted)]}")
    missing = [name for name in _NEEDED[by_suffix] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--format {by_suffix} needs {', '.join(missing)}: pip install 'claw-lightning[export]'")
    return by_suffix


def describe(graph: PolicyGraph, module: OptionCritic, is_student: bool) -> dict[str, Any]:
    """What a file says of itself, as values that JSON knows; docs/export.md explains each key."""
    spec = module.spec
    assert spec is not None
    example = graph.example()
    with torch.no_grad():
        outputs = graph(**example)
    return {
        "format_version": FORMAT_VERSION,
        "package": "claw-lightning",
        "package_version": __version__,
        "task": spec.task,
        "actor": graph.policy.actor.kind,
        "num_options": graph.num_options if graph.has_options else 1,
        "student": is_student,
        "min_option_duration": graph.min_duration if graph.has_options else 1,
        "max_option_duration": graph.max_duration if graph.has_options else 0,
        "env_steps": module.env_steps,
        "updates": module.updates,
        "action_low": spec.action_low,
        "action_high": spec.action_high,
        "num_actions": spec.num_actions,
        "inputs": {name: _signature(value) for name, value in example.items()},
        "outputs": {name: _signature(value) for name, value in outputs.items()},
    }


def _signature(value: Tensor) -> dict[str, Any]:
    return {"shape": [BATCH, *value.shape[1:]], "dtype": str(value.dtype).removeprefix("torch.")}


def write(graph: PolicyGraph, metadata: dict[str, Any], path: Path, kind: str) -> None:
    """Write a file of the format ``onnx`` or ``torch``; what is there is written over.

    Raises:
        ConfigError: the networks cannot be exported, such as a ``model.network`` that depends on its input's values.
    """
    try:
        with _quiet():
            (_write_onnx if kind == "onnx" else _write_torch)(graph, metadata, path)
    except OSError:
        raise
    except Exception as error:  # the exporters have errors of many kinds, whose first line says what it was
        what = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"the policy cannot be exported as {kind} ({type(error).__name__}: {what})") from error


def _write_onnx(graph: PolicyGraph, metadata: dict[str, Any], path: Path) -> None:
    example = graph.example()
    axes = {name: {0: torch.export.Dim(BATCH, min=1)} for name in example}
    program = torch.onnx.export(
        graph, (), kwargs=example, dynamic_shapes=axes, input_names=list(example),
        output_names=list(metadata["outputs"]), dynamo=True, verbose=False,
    )  # fmt: skip
    assert program is not None
    model = program.model
    for node in model.graph.all_nodes():  # stack traces, with the paths of this machine
        node.metadata_props.clear()
        node.doc_string = None
    for values in (model.graph.inputs, model.graph.outputs, model.graph.initializers.values()):
        for value in values:
            value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.metadata_props.update({name: json.dumps(value) for name, value in metadata.items()})
    model.producer_name, model.producer_version = metadata["package"], metadata["package_version"]
    program.save(str(path), external_data=False)


def _write_torch(graph: PolicyGraph, metadata: dict[str, Any], path: Path) -> None:
    example = graph.example()
    axes = {name: {0: torch.export.Dim(BATCH, min=1)} for name in example}
    program = torch.export.export(graph, (), kwargs=example, dynamic_shapes=axes)
    for node in program.graph.nodes:
        for name in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node"):
            node.meta.pop(name, None)
    # By way of memory: torch.export.save asks for one name, and the file is written aside under another; and on a full
    # disk torch's writer ends the process.
    stream = io.BytesIO()
    torch.export.save(program, stream, extra_files={METADATA_FILE: json.dumps(metadata)})
    path.write_bytes(stream.getbuffer())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say of themselves, such as that torchvision is not there."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
