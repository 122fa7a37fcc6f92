"""Moving averages over finished episodes."""

import json
import math

from claw_lightning.metrics import EpisodeStatistics
from claw_lightning.rollout.collector import Episode


def test_nothing_before_the_first_episode():
    assert EpisodeStatistics().compute() == {}


def test_averages_over_the_window_but_counts_all():
    statistics = EpisodeStatistics(window=2)
    statistics.add([Episode(-100.0, 1, 0.0), Episode(1.0, 10, 1.0), Episode(3.0, 20, 0.0)])
    assert statistics.compute() == {
        "rollout/return": 2.0,
        "rollout/length": 15.0,
        "rollout/episodes": 3.0,
        "rollout/success": 0.5,
    }


def test_a_task_without_success_logs_none():
    statistics = EpisodeStatistics()
    statistics.add([Episode(1.0, 5, math.nan)])
    assert "rollout/success" not in statistics.compute()


def test_state_is_plain_and_comes_back():
    statistics, other = EpisodeStatistics(), EpisodeStatistics()
    statistics.add([Episode(1.0, 5, 1.0), Episode(2.0, 6, 0.0)])
    other.add([Episode(9.0, 9, 0.0)])
    other.load_state_dict(json.loads(json.dumps(statistics.state_dict())))
    assert other.compute() == statistics.compute()


def test_listeners_hear_of_all_episodes_after_they_were_counted():
    statistics, heard = EpisodeStatistics(), []
    statistics.listeners.append(lambda episodes: heard.append((statistics.total, episodes)))
    first, second = Episode(1.0, 5, 1.0), Episode(math.nan, 6, 0.0)
    statistics.add(e for e in (first, second))
    statistics.add([])
    assert heard == [(2, [first, second])]
    assert set(statistics.state_dict()) == {"recent", "total"}
