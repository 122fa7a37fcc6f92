"""ReplayMemory: the right successor, nothing across a border, uniform, every row counted once."""

import numpy as np
import pytest

from claw_lightning.replay import ReplayMemory
from claw_lightning.replay import memory as memory_module
from claw_lightning.rollout.normalizer import RunningMoments
from claw_lightning.rollout.ring import BORDER, FIRST, QUARANTINED, LaneRing, RowLayout
from tests.builders import lane_rows, ring_of_lanes, write_step

ENDS = ("terminated", "truncated", "cut")


def drawn(memory, count=2000, num_updates=1):
    """Pairs (observation, next observation) of a sample, each [count, O]."""
    batch = memory.sample(num_updates, count // num_updates)
    return batch.obs.flatten(0, 1).numpy(), batch.next_obs.flatten(0, 1).numpy()


def distinct(rows):
    return {tuple(row) for row in rows.astype(int).tolist()}


def expected_rows(lane, last):
    """(episode, step) of the rows that may be learned from among the first ``last``."""
    found = set()
    for (obs, flags, final), (_, next_flags, _) in zip(lane[:last], lane[1:]):
        lost = next_flags & FIRST and final is None and not flags & 1  # cut, its next observation is unknown
        if not flags & BORDER and not lost:
            found.add(tuple(obs))
    return found


def counting_ring(num_steps, num_lanes=1, written=None, flags=0):
    """Endless episode; the observation is [step, lane]."""
    ring = LaneRing(RowLayout(2, 1), num_steps, num_lanes)
    for t in range(written if written is not None else num_steps):
        write_step(ring, [[t, lane] for lane in range(num_lanes)], [flags] * num_lanes)
    return ring


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_next_observation_with_an_end_at_every_position(length, end, same_step):
    episodes = [(length, end), (2, "truncated"), (length, end), (1, "terminated"), (3, "cut"), (2, "terminated")]
    lane = lane_rows([*episodes, (5, "cut")], same_step)
    ring = ring_of_lanes([lane], same_step, num_steps=64)
    obs, next_obs = drawn(ReplayMemory([ring], 0))
    # Within an episode the next observation is one step on, at its end the true last one.
    np.testing.assert_array_equal(next_obs, obs + [0, 1])
    assert distinct(obs) == expected_rows(lane, len(lane) - 1)


@pytest.mark.parametrize("same_step", [False, True])
def test_lanes_out_of_step_and_a_ring_that_has_wrapped(same_step):
    rng = np.random.default_rng(1)
    lanes = []
    for _ in range(4):
        lanes.append(lane_rows([(int(rng.integers(1, 6)), ENDS[rng.integers(3)]) for _ in range(60)], same_step))
    ring = ring_of_lanes(lanes, same_step, num_steps=32)
    assert ring.head > 2 * ring.num_steps
    batch = ReplayMemory([ring], 0).sample(4, 1000)
    flags = batch.field("flags")
    np.testing.assert_array_equal(batch.next_obs.numpy(), batch.obs.numpy() + [0, 1])
    assert not (flags & BORDER).any()
    first, last = ring.readable()
    possible = set().union(*(expected_rows(lane[first : last + 1], last - first) for lane in lanes))
    assert distinct(batch.obs.flatten(0, 1).numpy()) == possible


def test_border_rows_are_never_drawn():
    lane = lane_rows([(1, "terminated"), (1, "truncated")] * 20)
    obs, _ = drawn(ReplayMemory([ring_of_lanes([lane])], 0))
    assert set(obs[:, 1]) == {0.0}


def test_a_restart_is_never_crossed():
    lane = lane_rows([(4, "cut"), (4, "cut"), (4, "cut")])
    obs, next_obs = drawn(ReplayMemory([ring_of_lanes([lane])], 0))
    np.testing.assert_array_equal(next_obs[:, 0], obs[:, 0])
    assert 3.0 not in obs[:, 1]


def test_quarantined_rows_and_their_predecessors_are_never_drawn():
    ring = LaneRing(RowLayout(2, 1), 32, 2)
    sick = {(5, 0), (6, 0), (11, 1), (20, 1)}
    for t in range(32):
        obs = np.array([[t, lane] for lane in range(2)], np.float32)
        flags = [QUARANTINED if (t, lane) in sick else 0 for lane in range(2)]
        obs[np.array(flags) != 0] = np.nan
        write_step(ring, obs, flags)
    memory = ReplayMemory([ring], 0)
    obs, next_obs = drawn(memory, 4000)
    assert np.isfinite(obs).all() and np.isfinite(next_obs).all()
    first, last = ring.readable()
    every = {(t, lane) for t in range(first, last) for lane in range(2)}
    assert distinct(obs) == every - sick - {(t - 1, lane) for t, lane in sick}


def test_a_terminated_row_before_a_quarantined_one_is_not_drawn():
    lane = lane_rows([(3, "terminated"), (3, "terminated"), (6, "cut")])
    sick = lane[3]  # border row of the first episode: the observation with which it ended
    lane[3] = ([np.nan, np.nan], sick[1] | QUARANTINED, None)
    obs, next_obs = drawn(ReplayMemory([ring_of_lanes([lane])], 0))
    assert np.isfinite(next_obs).all()
    assert (0, 2) not in distinct(obs)


def test_uniform_over_usable_rows():
    # Borders make a third of the rows unusable: rows beside them must not be drawn more often for it.
    lanes = [lane_rows([(2, "truncated")] * 20), lane_rows([(2, "truncated")] * 20)[1:]]
    for lane_index, lane in enumerate(lanes):
        lanes[lane_index] = [([obs[0] * 3 + obs[1], lane_index], flags, final) for obs, flags, final in lane]
    memory = ReplayMemory([ring_of_lanes(lanes)], 0)
    obs, _ = drawn(memory, 40_000)
    _, counts = np.unique(obs, axis=0, return_counts=True)
    mean = counts.sum() / len(counts)
    chi_squared, freedom = float(((counts - mean) ** 2 / mean).sum()), len(counts) - 1
    assert freedom > 70
    assert abs(chi_squared - freedom) < 4 * np.sqrt(2 * freedom)


def test_rings_count_in_proportion_to_what_they_hold():
    rings = [counting_ring(64, 1, 22), counting_ring(64, 2, 32), counting_ring(64, 1, 0), counting_ring(64, 1, 1)]
    sizes = np.array([21, 62, 0, 0])
    memory = ReplayMemory(rings, 0)
    assert memory.stored == sizes.sum()
    assert memory.inserted == 22 + 64 + 0 + 1
    for index, ring in enumerate(rings):
        ring.layout.view(ring.rows, "action")[:] = index
    batch = memory.sample(1, 20_000)
    counts = np.bincount(batch.action.flatten().int().numpy(), minlength=4)
    share = sizes / sizes.sum()
    np.testing.assert_array_less(np.abs(counts - 20_000 * share), 4 * np.sqrt(20_000 * share * (1 - share)) + 1e-9)
    assert batch.env_steps == memory.inserted
    np.testing.assert_array_equal(batch.next_obs[0, :, 0], batch.obs[0, :, 0] + 1)


def test_every_update_sees_all_rings():
    rings = [counting_ring(64), counting_ring(64)]
    for index, ring in enumerate(rings):
        ring.layout.view(ring.rows, "action")[:] = index
    batch = ReplayMemory(rings, 0).sample(4, 256)
    for update in range(4):
        assert 64 < int(batch.action[update].sum()) < 192


def test_a_side_table_that_is_being_written_is_not_trusted():
    lanes = [lane_rows([(1, "truncated")] * 12, same_step=True) for _ in range(2)]
    ring = ring_of_lanes(lanes, same_step=True, num_steps=24)
    oldest = ring.finals_written - ring.num_finals
    # The writer has filled the entries of both lanes, but not yet published their number.
    ring.finals[np.arange(oldest, oldest + 2) % ring.num_finals] = -1.0
    batch = ReplayMemory([ring], 0).sample(1, 2000)
    np.testing.assert_array_equal(batch.next_obs.numpy(), batch.obs.numpy() + [0, 1])


def test_states_lie_beside_the_observation_and_successors_are_observations_only():
    ring = LaneRing(RowLayout(2, 1, 3), 16, 1)
    for t in range(16):
        ring.slot()[:] = 0
        ring.layout.view(ring.slot(), "obs")[:] = t
        ring.layout.view(ring.slot(), "states")[:] = -t
        ring.publish()
    batch = ReplayMemory([ring], 0).sample(2, 50)
    np.testing.assert_array_equal(batch.field("states")[..., 0], -batch.obs[..., 0])
    assert batch.next_obs.shape == (2, 50, 2)


def overtaking(memory, monkeypatch, write, times=1):
    """Let ``write`` happen between a round's choice of rows and its copying of them; returns the list of rounds."""
    copy, rounds = memory._copy, []

    def overtaken(*args):
        rounds.append(args[0])
        if len(rounds) <= times:
            write()
        return copy(*args)

    monkeypatch.setattr(memory, "_copy", overtaken)
    return rounds


@pytest.mark.parametrize("steps_ahead, oldest, newest", [(2, 3, 14), (3, 4, 14), (6, 7, 14), (7, 9, 21), (16, 18, 30)])
def test_rows_overtaken_during_the_copy_are_drawn_anew(monkeypatch, steps_ahead, oldest, newest):
    ring = counting_ring(16)  # steps 2 to 14 are readable
    memory = ReplayMemory([ring], 0)
    overtaking(memory, monkeypatch, lambda: [write_step(ring, [[ring.head, 0]], [0]) for _ in range(steps_ahead)])
    obs, next_obs = drawn(memory, 500)
    # Up to the half of what was stored may get lost; else the call begins anew, with what has come since.
    assert set(obs[:, 0]) == set(range(oldest, newest + 1))
    np.testing.assert_array_equal(next_obs[:, 0], obs[:, 0] + 1)
    # Where nobody overtakes anything, the same draw gives the same rows.
    draw = memory.last_draw
    copy = ReplayMemory([counting_ring(16, written=draw.heads[0])], 0)
    np.testing.assert_array_equal(copy.sample(1, 500, script=draw).obs[0], obs)
    assert copy.last_draw == draw and (len(draw.checks) > 1) == (steps_ahead < 7)


def test_what_comes_during_a_call_waits_for_the_next(monkeypatch):
    rings = [counting_ring(32, 2), counting_ring(64, 1, written=10)]
    rings[0].layout.view(rings[0].rows, "flags")[1::2] = BORDER
    memory = ReplayMemory(rings, 0)
    before = memory.inserted

    def overtaken():  # the oldest rows of the one ring, so that the call needs two rounds; none of the other
        for t in range(32, 37):
            write_step(rings[0], [[t, lane] for lane in range(2)], [0, 0])
        for t in range(10, 20):
            write_step(rings[1], [[t, 0]], [0])

    overtaking(memory, monkeypatch, overtaken)
    batch = memory.sample(1, 2000)
    assert len(memory.last_draw.checks) > 1
    assert set(batch.obs[0, :, 0].tolist()) == set(range(6, 31, 2)) | set(range(9))
    assert batch.env_steps == before == memory.inserted - 20
    assert memory.last_draw.heads == (32, 10)
    assert memory.new_moments()[0] == 20


def test_a_sampler_that_is_overtaken_each_time_gives_up(monkeypatch):
    ring = counting_ring(16)
    memory = ReplayMemory([ring], 0)
    rounds = overtaking(memory, monkeypatch, lambda: [write_step(ring, [[0, 0]], [0]) for _ in range(16)], times=10**6)
    with pytest.raises(RuntimeError, match="too short"):
        memory.sample(1, 4)
    assert len(rounds) == 64


@pytest.mark.parametrize("steps_ahead, oldest", [(0, 12), (1, 12), (2, 13), (5, 16), (15, 26), (16, 26), (40, 26)])
def test_moments_do_without_rows_overtaken_during_the_copy(monkeypatch, steps_ahead, oldest):
    ring = counting_ring(16, 2, written=0)
    memory = ReplayMemory([ring], 0)
    for t in range(26):
        write_step(ring, [[t, 0], [t, 0]], [0, QUARANTINED if t % 5 == 0 else 0])
    flatnonzero, calls = np.flatnonzero, []

    def overtaken(fine):  # the writer runs ahead before the first of the two pieces is copied
        if not calls:
            for t in range(26, 26 + steps_ahead):
                write_step(ring, [[t, 0], [t, 0]], [0, 0])
        calls.append(len(fine))
        return flatnonzero(fine)

    monkeypatch.setattr(memory_module.np, "flatnonzero", overtaken)
    count, mean, _ = memory.new_moments()
    assert len(calls) == 2
    # Flags of the quarantined rows had been read when the writer came.
    expected = [t for t in range(oldest, 26) for lane in range(2) if lane == 0 or t % 5]
    assert count == len(expected)
    assert count == 0 or mean[0] == pytest.approx(np.mean(expected))
    count, mean, _ = memory.new_moments()  # nothing twice, nothing left behind
    expected = list(range(26 + max(0, steps_ahead - 14), 26 + steps_ahead))
    assert count == 2 * len(expected)
    assert count == 0 or mean[0] == pytest.approx(np.mean(expected))


def test_moments_count_every_row_once_over_wraps():
    rng, total = np.random.default_rng(0), RunningMoments(2)
    rings = [LaneRing(RowLayout(2, 1), 16, lanes) for lanes in (1, 3)]
    memory, seen = ReplayMemory(rings, 0), []
    for round_ in range(60):
        for ring in rings:
            for _ in range(int(rng.integers(0, 9))):
                obs = rng.normal([3.0, -100.0], [1.0, 7.0], (ring.num_lanes, 2)).astype(np.float32)
                sick = rng.random(ring.num_lanes) < 0.1
                write_step(ring, obs, np.where(sick, QUARANTINED, 0))
                seen.append(obs[~sick])
        total.update(memory.new_moments())
        assert float(total.count) == sum(map(len, seen)), round_
    exact = np.concatenate(seen).astype(np.float64)
    assert min(ring.head for ring in rings) > 3 * 16
    np.testing.assert_allclose(total.mean, exact.mean(0), rtol=1e-9)
    np.testing.assert_allclose(total.squares / total.count, exact.var(0), rtol=1e-9)
    assert memory.new_moments()[0] == 0.0


def test_moments_of_a_reader_that_was_away_are_those_of_what_is_left():
    ring = counting_ring(16, written=0)
    memory = ReplayMemory([ring], 0)
    for t in range(100):
        write_step(ring, [[t, 0]], [0])
    count, mean, _ = memory.new_moments()
    assert count == 16 - ring.guard
    assert mean[0] == np.arange(100 - 14, 100).mean()


def test_equal_seeds_draw_equal_rows():
    samples = [drawn(ReplayMemory([counting_ring(64, 4)], seed))[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(samples[0], samples[1])
    assert not np.array_equal(samples[0], samples[2])


@pytest.mark.parametrize("written", [0, 1])
def test_nothing_to_sample_yet(written):
    with pytest.raises(RuntimeError, match="nothing to sample yet"):
        ReplayMemory([counting_ring(16, written=written)], 0).sample(1, 4)


@pytest.mark.parametrize("flag, word", [(QUARANTINED, "quarantined"), (BORDER, "borders")])
def test_nothing_usable_is_said(flag, word):
    with pytest.raises(RuntimeError, match=word):
        ReplayMemory([counting_ring(16, flags=flag)], 0).sample(1, 4)


def test_rows_that_are_overtaken_while_they_are_noted_are_not_taken_for_unusable_ones(monkeypatch):
    ring = counting_ring(16, 2)
    memory, check, passes = ReplayMemory([ring], 0), memory_module._Progress.check_follow, []

    def overtaken(self, index):
        if len(passes) < 3:
            passes.append(index)
            for _ in range(2 * ring.num_steps):
                write_step(ring, [[ring.head, lane] for lane in range(2)], [0, 0])
        return check(self, index)

    monkeypatch.setattr(memory_module._Progress, "check_follow", overtaken)
    obs, next_obs = drawn(memory, 64)
    assert len(passes) == 3 and obs[:, 0].min() >= 6 * ring.num_steps
    np.testing.assert_array_equal(next_obs, obs + [1, 0])
