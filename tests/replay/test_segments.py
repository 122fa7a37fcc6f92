"""Segments of consecutive rows: nothing across an end, a restart, a quarantined row or the write head; no bias."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from claw_lightning.replay import ReplayMemory
from claw_lightning.rollout.ring import (
    BORDER,
    FIRST,
    HAS_FINAL,
    QUARANTINED,
    SWITCHED,
    TERMINATED,
    TRUNCATED,
    LaneRing,
    RowLayout,
)
from tests.builders import PATIENCE, lane_rows, sample_unless_overtaken, without_successors, write_step
from tests.replay import episode_writer

FINAL = 0.5  # a true final observation is that of its row plus this, which no row holds


class History:
    """Ring beside everything that was ever written into it: the observation of a row is [step, lane, ring]."""

    def __init__(self, num_steps, num_lanes=1, same_step=False, number=0):
        self.ring = LaneRing(RowLayout(3, 1, has_finals=same_step), num_steps, num_lanes)
        self.same_step, self.number, self.flags, self.final_index = same_step, number, [], {}

    def write(self, flags):
        """Publish a step with these flags [N]; HAS_FINAL asks for a final observation. Sick rows are NaN."""
        step, ring = len(self.flags), self.ring
        finals = {}
        for lane, value in enumerate(flags):
            if value & HAS_FINAL:
                self.final_index[step, lane] = ring.finals_written + len(finals)
                finals[lane] = np.array(self.obs(step, lane)) + FINAL
        obs = np.array([self.obs(step, lane) for lane in range(ring.num_lanes)], np.float32)
        obs[(np.array(flags) & QUARANTINED) != 0] = np.nan
        write_step(ring, obs, flags, finals)
        self.flags.append(list(flags))

    def obs(self, step, lane):
        return [step, lane, self.number]

    def segment(self, step, lane, length):
        """(observation, next observation) of the valid steps, by walking from row to row; [] if it cannot begin."""
        ring, found = self.ring, []
        safe_final = ring.finals_written - ring.num_finals + ring.num_lanes
        for t in range(step, step + length):
            if t + 2 > ring.head:
                break  # no published successor
            flags, after, next_obs = self.flags[t][lane], self.flags[t + 1][lane], self.obs(t + 1, lane)
            if flags & (BORDER | QUARANTINED) or (found and flags & FIRST):
                break
            if flags & HAS_FINAL:
                if self.final_index[t, lane] < safe_final:
                    break
                next_obs = (np.array(self.obs(t, lane)) + FINAL).tolist()
            elif after & QUARANTINED or (after & FIRST and not flags & TERMINATED):
                break
            found.append((self.obs(t, lane), next_obs))
            if flags & (TERMINATED | TRUNCATED):
                break
        return found

    def beginnings(self, length=1):
        """{(step, lane, ring): valid steps} of all segments that may be drawn."""
        head, ring = self.ring.head, self.ring
        oldest = max(0, head - ring.num_steps + ring.guard)
        places = [(t, lane) for t in range(oldest, max(0, head - 1)) for lane in range(ring.num_lanes)]
        found = {(t, lane, self.number): len(self.segment(t, lane, length)) for t, lane in places}
        return {place: steps for place, steps in found.items() if steps}


def history(lanes, num_steps, same_step=False, number=0):
    """History of lanes of flags."""
    written = History(num_steps, len(lanes), same_step, number)
    for flags in zip(*lanes, strict=False):
        written.write(flags)
    return written


def flags_of(episodes, same_step=False):
    """Flags of a lane that plays (length, end) episodes; see :func:`lane_rows`."""
    return [flags | (HAS_FINAL if final is not None else 0) for _, flags, final in lane_rows(episodes, same_step)]


def check(histories, length, count=800, seed=0):
    """Compare a sample with the row-by-row reference; returns the batch."""
    histories = histories if isinstance(histories, list) else [histories]
    batch = ReplayMemory([h.ring for h in histories], seed).sample(2, count // 2, length)
    assert batch.rows.shape[:3] == batch.next_obs.shape[:3] == batch.valid.shape == (2, count // 2, length)
    assert batch.valid.dtype == torch.bool and batch.valid[..., 0].all()
    obs, next_obs = batch.obs.flatten(0, 1).numpy(), batch.next_obs.flatten(0, 1).numpy()
    valid, rows = batch.valid.flatten(0, 1).numpy(), without_successors(batch).view(np.int32)
    assert not rows[~valid].any() and not next_obs[~valid].any()
    drawn = {}
    for i, place in enumerate(map(tuple, obs[:, 0].astype(int).tolist())):
        step, lane, number = place
        if place not in drawn:
            drawn[place] = histories[number].segment(step, lane, length)
        expected = drawn[place]
        assert valid[i].tolist() == [k < len(expected) for k in range(length)], place
        assert list(zip(obs[i, : len(expected)].tolist(), next_obs[i, : len(expected)].tolist())) == expected, place
    assert {place: len(steps) for place, steps in drawn.items()} == {
        place: steps for h in histories for place, steps in h.beginnings(length).items()
    }
    return batch


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("end", ["terminated", "truncated", "cut"])
@pytest.mark.parametrize("episode", [1, 2, 3, 4, 5, 6])
def test_an_end_at_every_position_of_the_window(episode, end, same_step):
    lane = flags_of([(7, "cut"), (episode, end), (1, "terminated"), (episode, end), (9, "cut")], same_step)
    written = history([lane], 64, same_step)
    batch = check(written, 4)
    # The last step before an end is part of its segment, with the true final observation, and nothing after it is.
    ended = (batch.terminated | batch.truncated) & batch.valid
    assert not (ended[..., :-1] & batch.valid[..., 1:]).any()
    assert end == "cut" or ended.any(dim=(0, 1))[: min(episode, 4)].all()
    assert not (batch.first & batch.valid)[..., 1:].any()


@pytest.mark.parametrize("flags", [BORDER, QUARANTINED, FIRST, TERMINATED, TRUNCATED, SWITCHED])
@pytest.mark.parametrize("position", [3, 4, 5, 6, 7])
def test_one_row_in_the_middle(position, flags):
    lane = [0] * 12
    lane[position] = flags
    written = history([lane], 32)
    check(written, 5)
    before = {BORDER: 2, QUARANTINED: 1, FIRST: 1, TERMINATED: 3, TRUNCATED: 3, SWITCHED: 5}
    assert len(written.segment(position - 2, 0, 5)) == before[flags]


def test_a_beginning_is_never_crossed_into_even_without_an_end_flag():
    # A final observation makes the row before usable; no adapter writes one without an end.
    written = history([[0, 0, HAS_FINAL, FIRST, 0, 0, 0]], 32, same_step=True)
    batch = check(written, 4)
    assert not (batch.first & batch.valid)[..., 1:].any()


def test_nothing_sick_is_handed_out():
    lane = [QUARANTINED if t % 5 == 4 else 0 for t in range(40)]
    batch = check(history([lane], 48), 6)
    assert torch.isfinite(batch.rows).all() and torch.isfinite(batch.next_obs).all()
    assert batch.valid.sum(-1).unique().tolist() == [1, 2, 3]


@pytest.mark.parametrize("head", [2, 3, 5, 12, 13, 14, 24, 25, 30])
def test_the_write_head_in_the_window_shortens_it(head):
    written = history([[0] * head, [0] * head], 12)
    batch = check(written, 4)
    to_head = head - 1 - batch.obs[..., 0, 0]
    np.testing.assert_array_equal(batch.valid.sum(-1), to_head.clamp(max=4))


def test_what_lies_behind_the_head_is_never_valid():
    written = history([[0] * 30], 12)
    written.ring.slot()[:] = np.nan  # half a step that is not published; the slots after it hold the oldest steps
    batch = check(written, 11)
    assert torch.isfinite(batch.rows).all()


@pytest.mark.parametrize("head", [2, 4, 8, 40])
@pytest.mark.parametrize("length", [8, 9, 50])
def test_longer_than_what_is_stored(length, head):
    written = history([[0] * head], 8)
    batch = check(written, length)
    assert batch.valid.sum(-1).max() == min(head, 8 - written.ring.guard) - 1


@pytest.mark.parametrize("same_step", [False, True])
def test_several_rings_and_lanes_out_of_step_that_have_wrapped(same_step):
    rng, histories = np.random.default_rng(1), []
    for number, num_lanes in enumerate((3, 1, 2)):
        kinds = ("terminated", "truncated", "cut")
        lanes = []
        for _ in range(num_lanes):
            lanes.append(flags_of([(int(rng.integers(1, 9)), kinds[rng.integers(3)]) for _ in range(30)], same_step))
        histories.append(history(lanes, 16 + 5 * number, same_step, number))
        assert histories[-1].ring.head > 2 * histories[-1].ring.num_steps
    check(histories, 5, count=3000)


def test_a_final_observation_that_was_overwritten_ends_the_segment_before_it():
    # Twelve ends per 16 rows ask for more entries than the table has.
    lane = flags_of([(1, "terminated"), (1, "truncated"), (2, "terminated")] * 30, same_step=True)
    written = history([lane], 32, same_step=True)
    batch = check(written, 3)
    lost = [place for place in written.final_index if written.final_index[place] < written.ring.finals_written - 7]
    assert written.ring.num_finals == 8 and max(lost)[0] > written.ring.readable()[0] + 8
    steps = {int(t) for t in batch.obs[..., 0, 0].flatten()}
    assert not steps & {t for t, _ in lost}
    assert any(len(written.segment(t, 0, 3)) == 1 and (t + 1, 0) in lost for t in steps)


ROWS = (
    0,
    0,
    0,
    SWITCHED,
    FIRST,
    BORDER,
    QUARANTINED,
    TERMINATED,
    TRUNCATED,
    FIRST | TERMINATED,
    TRUNCATED | QUARANTINED,
)
SAME_STEP_ROWS = (*ROWS, TERMINATED | HAS_FINAL, TRUNCATED | HAS_FINAL, TRUNCATED | HAS_FINAL | FIRST)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(5, 16), st.integers(2, 12), st.booleans())
def test_any_history(data, num_lanes, num_steps, length, same_step):
    row = st.sampled_from(SAME_STEP_ROWS if same_step else ROWS)
    lanes = data.draw(st.lists(st.lists(row, min_size=36, max_size=36), min_size=num_lanes, max_size=num_lanes))
    head = data.draw(st.integers(2, 36))
    written = history([lane[:head] for lane in lanes], num_steps, same_step)
    assume(len(written.beginnings()) * 4 >= written.ring.num_lanes * np.diff(written.ring.readable())[0])
    check(written, length, count=600)


def test_the_beginnings_are_those_of_single_rows():
    rng = np.random.default_rng(0)
    rings = [history(rng.choice(ROWS, (2, 50)).tolist(), 32, number=number).ring for number in range(2)]
    for some in (rings, rings[:1]):
        single, long = (ReplayMemory(some, 3).sample(3, 70, length) for length in (1, 4))
        assert torch.equal(single.rows.view(torch.int32), long.rows[:, :, 0].view(torch.int32))
        assert torch.equal(single.next_obs, long.next_obs[:, :, 0])


def test_length_one_is_a_batch_of_single_rows():
    ring = history([[0, SWITCHED, TERMINATED, BORDER, FIRST] * 8] * 2, 32).ring
    plain, one = ReplayMemory([ring], 3).sample(3, 7), ReplayMemory([ring], 3).sample(3, 7, 1)
    assert torch.equal(plain.rows.view(torch.int32), one.rows.view(torch.int32))
    assert torch.equal(plain.next_obs, one.next_obs)
    assert plain.rows.shape == (3, 7, ring.layout.words) and plain.next_obs.shape == (3, 7, 3)
    assert plain.valid is None and one.valid is None


def test_beginnings_near_the_head_are_drawn_as_often_as_others():
    written = history([[0] * 50] * 2, 24)
    batch = check(written, 8, count=8_000)
    _, counts = np.unique(batch.obs[:, :, 0].flatten(0, 1), axis=0, return_counts=True)
    mean, freedom = counts.mean(), len(counts) - 1
    assert freedom == 2 * 21 - 1
    assert abs(((counts - mean) ** 2 / mean).sum() - freedom) < 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [0, -1])
def test_a_segment_without_rows_is_refused(length):
    with pytest.raises(ValueError, match="at least one row"):
        ReplayMemory([history([[0] * 5], 8).ring], 0).sample(1, 1, length)


@pytest.mark.parametrize("steps_ahead", [1, 3, 4, 8, 16])
def test_segments_overtaken_during_the_copy_are_drawn_anew(monkeypatch, steps_ahead):
    written, rounds = history([[0] * 16], 16), []
    memory = ReplayMemory([written.ring], 0)
    copy = memory._copy

    def overtaken(*args):
        if not rounds:  # the writer runs ahead between the choice and the copy
            for _ in range(steps_ahead):
                written.write([0])
        rounds.append(args)
        return copy(*args)

    monkeypatch.setattr(memory, "_copy", overtaken)
    batch = memory.sample(1, 400, 6)
    # Two of guard and the one whose slot is being written: from three steps on, the oldest beginnings are lost; with
    # more than half of them lost, the call begins anew.
    assert (len(rounds) > 1) == (steps_ahead >= 3)
    begin = batch.obs[..., 0, 0]
    assert begin.min() == max(2, steps_ahead + 1 if steps_ahead < 7 else steps_ahead + 2)
    assert begin.max() == 14 + steps_ahead * (steps_ahead >= 7)
    inside = batch.valid[..., 1:]
    np.testing.assert_array_equal(batch.obs[..., 1:, 0][inside], (begin[..., None] + torch.arange(1, 6))[inside])
    np.testing.assert_array_equal(batch.next_obs[..., 0][batch.valid], batch.obs[..., 0][batch.valid] + 1)


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("same_step", [False, True])
def test_neither_torn_nor_crossed_with_a_writer_process_at_full_speed(same_step):
    sizes = obs_size, num_steps, num_lanes = 64, 64, 8
    count, length, shortened = 20_000, 5, 0
    ring = episode_writer.open_ring(-1, *sizes, same_step)
    memory, fd = ReplayMemory([ring], 0), ring.block.fd
    command = [sys.executable, episode_writer.__file__, *map(str, (fd, count, *sizes, int(same_step)))]
    with subprocess.Popen(command, pass_fds=(fd,)) as writer:
        while writer.poll() is None or shortened == 0:
            head = ring.head
            if head < 2:
                continue
            if (batch := sample_unless_overtaken(memory, 1, 32, length)) is None:
                continue
            valid, begin = batch.valid[0].numpy(), batch.obs[0, :, 0, 0].numpy().astype(int)
            step, lane = np.divmod(begin, num_lanes)
            to_end = 7 * np.ones(32, int) if same_step else 6 * np.ones(32, int)
            to_end = np.where(episode_writer.is_cut(lane), 6, to_end) - episode_writer.positions(step, lane)
            steps, expected = valid.sum(1), np.minimum(to_end, length)
            assert (valid == (np.arange(length) < steps[:, None])).all()
            # Only the write head may shorten a segment further, and only as far as it had come before the draw.
            assert ((steps == expected) | ((steps < expected) & (step + steps >= head - 1))).all()
            shortened += int((steps < expected).sum())
            obs = begin[:, None] + num_lanes * np.arange(length)
            final = same_step & ~episode_writer.is_cut(lane)[:, None] & (np.arange(length) == to_end[:, None] - 1)
            next_obs = np.where(final, -obs, obs + num_lanes)
            assert (without_successors(batch)[..., : batch.layout.obs_size] == (obs * valid)[..., None]).all()
            assert (batch.reward[0].numpy() == obs * valid).all()
            assert (batch.next_obs[0].numpy() == (next_obs * valid)[..., None]).all()
    assert writer.returncode == 0 and ring.head == count
