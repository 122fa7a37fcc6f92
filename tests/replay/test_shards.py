"""Replays of several ranks in one folder: found, dealt to any number of ranks, cleared by runs of another kind."""

import json
import shutil

import numpy as np
import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.replay.shards import RANKS, ReplayShare, clear_others, find_shards, mark_complete, shard_folder
from claw_lightning.replay.storage import DONE, save_replay
from claw_lightning.rollout.ring import BORDER, LaneRing
from tests.builders import lane_rows, ring_of_lanes

LANES, STEPS = 2, 12


def ring_of(rank):
    """Two lanes of one long episode each, whose observations tell rank, lane and step."""
    return ring_of_lanes([lane_rows([(STEPS, "terminated")] * (10 * rank + lane) + [(STEPS, "terminated")])[-STEPS:]
                          for lane in range(LANES)], num_steps=32)  # fmt: skip


def saved(folder, size, run="run"):
    for rank in range(size):
        save_replay([ring_of(rank)], shard_folder(folder, rank, size), run=run)
    mark_complete(folder, size, run)
    return find_shards(folder)


def held(rings):
    """Observations of all rows of episodes, as a sorted list."""
    found = []
    for ring in rings:
        rows = ring.rows[: ring.head].reshape(-1, ring.layout.words)
        inside = (ring.layout.view(rows, "flags") & BORDER) == 0
        found += [tuple(obs) for obs in ring.layout.view(rows, "obs")[inside].tolist()]
    return sorted(found)


@pytest.mark.parametrize("before, after", [(2, 2), (2, 1), (1, 2), (3, 2), (2, 3), (1, 4)])
def test_every_row_comes_to_one_rank(tmp_path, before, after):
    shards = saved(tmp_path, before)
    assert len(shards) == before
    wanted = held([ring_of(rank) for rank in range(before)])
    got, stored = [], 0
    for rank in range(after):
        share = ReplayShare(tmp_path, shards, rank, after)
        ring = LaneRing(shards[0].layout, 128, LANES)
        share.fill([ring])
        got += held([ring])
        stored += share.stored
    assert stored == pytest.approx(before * LANES * STEPS, abs=after)
    if after != 4:
        assert sorted(got) == wanted
    else:  # four ranks for two lanes: as many begin without experience
        assert sorted(got) == wanted and stored == LANES * STEPS


def test_as_many_ranks_get_their_own_bit_for_bit(tmp_path):
    shards = saved(tmp_path, 2)
    for rank in range(2):
        ring, before = LaneRing(shards[0].layout, 32, LANES), ring_of(rank)
        ReplayShare(tmp_path, shards, rank, 2).fill([ring])
        np.testing.assert_array_equal(ring.rows[:STEPS], before.rows[:STEPS])


def test_nothing_is_found_before_all_have_been_completed(tmp_path):
    save_replay([ring_of(0)], shard_folder(tmp_path, 0, 2), run="run")
    assert find_shards(tmp_path) == []


def test_a_rank_that_was_lost_is_left_out(tmp_path, caplog):
    saved(tmp_path, 2)
    (tmp_path / "rank_1" / DONE).unlink()
    assert [shard.folder.name for shard in find_shards(tmp_path)] == ["rank_0"]
    assert "1 of 2 ranks" in caplog.text


def test_replays_of_several_runs_are_refused(tmp_path):
    saved(tmp_path, 2)
    (tmp_path / RANKS).write_text(json.dumps({"ranks": 2, "run": "other"}))
    with pytest.raises(ConfigError, match="several runs"):
        find_shards(tmp_path)


def test_replays_of_different_moments_are_refused_with_what_to_remove(tmp_path, caplog):
    """As a rank leaves them that was killed: the other one has saved once more."""
    rings = [ring_of(rank) for rank in range(2)]
    for rank, moment in ((0, 40), (1, 39)):  # as after an error, a training step apart
        save_replay([rings[rank]], shard_folder(tmp_path, rank, 2), run="run", moment=moment)
    mark_complete(tmp_path, 2, "run")
    assert [shard.moment for shard in find_shards(tmp_path)] == [40, 39]
    save_replay([rings[0]], shard_folder(tmp_path, 0, 2), run="run", moment=60)
    with pytest.raises(ConfigError, match=r"rank_1 was saved at another moment .* remove it .*, or "):
        find_shards(tmp_path)
    shutil.rmtree(tmp_path / "rank_1")
    assert [shard.folder.name for shard in find_shards(tmp_path)] == ["rank_0"]
    assert "1 of 2 ranks" in caplog.text


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"ranks": "many", "run": 1}', '{"ranks": 0, "run": ""}'])
def test_a_mark_that_says_nothing_is_named(tmp_path, text):
    saved(tmp_path, 2)
    (tmp_path / RANKS).write_text(text)
    with pytest.raises(ConfigError, match="RANKS cannot be read; remove "):
        find_shards(tmp_path)


def test_a_run_of_another_kind_clears_what_it_would_be_mixed_with(tmp_path):
    (tmp_path / "own.txt").write_text("the user's")
    saved(tmp_path, 3)
    clear_others(tmp_path, 2, "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.txt", "rank_0", "rank_1"]
    mark_complete(tmp_path, 2, "run")
    clear_others(tmp_path, 2, "run")  # its own: everything stays
    assert len(find_shards(tmp_path)) == 2
    clear_others(tmp_path, 1, "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.txt"]
    saved(tmp_path, 1)
    clear_others(tmp_path, 2, "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own.txt"]
