"""Mixture: shares, sources, and what is handed on to its samplers."""

import numpy as np
import pytest

from claw_lightning.errors import ConfigError
from claw_lightning.replay.samplers.base import Sampler, Uniform
from claw_lightning.replay.samplers.by_option import ByOption
from claw_lightning.replay.samplers.mixture import Mixture
from claw_lightning.replay.samplers.options import OptionSegments
from claw_lightning.replay.samplers.prioritized import Prioritized
from claw_lightning.replay.samplers.recent import Fresh, Recent
from claw_lightning.rollout.ring import BORDER
from tests.replay.samplers.driver import check_frequencies, counted, wrapped


def test_shares_and_frequencies():
    driver = wrapped(Mixture([Recent(60.0), Prioritized()], [3, 1]))
    rows = driver.usable_rows()[0]
    driver.sampler.update(rows._replace(source=np.ones(len(rows.ring), int)), np.linspace(0, 9, len(rows.ring)))
    places = driver.draw(60_000)
    assert np.bincount(places.source).tolist() == pytest.approx([45_000, 15_000], abs=1)
    newest = np.array([ring.readable()[1] for ring in driver.rings])[rows.ring] - 1
    recent, errors = np.exp2((rows.step - newest) * 6 / 60.0), (np.linspace(0, 9, len(rows.ring)) + 0.01) ** 0.6
    check_frequencies(counted(places, rows), 0.75 * recent / recent.sum() + 0.25 * errors / errors.sum())
    assert (places.weight[places.source == 0] == 1).all()
    assert (places.weight[places.source == 1] != 1).any()


def test_counts_are_exact_in_expectation():
    driver = wrapped(Mixture([Uniform(), Recent()], [0.93, 0.07]))
    sources = [driver.sampler.draw(driver.stored(), 3, driver.rng).source for _ in range(1000)]
    counts = np.array([(source == 1).sum() for source in sources])
    assert set(counts) == {0, 1}
    assert abs(counts.mean() - 0.21) < 4 * counts.std() / np.sqrt(len(counts))


def test_a_share_of_nearly_nothing():
    driver = wrapped(Mixture([Uniform(), Recent()], [1.0, 1e-300]))
    places = driver.draw(1000)
    assert len(places.ring) == 1000
    assert (places.source == 0).all()


def test_errors_go_to_the_sampler_that_chose_the_place():
    driver = wrapped(Mixture([Prioritized(), Uniform(), Prioritized(alpha=1.0)], [1, 1, 1]))
    first, _, third = driver.sampler.samplers
    rows = driver.usable_rows()[0]
    source = np.arange(len(rows.ring)) % 3
    driver.sampler.update(rows._replace(source=source), np.arange(len(rows.ring), dtype=np.float32))
    for sampler, index in ((first, 0), (third, 2)):
        slots = sampler._slots.slots(rows)[0]
        mine = source == index
        expected = (np.flatnonzero(mine) + 0.01) ** sampler.alpha
        np.testing.assert_allclose(sampler._tree.get(slots[mine]), expected, rtol=1e-6)
        assert (sampler._tree.get(slots[~mine]) == 1.0).all()
    with pytest.raises(ValueError, match="no source"):
        driver.sampler.update(rows, np.zeros(len(rows.ring)))
    driver.sampler.update(rows._replace(source=np.ones(len(rows.ring), int)), np.ones(len(rows.ring)))


def test_flags_are_those_of_its_samplers():
    class Segments(Sampler):
        needs_segments = True

    flags = ("follows", "wants_errors", "within_option", "needs_segments")
    for samplers, expected in (
        ([Uniform()], (False, False, False, False)),
        ([Uniform(), Fresh()], (True, False, False, False)),
        ([Prioritized(), Uniform()], (True, True, False, False)),
        ([Uniform(), Segments()], (True, False, False, True)),
        ([OptionSegments(), OptionSegments()], (True, False, True, True)),
    ):
        mixture = Mixture(samplers, [1] * len(samplers))
        assert tuple(getattr(mixture, name) for name in flags) == expected


def test_metrics_get_a_prefix_where_two_have_one_name():
    driver = wrapped(Mixture([Prioritized(), ByOption(), Prioritized(beta=1.0)], [1, 1, 2]), num_options=2)
    assert set(driver.sampler.metrics()) == {
        "replay/sampler_0/priority_max",
        "replay/sampler_0/beta",
        "replay/quota_0",
        "replay/quota_1",
        "replay/sampler_2/priority_max",
        "replay/sampler_2/beta",
    }
    assert driver.sampler.metrics()["replay/sampler_2/beta"] == 1.0
    alone = Mixture([Prioritized(), Uniform()], [1, 1])
    assert set(alone.metrics()) == {"replay/priority_max", "replay/beta"}


def test_state_is_that_of_its_samplers():
    mixture, other = (Mixture([Uniform(), Prioritized()], [1, 1]) for _ in range(2))
    mixture.samplers[1]._max_priority = 7.0
    assert mixture.state_dict() == {"samplers": [{}, {"max_priority": 7.0}]}
    other.load_state_dict(mixture.state_dict())
    assert other.samplers[1]._max_priority == 7.0
    with pytest.raises(
        ConfigError, match=r"^data\.sampler\.init_args\.samplers has 1 entries; .* use the same samplers"
    ):
        Mixture([Uniform()], [1]).load_state_dict(mixture.state_dict())


@pytest.mark.parametrize(
    "samplers, shares, message",
    [
        ([], [], r"samplers is empty; give at least one"),
        ([Uniform()], [1, 2], r"shares has 2 numbers for 1 samplers; give one share per sampler"),
        ([Uniform(), Recent()], [1, 0.0], r"shares\[1\] is 0\.0; it must be finite and above 0"),
        ([Uniform(), Recent()], [-1, 1], r"shares\[0\] is -1; it must be finite and above 0"),
        ([Uniform(), Recent()], [1, float("inf")], r"shares\[1\] is inf; it must be finite and above 0"),
        ([Mixture([Uniform()], [1])], [1], r"samplers holds a Mixture; list its samplers here"),
        ([OptionSegments(), Uniform()], [1, 1], r"samplers: OptionSegments ends segments .* mix samplers of one kind"),
    ],
)
def test_refused(samplers, shares, message):
    with pytest.raises(ConfigError, match=rf"^data\.sampler\.init_args\.{message}"):
        Mixture(samplers, shares)


def test_a_sampler_that_chooses_unusable_rows_only_has_an_end():
    driver = wrapped(Mixture([Recent(1e-6), Prioritized()], [1, 1]))
    for ring in range(3):
        driver.write(ring, 1, flags=BORDER)
        driver.write(ring, 1, flags=0)
    driver.follow()
    with pytest.raises(RuntimeError, match=r"^replay: 5 samples of Recent could not be drawn"):
        driver.sampler.draw(driver.stored(), 10, driver.rng)


def test_steps_that_were_never_seen_are_not_usable():
    driver = wrapped(Mixture([Uniform(), Prioritized()], [1, 1]))
    driver.write(0, 100)
    rows = driver.usable_rows()[0]
    check_frequencies(counted(driver.draw(20_000), rows), np.ones(len(rows.ring)))
