"""Replays of several ranks beside one checkpoint: one folder each, and a file that says how many there are.

``replay/rank_<r>`` is a stored replay of its own (:mod:`claw_lightning.replay.storage`); ``replay/RANKS`` is written
when all of them have been completed once. A run on one rank stores into ``replay`` itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from claw_lightning.errors import ConfigError
from claw_lightning.files import sync
from claw_lightning.replay.storage import DONE, StoredReplay, deal_replays, discard_replay, load_replay
from claw_lightning.rollout.ring import LaneRing

log = logging.getLogger(__name__)

RANKS = "RANKS"


def shard_folder(folder: Path, rank: int, size: int) -> Path:
    """Where a rank stores its part."""
    return folder if size == 1 else folder / f"rank_{rank}"


def clear_others(folder: Path, size: int, run: str) -> None:
    """Remove what runs on another number of ranks, or other runs on several, have left in a folder.

    Raises:
        ConfigError, OSError: as :func:`discard_replay`.
    """
    mark = _read_mark(folder)
    if mark is not None and (size == 1 or mark != (size, run)):
        (folder / RANKS).unlink()
    if size > 1 and (folder / DONE).is_file():
        discard_replay(folder)
    for path in sorted(folder.glob("rank_*")):
        number = path.name.removeprefix("rank_")
        if number.isdecimal() and (size == 1 or int(number) >= size):
            discard_replay(path)
            if not any(path.iterdir()):
                path.rmdir()


def mark_complete(folder: Path, size: int, run: str) -> None:
    """Vouch for the replays of all ranks."""
    if size == 1 or _read_mark(folder) == (size, run):
        return
    aside = folder / f".{RANKS}.new"
    aside.write_text(json.dumps({"ranks": size, "run": run}))
    sync(aside)
    aside.replace(folder / RANKS)
    sync(folder)


def _read_mark(folder: Path) -> tuple[int, str] | None:
    try:
        content = json.loads((folder / RANKS).read_text())
        return int(content["ranks"]), str(content["run"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""


def find_shards(folder: Path) -> list[StoredReplay]:
    """The stored replays of all ranks, in their order; none where none is complete.

    Raises:
        ConfigError: one of them is damaged, or of another run or moment than the others.
    """
    if (folder / DONE).is_file():
        return [load_replay(folder)]
    mark = _read_mark(folder)
    if mark is None:
        return []
    paths = [folder / f"rank_{rank}" for rank in range(mark[0])]
    if not paths:
        raise ConfigError(f"{folder / RANKS} cannot be read; remove {folder}, and the memory is filled anew")
    found = [load_replay(path) for path in paths if (path / DONE).is_file()]
    if len(found) < mark[0]:
        log.warning("%s holds the replays of %d of %d ranks; the others are lost", folder, len(found), mark[0])
    if any(replay.run != mark[1] for replay in found):
        raise ConfigError(f"{folder} holds replays of several runs; remove it, or take another")
    newest = max((replay.moment for replay in found), default=-1)
    # Ranks that end by an error of one may be a training step apart; one that was killed has not saved at the end.
    older = [replay.folder for replay in found if replay.moment < newest - 1]
    if older:
        raise ConfigError(
            f"{older[0]} was saved at another moment than the replays beside it (a rank was lost); remove it to go on "
            f"without its experience, or {folder}, and the memory is filled anew"
        )
    return found


@dataclass(frozen=True)
class ReplayShare:
    """What one of ``size`` ranks gets of the replays beside a checkpoint.

    As many replays as ranks: its own. More: every ``size``-th. Fewer: some lanes of one.
    """

    folder: Path
    shards: Sequence[StoredReplay]
    rank: int = 0
    size: int = 1

    @property
    def _dealt(self) -> tuple[list[StoredReplay], int, int]:
        """Replays of which this rank takes lanes, its number among those who do, and theirs."""
        count = len(self.shards)
        if count >= self.size:
            return list(self.shards[self.rank :: self.size]), 0, 1
        return [self.shards[self.rank % count]], self.rank // count, len(range(self.rank % count, self.size, count))

    @property
    def run(self) -> str:
        """Name of the run that saved it."""
        return self.shards[0].run

    @property
    def stored(self) -> int:
        """Rows for this rank, about."""
        replays, _, parts = self._dealt
        return sum(replay.stored for replay in replays) // parts

    @property
    def own(self) -> StoredReplay | None:
        """The replay of this rank alone; None where there are more or fewer of them than ranks."""
        return self.shards[self.rank] if len(self.shards) == self.size else None

    def fill(self, rings: Sequence[LaneRing]) -> bool:
        """Fill new rings: bit for bit where their shapes are those that were stored, else dealt anew.

        Returns whether they are those that were stored.

        Raises:
            ConfigError, ValueError: as :meth:`StoredReplay.restore` and :meth:`StoredReplay.deal`.
        """
        replays, part, parts = self._dealt
        shapes, own = [(ring.num_steps, ring.num_lanes) for ring in rings], self.own
        if own is not None and [(ring.num_steps, ring.num_lanes) for ring in own.rings] == shapes:
            own.restore(rings)
            return True
        deal_replays(replays, rings, part, parts)
        return False
