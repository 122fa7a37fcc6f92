"""Checkpoints as the command is given them: which file is meant, whether it is one, and what it says of the model."""

from __future__ import annotations

import contextlib
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from claw_lightning.errors import ConfigError
from claw_lightning.files import expand

if TYPE_CHECKING:
    from claw_lightning.rollout.envs.base import EnvSpec

NAMED = ("last", "best")
OTHERS = ("registry",)  # names that Lightning itself understands
FOLDER = "checkpoints"  # in the folder of a run; checkpoints_1 and so on where runs share one
MARKER = ".done"  # appended to a checkpoint's name
CHANGED = (
    "it was changed after it was written, or is of another version; give a run's last.ckpt or best.ckpt as they are"
)


def find_checkpoint(path: str | None, roots: list[Path]) -> str | None:
    """File that ``ckpt_path`` means.

    ``last`` and ``best`` are those of the newest run in ``roots``, the one whose checkpoints were written last. The
    folder of a run, or of its checkpoints, means its ``last.ckpt``.

    Raises:
        ConfigError: there is none; one line.
    """
    if path == "hpc":
        raise ConfigError(
            "ckpt_path hpc: Lightning's own files are not written here; jobs of SLURM go on by themselves"
        )
    if path == "":
        raise ConfigError("ckpt_path is empty; give a file, a run's folder, last or best, or leave it out")
    if path in NAMED:
        found = [run for root in roots for run in _runs(root)]
        where = " or ".join(str(root) for root in roots)
        if not found:
            raise ConfigError(
                f"ckpt_path {path}: no run in {where} has written checkpoints; give a file, or leave ckpt_path out to "
                "begin a new run"
            )
        folder = max(found, key=_written)
        if not (folder / f"{path}.ckpt").is_file():
            first = "; best.ckpt comes with the first validation" if path == "best" else ""
            raise ConfigError(f"ckpt_path {path}: there is no {path}.ckpt in {folder}{first}; give a file")
        return str(folder / f"{path}.ckpt")
    path = expand(path)
    if path is not None and Path(path).is_dir():
        found = [folder for folder in (*_folders(Path(path)), Path(path)) if (folder / "last.ckpt").is_file()]
        if found:
            return str(max(found, key=_written) / "last.ckpt")
        raise ConfigError(f"ckpt_path: {path} is a folder without {FOLDER}/last.ckpt; give a file, or a run's folder")
    return path


def _runs(root: Path) -> Iterator[Path]:
    """Folders of checkpoints: of this run, or of the runs in this folder."""
    for folder in (root, *_folders(root), *(folder for run in sorted(root.glob("*/")) for folder in _folders(run))):
        if any((folder / f"{name}.ckpt").is_file() for name in NAMED):
            yield folder


def _folders(run: Path) -> list[Path]:
    """Folders of checkpoints in a folder of one run, or of several that share it."""
    found = sorted(run.glob(f"{FOLDER}*"))
    return [path for path in found if path.name == FOLDER or path.name.removeprefix(f"{FOLDER}_").isdecimal()]


def _written(folder: Path) -> float:
    times = [0.0]
    for name in NAMED:
        with contextlib.suppress(OSError):
            times.append((folder / f"{name}.ckpt").stat().st_mtime)
    return max(times)


def run_folders(trainer: Mapping[str, Any]) -> list[Path]:
    """Where runs with these settings of the trainer leave their folders, or one of them its checkpoints."""
    callbacks = trainer.get("callbacks") or []
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]:
        if str(callback.get("class_path", "")).rpartition(".")[2] == "RunCheckpoint":
            dirpath = (callback.get("init_args") or {}).get("dirpath")
            if dirpath:
                return [Path(dirpath).expanduser()]
    loggers = trainer.get("logger")
    first = (loggers[0] if loggers else None) if isinstance(loggers, (list, tuple)) else loggers
    root = Path(trainer.get("default_root_dir") or ".").expanduser()
    if first is None or not hasattr(first, "get"):  # none, or Lightning's own
        return [root / "lightning_logs"] if first is True else [root]
    arguments = first.get("init_args") or {}
    root = Path(arguments.get("save_dir") or root).expanduser()
    return [root / arguments["name"]] if isinstance(arguments.get("name"), str) else [root]


def own_folder(files: Sequence[Any]) -> Path | None:
    """Folder of the run whose configuration is among the files given; of several, the last one's. None: no run's."""
    for file in reversed(files):
        folder = Path(str(file)).parent
        if any((inside / f"{name}.ckpt").is_file() for inside in _folders(folder) for name in NAMED):
            return folder
    return None


def read_checkpoint(path: str, training: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, without the numbers of its tensors.

    Where training goes on from it, optimisers must be in it. A file that cannot be read, or of which a part is missing,
    is refused before anything is started. One without a marker (a single file that was copied) is accepted if it can be
    read.

    Raises:
        ConfigError: one line with the file.
    """
    import torch

    file, marker = Path(path), Path(f"{path}{MARKER}")
    if not file.is_file():
        raise ConfigError(f"ckpt_path: {path} " + ("is not a plain file" if file.exists() else "does not exist"))
    size, expected = file.stat().st_size, None
    # A marker that says nothing vouches for nothing.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        expected = int(json.loads(marker.read_text())["bytes"])
    if expected is not None and size != expected:
        raise ConfigError(
            f"ckpt_path: {path} has {size:,} bytes, but {expected:,} according to {marker.name} beside it: a truncated "
            "or mixed copy; copy both files again"
        )
    try:
        content = torch.load(path, map_location="meta", weights_only=True)
    except Exception as error:  # whatever a broken archive raises
        raise ConfigError(f"ckpt_path: {path} is not a readable checkpoint ({_what(file, error)})") from error
    if damage := _damage(file):  # of which torch takes no notice: it would be other weights
        raise ConfigError(f"ckpt_path: {path} is not a readable checkpoint ({damage})")
    if not (isinstance(content, dict) and isinstance(content.get("claw"), dict) and "state_dict" in content):
        raise ConfigError(
            f"ckpt_path: {path} was not written by claw-lightning; give a run's last.ckpt or best.ckpt"
            + (" (it holds weights alone)" if _is_weights(content) else "")
        )
    missing = [name for name in ("spec", "updates", "env_steps", "policy") if name not in content["claw"]]
    missing += [name for name in ("state_dict", "hyper_parameters") if not isinstance(content.get(name), dict)]
    missing += ["optimizer_states"] if training and not content.get("optimizer_states") else []
    if missing:
        raise ConfigError(f"ckpt_path: {path} lacks {missing[0]}: {CHANGED}")
    stored_spec(content["claw"], path)
    for name in ("updates", "env_steps"):
        value = content["claw"][name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"ckpt_path: {path} has {name} {str(value)[:40]!r}, which is no count: {CHANGED}")
    for name in ("policy", "groups"):
        if not isinstance(content["claw"].get(name, {}), dict):
            raise ConfigError(f"ckpt_path: {path}: {name} is no mapping: {CHANGED}")
    return content


def stored_spec(claw: Mapping[str, Any], path: str = "the checkpoint") -> EnvSpec:
    """The task of which a checkpoint's ``claw`` part tells.

    Raises:
        ConfigError: the description is empty or damaged; one line.
    """
    from claw_lightning.rollout.envs.base import EnvError, EnvSpec

    try:
        return EnvSpec.from_json(claw.get("spec"))  # type: ignore[arg-type]  # that is what is checked
    except EnvError as error:
        raise ConfigError(f"ckpt_path: {path} has a damaged spec ({error}): {CHANGED}") from error


def _is_weights(content: Any) -> bool:
    import torch

    return isinstance(content, dict) and any(isinstance(value, torch.Tensor) for value in content.values())


def _damage(file: Path) -> str | None:
    """What is wrong with an archive by its own checksums; None: nothing, or it is no archive."""
    if not zipfile.is_zipfile(file):
        return None
    try:
        with zipfile.ZipFile(file) as archive:
            part = archive.testzip()
    except Exception:  # damage raises what it happens to hit: BadZipFile, UnicodeDecodeError, zlib.error
        return "it is damaged: its table of contents cannot be read; copy it again, or take another one"
    return f"it is damaged: the checksum of {part} is wrong; copy it again, or take another one" if part else None


def _what(file: Path, error: Exception) -> str:
    """Why a file cannot be read, in words that help."""
    if file.stat().st_size == 0:
        return "it is empty"
    if damage := _damage(file):
        return damage
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        if not any(name.endswith("data.pkl") for name in names):
            return f"an archive of something else, with {', '.join(sorted(names)[:3])}"
        return "it holds objects that are not loaded from files, or is of another program"
    try:
        with file.open("rb") as start:
            return "it is truncated" if start.read(4) == b"PK\x03\x04" else "a file of another kind"
    except OSError as unreadable:
        return unreadable.strerror or str(error)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def untyped(stored: dict[str, Any], present: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the model that a checkpoint holds and nobody has given: these go on to hold.

    Args:
        stored: the checkpoint's content.
        present: settings of the model as parsed, defaults included.
        typed: those of them that were given on the command line, in files or in the environment.
    """
    found = {k: v for k, v in stored.get("hyper_parameters", {}).items() if k in present and k != "_instantiator"}
    found.update({k: v for k, v in stored["claw"].get("groups", {}).items() if k in present})
    given = flat(typed)
    kept: dict[str, Any] = {}
    for name, value in found.items():
        mine = {key for key in given if key == name or key.startswith(f"{name}.")}
        if name in mine:
            continue
        if mine:  # a group of which some settings were given
            value = {**(value or {}), **{key[len(name) + 1 :]: given[key] for key in mine}}
        kept[name] = value
    return kept
