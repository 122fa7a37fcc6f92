"""ReplayMemory: batches out of all workers' rings, without copies on the way in and without locks.

Rows are read while workers write; why none is ever half old and half new: :mod:`claw_lightning.rollout.ring`. What a
batch depends on besides its seed, namely how far the writers had come, is kept as a :class:`Draw` and can be given
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from claw_lightning.replay.batch import ReplayBatch
from claw_lightning.replay.hindsight import Relabeller
from claw_lightning.replay.resident import ResidentReplay
from claw_lightning.replay.samplers import Arrivals, Places, Sampler, Stored, Uniform
from claw_lightning.replay.segments import Segments, connected
from claw_lightning.rollout.normalizer import Moments, batch_moments, merged_moments
from claw_lightning.rollout.ring import HAS_FINAL, QUARANTINED, LaneRing, RowLayout, image_offsets, usable

SPARE = 12  # one more place is drawn for each so many, in case that some are unusable
ROUNDS = 64  # of drawing places anew, before the stored steps are called unusable
ATTEMPTS = 64  # at one call, before the rings are called too short


class Draw(NamedTuple):
    """All that a call of :meth:`ReplayMemory.sample` read of the writers' progress; numbers of rings, in their order.

    A memory of the same seed and the same calls so far, whose rings hold the same steps and have just published those
    of ``heads``, gives the same batch to the bit when it is given this as ``script``.

    Attributes:
        heads: steps published when the call began. What it draws, the count of steps and the moments are seen from
            here.
        checks: per round of drawing, the heads read after the round's copies: which of them were overtaken, and from
            which step on the next round draws. A ring of which a round took nothing keeps its number.
        finals: per round, the final observations written, read after their copies. Zeros without a side table.
        moments: the heads read after copying for the moments: which rows they do without.
        followed: per time that new rows were taken note of, the steps published then: once, and again each time the
            call began anew.
        follow_checks: the heads read after copying for that.
        images: the oldest steps whose compressed images were there, before the first round and after the copies of
            each. Empty without compressed images.
        mirrored: the heads read after copying to the device, from where all of the call is then drawn. Empty where rows
            are read on the host. Such a draw can be repeated there, and one of the host on a device.
    """

    heads: tuple[int, ...]
    checks: tuple[tuple[int, ...], ...]
    finals: tuple[tuple[int, ...], ...]
    moments: tuple[int, ...]
    followed: tuple[tuple[int, ...], ...] = ()
    follow_checks: tuple[tuple[int, ...], ...] = ()
    images: tuple[tuple[int, ...], ...] = ()
    mirrored: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Lists of integers by name."""
        return {
            "heads": list(self.heads),
            "checks": [list(heads) for heads in self.checks],
            "finals": [list(written) for written in self.finals],
            "moments": list(self.moments),
            "followed": [list(heads) for heads in self.followed],
            "follow_checks": [list(heads) for heads in self.follow_checks],
            "images": [list(steps) for steps in self.images],
            "mirrored": list(self.mirrored),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Draw:
        """Inverse of :meth:`to_json`."""
        names = ("checks", "finals", "followed", "follow_checks", "images")
        lists: dict[str, Any] = {name: tuple(tuple(numbers) for numbers in values.get(name, ())) for name in names}
        single: dict[str, Any] = {name: tuple(values.get(name, ())) for name in ("heads", "moments", "mirrored")}
        return cls(**lists, **single)


class _Progress:
    """The writers' progress as one call reads it, or, with a script, as it was read when that was recorded."""

    def __init__(
        self, rings: Sequence[LaneRing], script: Draw | None = None, resident: ResidentReplay | None = None
    ) -> None:
        self.rings, self.script, self.resident = rings, script, resident
        self.images: list[list[int]] = []
        if rings[0].layout.has_arena:  # before the heads: at these, images from then on have been there
            self.images = [[ring.oldest_image() for ring in rings] if script is None else list(script.images[0])]
        self.heads = tuple(ring.head for ring in rings)
        if script is not None:
            if len(script.heads) != len(rings) or self.heads != script.heads:
                raise ValueError(f"the script is of rings at steps {script.heads}, these are at {self.heads}")
            self.heads = script.heads
        #: Where all is drawn from mirrors: heads and final observations after the one copying, in place of later ones.
        self.mirrored: tuple[int, ...] = ()
        self._finals_mirrored: tuple[int, ...] = ()
        if resident is not None:
            self.mirrored, self._finals_mirrored = resident.synchronise(self.heads)
        if script is not None:
            self.mirrored = script.mirrored
        self.checks: list[list[int]] = []
        self.finals: list[list[int]] = []
        self.moments = list(self.heads)
        self.followed: list[list[int]] = []
        self.follow_checks: list[list[int]] = []
        self._has_followed = False

    def renewed(self) -> _Progress:
        """As a call that began now would read it; that rows were followed stays."""
        progress = _Progress(self.rings, self.script, self.resident)
        progress.followed, progress.follow_checks = self.followed, self.follow_checks
        return progress

    def begin_follow(self) -> bool:
        """Whether rows are to be taken note of: once per attempt, or as often as the script did."""
        done = self._has_followed if self.script is None else len(self.followed) == len(self.script.followed)
        if done:
            return False
        heads = self.heads if self.script is None else self.script.followed[len(self.followed)]
        self.followed.append(list(heads))
        self.follow_checks.append(list(heads))
        self._has_followed = True
        return True

    def check_follow(self, index: int) -> int:
        """Head of a ring after the copies for that."""
        time = len(self.followed) - 1
        head = self.rings[index].head if self.script is None else self.script.follow_checks[time][index]
        self.follow_checks[time][index] = head
        return head

    def _head(self, index: int) -> int:
        """Head of a ring after whatever was read of it: of a mirror, that of its copying."""
        return self.mirrored[index] if self.mirrored else self.rings[index].head

    def begin_round(self) -> tuple[int, ...]:
        """Heads after the latest copies of every ring; from now on, checks are those of another round."""
        latest = tuple(self.checks[-1]) if self.checks else self.mirrored or self.heads
        if self.script is not None and len(self.checks) == len(self.script.checks):
            raise ValueError("the script is of another draw: it ends before this one")
        self.checks.append(list(latest))
        self.finals.append([0] * len(self.rings))
        if self.images:
            self.images.append(list(self.images[-1]))
        return latest

    def check(self, index: int) -> int:
        """Head of a ring after the round's copies of it."""
        script, round_ = self.script, len(self.checks) - 1
        head = self._head(index) if script is None else script.checks[round_][index]
        self.checks[round_][index] = head
        return head

    def check_finals(self, index: int) -> int:
        """Final observations written in a ring after the round's copies of them."""
        script, round_ = self.script, len(self.finals) - 1
        if script is not None:
            written = script.finals[round_][index]
        else:
            written = self._finals_mirrored[index] if self._finals_mirrored else self.rings[index].finals_written
        self.finals[round_][index] = written
        return written

    def oldest_image(self, index: int) -> int:
        """Oldest step of a ring whose images were there before the round; 0 without compressed images."""
        return self.images[-1][index] if self.images else 0

    def check_images(self, index: int) -> int:
        """Oldest step of a ring whose images were there after the round's copies of them."""
        script, round_ = self.script, len(self.images) - 1
        oldest = self.rings[index].oldest_image() if script is None else script.images[round_][index]
        self.images[round_][index] = oldest
        return oldest

    def check_moments(self, index: int) -> int:
        """Head of a ring after the copies for the moments."""
        self.moments[index] = self.rings[index].head if self.script is None else self.script.moments[index]
        return self.moments[index]

    def draw(self) -> Draw:
        """What was read."""
        names = ("checks", "finals", "followed", "follow_checks", "images")
        lists: dict[str, Any] = {name: tuple(map(tuple, getattr(self, name))) for name in names}
        return Draw(heads=self.heads, moments=tuple(self.moments), mirrored=self.mirrored, **lists)


class ReplayMemory:
    """The rings of all workers as one memory.

    Args:
        rings: one per worker, equal layouts.
        seed: of the sampler.
        sampler: which rows are drawn; None: :class:`Uniform`. It is bound to the rings here.
        relabeller: gives drawn samples other goals; None: they stay as they are.
        num_options: K, for samplers that tell options apart.
        past: further rings, which nobody writes into: experience of other runs.
        counted: whether the observations of the past were counted into the moments already.
        device: keep all rows there as well (:class:`ResidentReplay`) and gather batches there; None: on the host. The
            same seed and calls give the same batches to the bit, as long as nobody writes during a call.
        with_states: give batches the next states, and moments of states; only of tasks that have them.

    Attributes:
        rings: those of the workers, then those of the past.
        last_draw: what the latest call of :meth:`sample` read of the writers' progress; None before the first.
        updates: updates done so far, for samplers that look at the age of policies; kept by the owner.
        steps_before: environment steps of the run that are not in these rings; kept by the owner.
    """

    def __init__(
        self,
        rings: Sequence[LaneRing],
        seed: int,
        sampler: Sampler | None = None,
        relabeller: Relabeller | None = None,
        num_options: int = 1,
        past: Sequence[LaneRing] = (),
        counted: bool = False,
        device: torch.device | None = None,
        with_states: bool = False,
    ) -> None:
        self.written, self.rings = list(rings), [*rings, *past]
        self.layout = rings[0].layout
        self.with_states = with_states
        #: Numbers at the beginning of a row that are read of a successor, and whose moments are told.
        self.seen_size = self.layout.final_size if with_states else self.layout.obs_size
        self.rng = np.random.default_rng(seed)
        self.sampler, self.relabeller = sampler or Uniform(), relabeller
        self.sampler.bind(self.rings, num_options)
        flat = [ring.rows.reshape(-1, self.layout.words) for ring in self.rings]
        self._flat = [torch.from_numpy(rows) for rows in flat]
        self._flat_seen = [rows[:, : self.seen_size] for rows in self._flat]
        self._flags = [self.layout.view(rows, "flags") for rows in flat]
        self.resident = ResidentReplay(self.rings, device) if device is not None else None
        if self.resident is not None:
            self._flags = [mirror.flags for mirror in self.resident.mirrors]
            if relabeller is not None:
                relabeller.flags = [mirror.flags.reshape(-1, mirror.ring.num_lanes) for mirror in self.resident.mirrors]
        #: Whether a single row's sample is the row and the next observation, and nothing else.
        self._is_plain = not self.layout.has_finals and self.layout.image_size == 0
        #: Pixels [rows, bytes] of each ring, where they lie in the rows.
        self._pixels: list[Tensor] = []
        if "image" in self.layout.fields:
            self._pixels = [torch.from_numpy(self.layout.view(rows, "image")) for rows in flat]
        # The moments of restored steps came with the checkpoint; those of another run's have yet to be counted.
        self._seen = [ring.head for ring in self.rings]
        if not counted:
            self._seen[len(self.written) :] = [ring.readable()[0] for ring in past]
        #: Which rows [T x N] may be learned from; a byte each is in the cache where their flags are not.
        self._usable = [np.zeros(ring.num_steps * ring.num_lanes, bool) for ring in self.rings]
        #: Of each ring: the step up to which rows were followed, and the last of them, which waits for its successor.
        self._followed = [(ring.readable()[0], np.empty((0, ring.num_lanes, 0), np.int32)) for ring in self.rings]
        self.last_draw: Draw | None = None
        self.updates = self.steps_before = 0

    @property
    def inserted(self) -> int:
        """Environment steps published by all workers since their rings were made."""
        return self._inserted([ring.head for ring in self.written])

    def _inserted(self, heads: Sequence[int]) -> int:
        """Environment steps of the workers at these heads; what follows them is of the past."""
        return sum(head * ring.num_lanes for head, ring in zip(heads, self.written, strict=False))

    @property
    def stored(self) -> int:
        """Rows that can be read now."""
        spans = [ring.readable() for ring in self.rings]
        if self.layout.has_arena:  # the arena may hold fewer steps than the rows
            spans = [(max(span[0], ring.oldest_image()), span[1]) for span, ring in zip(spans, self.rings, strict=True)]
        return sum(max(0, last - first) * ring.num_lanes for (first, last), ring in zip(spans, self.rings, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """State of the generator, and up to which steps observations were counted into the moments."""
        return {"rng": self.rng.bit_generator.state, "seen": self._seen[: len(self.written)]}

    def load_state_dict(self, state: dict[str, Any], same_seed: bool = True, same_rings: bool = True) -> None:
        """Inverse of :meth:`state_dict`, before the first draw.

        Args:
            state: as saved.
            same_seed: whether draws are to go on as they would have; else they are those of this memory's seed.
            same_rings: whether the rings hold the same steps.
        """
        if same_seed:
            self.rng.bit_generator.state = state["rng"]
        if same_rings and len(state["seen"]) == len(self.written):
            for i, (ring, seen) in enumerate(zip(self.written, state["seen"], strict=True)):
                self._seen[i] = min(seen, ring.head)

    def sample(self, num_updates: int, batch_size: int, length: int = 1, script: Draw | None = None) -> ReplayBatch:
        """Sample with replacement of usable rows, or of segments of consecutive rows that begin at such rows.

        How far the writers are is read once, at the beginning; steps that they publish during the call wait for the
        next one. Rows that they overtake during the call are drawn anew from what is left.

        Args:
            num_updates: U.
            batch_size: B.
            length: L, rows of a segment. Row k of a segment that begins at step t is the row of step t + k of the
                same lane. The beginnings are the same draws for every L: one near the write head or near an end gives
                a segment with fewer valid steps and is not passed over, which would favour old rows.
            script: :attr:`last_draw` of the call that is to be repeated; see :class:`Draw`.

        Returns:
            Batch of shapes [U, B, ...] for length 1, else [U, B, L, ...] with :attr:`ReplayBatch.valid`. Step 0 is
            always valid. Step k is valid if step k - 1 is valid and ended no episode, and row k is usable, opens no
            episode and was readable at the beginning of the call; with a sampler that stays within options, only if it
            belongs to the option of step 0. The numbers of invalid steps are zero, but for the observation of the first
            of them, which is the next one of the last valid step.

        Raises:
            ValueError: ``length`` is below 1, or ``script`` is not of these rings as they stand.
            RuntimeError: nothing is stored yet, nearly no stored row is usable (for example all are quarantined), or
                the writers overtake every attempt (rings far too short for the batch).
        """
        if length < 1:
            raise ValueError(f"a segment has at least one row, got length {length}")
        count = num_updates * batch_size
        drawn = self._empty(count, length)
        state = self.rng.bit_generator.state
        progress = _Progress(self.rings, script, self.resident)
        for _ in range(ATTEMPTS):
            while progress.begin_follow():
                self._follow(progress)
            places = self._fill(drawn, progress)
            if places is not None:
                break
            # As if the call began now: the draw then depends on one snapshot of the heads, however often it failed.
            self.rng.bit_generator.state = state
            progress = progress.renewed()
        else:
            raise RuntimeError("replay: the writers overtake the sampler each time; the rings are too short")
        shape: tuple[int, ...] = (num_updates, batch_size)
        if length > 1:
            shape = (num_updates, batch_size, length)
            drawn.blank()
        moments = self._moments(progress)
        self.last_draw = progress.draw()
        next_obs = drawn.next_obs.view(*shape, self.seen_size)
        images = (drawn.next_images, drawn.images)
        pixels = [None if x is None else x.view(*shape, self.layout.image_size) for x in images]
        return ReplayBatch(
            drawn.rows.view(*shape, self.layout.words),
            next_obs[..., : self.layout.obs_size],
            self.layout,
            moments,
            self._inserted(progress.heads),
            self._sent(drawn.valid.numpy()).view(shape) if length > 1 else None,
            None if places.weight is None else self._sent(places.weight).view(num_updates, batch_size),
            places if self.sampler.wants_errors else None,
            next_images=pixels[0],
            images=pixels[1],
            next_states=next_obs[..., self.layout.obs_size :] if self.with_states else None,
        )

    def _fill(self, drawn: Segments, progress: _Progress) -> Places | None:
        """Fill all places of ``drawn``; None if the writers overtook too much of what was stored at the beginning."""
        n = len(drawn.rows)
        stored = self._stored(progress, progress.heads, progress.heads).total
        if stored <= 0:
            raise RuntimeError("replay: nothing to sample yet")
        # Of rows that were lost before they could be noted, nothing is known: they are not unusable ones.
        if 2 * self._stored(progress, progress.heads, progress.follow_checks[-1]).total <= stored:
            return None
        # Samplers deal places ring by ring, option by option; shuffled, so that every update sees of all. Where rows
        # can be copied in order, it is the draw that is shuffled.
        in_order = len(self.rings) == 1
        missing = np.arange(n) if in_order else self.rng.permutation(n)
        found: list[tuple[np.ndarray, Places]] = []
        for _ in range(ROUNDS):
            latest = progress.begin_round()
            view = self._stored(progress, progress.heads, latest)
            left = view.total
            if 2 * left <= stored:  # would favour what is left, and that may be a border that stays
                return None
            places = self._choose(view, len(missing))
            bad = self._copy_places(places, missing, view, drawn, progress)
            if not bad.any():
                return places if in_order and not found else _in_order([*found, (missing, places)], n)
            found.append((missing[~bad], places.take(~bad)))
            missing = missing[bad]
        raise self._unusable(len(missing))

    def _stored(self, progress: _Progress, heads: Sequence[int], latest: Sequence[int]) -> Stored:
        """What was stored at ``heads`` and is still there at the ``latest`` ones."""
        spans = [
            (max(ring.readable(now)[0], progress.oldest_image(i)), ring.readable(head)[1])
            for i, (ring, head, now) in enumerate(zip(self.rings, heads, latest, strict=True))
        ]
        env_steps = self.steps_before + self._inserted(heads)
        return Stored(spans, [ring.num_lanes for ring in self.rings], env_steps, self.updates)

    def _empty(self, count: int, length: int) -> Segments:
        device = None if self.resident is None else self.resident.device
        return Segments.empty(count, length, self.layout, device, self.with_states)

    def _sent(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values) if self.resident is None else self.resident.send(values)

    def _choose(self, view: Stored, count: int) -> Places:
        """Places whose rows may be learned from. What the writer overtakes meanwhile is seen after the copies."""
        if self.sampler.knows_usable:
            return self._draw(view, count)
        if self.sampler.exchangeable:
            # Some more at once than one by one in further rounds. Of independent draws, any that are left out without
            # a look at them leave the distribution of the others as it is; behind one another lie those of a ring.
            places = self.sampler.draw(view, count + count // SPARE + 1, self.rng)
            are_fine = self._are_usable(places)
            fine = np.flatnonzero(are_fine)
            if len(fine) >= count:
                if len(self.rings) > 1:
                    fine = np.delete(fine, self.rng.choice(len(fine), len(fine) - count, replace=False))
                return places.take(fine[:count])
            missing = np.arange(len(fine), count)
            places = places.take(np.concatenate([fine, np.flatnonzero(~are_fine)[: len(missing)]]))
        else:
            places = self._draw(view, count)
            missing = np.flatnonzero(~self._are_usable(places))
        for _ in range(ROUNDS):
            if len(missing) == 0:
                return places
            again = self._draw(view, len(missing))
            places.put(missing, again)
            missing = missing[~self._are_usable(again)]
        raise self._unusable(len(missing))

    def _draw(self, view: Stored, count: int) -> Places:
        places = self.sampler.draw(view, count, self.rng)
        if len(self.rings) == 1 and not self.sampler.exchangeable:
            return places.take(self.rng.permutation(count))
        return places

    def _are_usable(self, places: Places) -> np.ndarray:
        """:func:`usable` for the rows at places [M] bool, as they were taken note of."""
        if len(self.rings) == 1:
            return self._usable[0][self._index(0, places.step, places.lane)]
        fine = np.empty(len(places.ring), bool)
        for i in range(len(self.rings)):
            own = np.flatnonzero(places.ring == i)
            fine[own] = self._usable[i][self._index(i, places.step[own], places.lane[own])]
        return fine

    def _index(self, ring: int, steps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Flat indices of rows [M]."""
        size = self.rings[ring].num_steps * self.rings[ring].num_lanes
        row = steps * self.rings[ring].num_lanes + lanes
        row -= row // size * size  # of an integer array, twice as fast as %
        return row

    @staticmethod
    def _unusable(count: int) -> RuntimeError:
        return RuntimeError(
            f"replay: {count} samples could not be drawn; nearly all stored steps are unusable (quarantined or at "
            "episode borders); look at replay/quarantined and the workers' logs"
        )

    def _copy_places(
        self, places: Places, where: np.ndarray, view: Stored, drawn: Segments, progress: _Progress
    ) -> np.ndarray:
        """Copy samples to the given places of ``drawn``; returns which must be drawn anew [len(where)] bool."""
        if len(self.rings) == 1 and len(where) == len(drawn.rows):  # all places, in order
            return ~self._copy(0, places.step, places.lane, view.spans[0], drawn, progress)
        bad = np.zeros(len(where), bool)
        order = np.argsort(places.ring, kind="stable")
        ends = np.searchsorted(places.ring[order], np.arange(len(self.rings) + 1))
        for index, (start, stop) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
            if stop == start:
                continue
            own = order[start:stop]
            got = self._empty(len(own), drawn.rows.shape[1])
            trusted = self._copy(index, places.step[own], places.lane[own], view.spans[index], got, progress)
            drawn.put(where[own], got)
            bad[own] = ~trusted
        return bad

    def _copy(
        self,
        ring_index: int,
        begin: np.ndarray,
        lanes: np.ndarray,
        span: tuple[int, int],
        got: Segments,
        progress: _Progress,
    ) -> np.ndarray:
        """Copy the segments that begin at the given steps [M] and lanes [M] into ``got``.

        Returns which of them may be used [M] bool: step 0 is valid and no valid step was overtaken by the writer.
        """
        if self.resident is not None:
            return self._copy_resident(self.resident, ring_index, begin, lanes, span, got, progress)
        if got.rows.shape[1] == 1 and self._is_plain:
            return self._copy_rows(ring_index, begin, lanes, span[0], got, progress)
        ring, flat = self.rings[ring_index], self._flat[ring_index]
        length = got.rows.shape[1]
        steps = begin[:, None] + np.arange(length + 1)
        index = self._index(ring_index, steps, lanes[:, None])
        after = index[:, -1].copy()
        view = self.layout.view
        if got.whole is not None:
            torch.index_select(flat, 0, torch.from_numpy(index.ravel()), out=got.whole.view(-1, self.layout.words))
        else:
            torch.index_select(flat, 0, torch.from_numpy(index[:, 0].copy()), out=got.rows.squeeze(1))
            torch.index_select(self._flat_seen[ring_index], 0, torch.from_numpy(after), out=got.next_obs.squeeze(1))
        if self._pixels:
            assert got.next_images is not None
            got.next_images[:, :-1] = torch.from_numpy(view(got.rows.numpy(), "image"))[:, 1:]
            torch.index_select(self._pixels[ring_index], 0, torch.from_numpy(after), out=got.next_images[:, -1])

        flags = np.empty((len(begin), length + 1), np.int32)
        flags[:, :-1] = view(got.rows.numpy(), "flags")
        flags[:, -1] = self._flags[ring_index][after]
        # Slots from the span's end on hold steps of the round before, or are being written, or repeat the segment
        # (L > T).
        fine = usable(flags[:, :-1], flags[:, 1:]) & (steps[:, :-1] < span[1])
        if self.layout.has_finals:
            fine &= self._attach_finals(ring_index, flags[:, :-1], fine, got, progress)
        valid = connected(fine, flags[:, :-1], self.sampler.within_option)
        got.valid.copy_(torch.from_numpy(valid))
        compressed: list[tuple[int, int, bytes]] = []
        if got.images is not None:
            compressed = self._compressed(ring, got, view(flat.numpy(), "image_place")[after])
        goals = self._goals(ring_index, begin, lanes, span[0])
        # After the copies: a step that the writer may have reached in the meantime is not trusted. The writer overtakes
        # steps in their order, so all of a segment is intact if its oldest step is; the newest valid step and its
        # successor were published before the draw. Flags of an overtaken segment mean nothing: it is drawn anew whole.
        head = progress.check(ring_index)
        self._relabel(ring_index, goals, head, got)
        trusted = valid[:, 0] & ring.intact(begin, head)
        if got.images is not None:
            trusted &= begin >= progress.check_images(ring_index)
            _decode(ring, compressed, trusted, got)
        return trusted

    def _copy_rows(
        self, ring_index: int, begin: np.ndarray, lanes: np.ndarray, oldest: int, got: Segments, progress: _Progress
    ) -> np.ndarray:
        """:meth:`_copy` for single rows that need nothing but themselves and the next observation.

        They were chosen by what was noted of them, which stands as long as they are intact.
        """
        ring, flat, flat_seen = self.rings[ring_index], self._flat[ring_index], self._flat_seen[ring_index]
        index = self._index(ring_index, begin, lanes)
        after = torch.from_numpy(_after(index, ring))
        torch.index_select(flat, 0, torch.from_numpy(index), out=got.rows.squeeze(1))
        torch.index_select(flat_seen, 0, after, out=got.next_obs.squeeze(1))
        goals = self._goals(ring_index, begin, lanes, oldest)
        head = progress.check(ring_index)
        self._relabel(ring_index, goals, head, got)
        return ring.intact(begin, head)

    def _copy_resident(
        self,
        resident: ResidentReplay,
        ring_index: int,
        begin: np.ndarray,
        lanes: np.ndarray,
        span: tuple[int, int],
        got: Segments,
        progress: _Progress,
    ) -> np.ndarray:
        """:meth:`_copy` on the device: out of the mirrors, which nobody overtakes."""
        written = progress.check_finals(ring_index) if self.layout.has_finals else 0
        resident.copy(ring_index, begin, lanes, span[1], got, written, self.sampler.within_option)
        head = progress.check(ring_index)
        if self.relabeller is not None:
            chosen, source = self.relabeller.choose(ring_index, begin, lanes, span[0], self.rng)
            resident.relabel(self.relabeller, ring_index, chosen, source, lanes[chosen], (head, written), got)
        return got.valid.numpy()[:, 0] & self.rings[ring_index].intact(begin, head)

    def _goals(
        self, ring_index: int, begin: np.ndarray, lanes: np.ndarray, oldest: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Which samples get another goal [m], from which steps [m], and the goals [m, G]; None without hindsight."""
        if self.relabeller is None:
            return None
        chosen, source = self.relabeller.choose(ring_index, begin, lanes, oldest, self.rng)
        return chosen, source, self.relabeller.goals(ring_index, source, lanes[chosen])

    def _relabel(
        self, ring_index: int, goals: tuple[np.ndarray, np.ndarray, np.ndarray] | None, head: int, got: Segments
    ) -> None:
        """Write goals into samples, where their rows were not overtaken either."""
        if self.relabeller is None or goals is None:
            return
        chosen, source, values = goals
        values[~self.rings[ring_index].intact(source, head)] = np.nan
        self.relabeller.apply(ring_index, chosen, values, got.rows.numpy(), got.next_obs.numpy())

    def _compressed(self, ring: LaneRing, got: Segments, after: np.ndarray) -> list[tuple[int, int, bytes]]:
        """Copies of the images of valid steps and of those that follow them, as (sample, step, stored form).

        ``after`` [M, 3] are the places of the images behind the segments: of step L.
        """
        place = np.concatenate([self.layout.view(got.rows.numpy(), "image_place"), after[:, None]], axis=1)
        wanted = np.zeros(place.shape[:2], bool)
        wanted[:, :-1] = valid = got.valid.numpy()
        wanted[:, 1:] |= valid
        samples, steps = np.nonzero(wanted)
        place = place[samples, steps]
        numbers = (samples, steps, image_offsets(place), place[:, 2])
        return [(m, k, ring.read_image(*where)) for m, k, *where in zip(*(x.tolist() for x in numbers), strict=True)]

    def _attach_finals(
        self, ring_index: int, flags: np.ndarray, fine: np.ndarray, got: Segments, progress: _Progress
    ) -> np.ndarray:
        """Put true final observations in place of next ones; returns [M, L] which did not ask for a lost one."""
        ring = self.rings[ring_index]
        wanted = ((flags & HAS_FINAL) != 0) & fine
        index = self.layout.view(got.rows.numpy(), "final_index").astype(np.int64)
        got.next_obs.numpy()[wanted] = ring.finals[index[wanted] % ring.num_finals, : self.seen_size]
        return ~wanted | ring.finals_intact(index, progress.check_finals(ring_index))

    def _follow(self, progress: _Progress) -> None:
        """Take note of the rows that became complete since the last call, and tell sampler and relabeller of them."""
        for i, (ring, head) in enumerate(zip(self.rings, progress.followed[-1], strict=True)):
            seen, tail = self._followed[i]
            start = max(seen, ring.readable(head)[0])
            copied = [_integers(ring.rows[a:b], self.layout).copy() for a, b in _pieces(start, head, ring.num_steps)]
            check = progress.check_follow(i)
            if not copied:
                continue
            rows = np.concatenate(copied)
            lost = len(rows) - int(np.count_nonzero(ring.intact(np.arange(start, head), check)))
            if lost == 0 and start == seen and len(tail):
                rows, start = np.concatenate([tail, rows]), start - 1
            rows, start = rows[lost:], start + lost
            self._followed[i] = (head, rows[-1:])
            if len(rows) < 2:
                continue
            fields = {
                name: rows[..., self.layout.fields[name][0] - self.layout.fields["flags"][0]]
                for name in ("flags", "option", "version")
            }
            flags = fields["flags"]
            fine = usable(flags[:-1], flags[1:])
            table, first = self._usable[i].reshape(-1, ring.num_lanes), start
            for a, b in _pieces(start, start + len(fine), ring.num_steps):
                table[a:b] = fine[first - start : first - start + b - a]
                first += b - a
            arrivals = Arrivals(i, start, flags[:-1], fine, fields["option"][:-1], fields["version"][:-1])
            if self.sampler.follows:
                self.sampler.follow(arrivals)
            if self.relabeller is not None:
                self.relabeller.follow(arrivals)

    def new_moments(self) -> Moments:
        """Moments of the observations that were published since the last call.

        Quarantined rows do not count, nor do rows that were overwritten before they could be read.
        """
        return self._moments(_Progress(self.rings))

    def _moments(self, progress: _Progress) -> Moments:
        found: list[Moments] = []
        for i, (ring, head) in enumerate(zip(self.rings, progress.heads, strict=True)):
            first = max(self._seen[i], ring.readable(head)[0])
            self._seen[i] = head
            copied = []
            for start, stop in _pieces(first, head, ring.num_steps):
                rows = ring.rows[start:stop].reshape(-1, self.layout.words)
                fine = np.flatnonzero((self.layout.view(rows, "flags") & QUARANTINED) == 0)
                copied.append((first + fine // ring.num_lanes, rows[:, : self.seen_size][fine]))
                first += stop - start
            check = progress.check_moments(i)
            for steps, observations in copied:
                lost = len(steps) - np.count_nonzero(ring.intact(steps, check))  # the oldest, hence the first of them
                found.append(batch_moments(observations[lost:]))
        return merged_moments(found, self.seen_size)


def _pieces(first: int, last: int, size: int) -> list[tuple[int, int]]:
    """Slot ranges of the steps [first, last) of a ring of ``size`` slots."""
    if last <= first:
        return []
    start, length = first % size, last - first
    end = min(start + length, size)
    pieces = [(start, end)]
    if start + length > size:
        pieces.append((0, start + length - size))
    return pieces


def _after(index: np.ndarray, ring: LaneRing) -> np.ndarray:
    """Flat indices of the rows that follow those at flat indices [M]."""
    after, size = index + ring.num_lanes, ring.num_steps * ring.num_lanes
    return np.where(after >= size, after - size, after)


def _integers(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """The integer words of rows [..., W], from the flags on: [..., I] int32."""
    return rows[..., layout.fields["flags"][0] :].view(np.int32)


def _decode(ring: LaneRing, compressed: Sequence[tuple[int, int, bytes]], trusted: np.ndarray, got: Segments) -> None:
    """Fill images and next images of trusted [M] samples. What was overwritten meanwhile may be no image at all."""
    assert got.images is not None
    assert got.next_images is not None
    images, next_images = got.images.numpy(), got.next_images.numpy()
    for sample, step, stored in compressed:
        if trusted[sample]:
            pixels = ring.decode_image(stored)
            if step < images.shape[1]:
                images[sample, step] = pixels
            if step > 0:
                next_images[sample, step - 1] = pixels


def _in_order(found: Sequence[tuple[np.ndarray, Places]], count: int) -> Places:
    """Places of all samples, put where the samples are."""
    index = np.concatenate([where for where, _ in found])
    joined = Places.join([places for _, places in found])
    order = np.empty(count, np.int64)
    order[index] = np.arange(count)
    return joined if len(found) == 1 and (index[:-1] < index[1:]).all() else joined.take(order)
