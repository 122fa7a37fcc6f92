"""Rings with random histories, and what a memory does with a sampler: follow, draw, draw anew what is unusable."""

import numpy as np

from claw_lightning.replay.samplers.base import Arrivals, Places, Stored
from claw_lightning.rollout.ring import BORDER, FIRST, QUARANTINED, SWITCHED, LaneRing, RowLayout, usable
from tests.builders import write_step

FLAGS = (0, 0, 0, 0, 0, SWITCHED, SWITCHED, FIRST | SWITCHED, BORDER, QUARANTINED)


class Driver:
    """Rings of ``shapes`` (vector steps, lanes) and a sampler that is bound to them."""

    def __init__(self, sampler, shapes=((32, 3),), num_options=4, seed=0):
        self.rings = [LaneRing(RowLayout(1, 1), steps, lanes) for steps, lanes in shapes]
        self.sampler, self.num_options = sampler, num_options
        self.rng = np.random.default_rng(seed)
        self.seen, self.updates = [0] * len(shapes), 0
        sampler.bind(self.rings, num_options)

    def write(self, ring, steps=1, flags=None, option=None, version=None):
        """Publish vector steps of random rows; what is given holds for all of them: [N] or a number."""
        layout, lanes = self.rings[ring].layout, self.rings[ring].num_lanes
        for _ in range(steps):
            write_step(self.rings[ring], 0.0, self.rng.choice(FLAGS, lanes) if flags is None else [flags] * lanes)
            rows = self.rings[ring].rows[(self.rings[ring].head - 1) % self.rings[ring].num_steps]
            layout.view(rows, "version")[:] = self.updates if version is None else version
            if option is None:  # the last ones are rare
                option_now = np.minimum(self.rng.geometric(0.6, lanes) - 1, self.num_options - 1)
            layout.view(rows, "option")[:] = option_now if option is None else option

    def field(self, ring, name, steps):
        """Field [S, N] of steps [S]."""
        ring = self.rings[ring]
        return ring.layout.view(ring.rows[steps % ring.num_steps], name).copy()

    def follow(self):
        for index, ring in enumerate(self.rings):
            first, last = max(self.seen[index], ring.readable()[0]), ring.readable()[1]
            self.seen[index] = last
            if self.sampler.follows and last > first:
                steps = np.arange(first, last)
                flags, option, version = (self.field(index, name, steps) for name in ("flags", "option", "version"))
                fine = usable(flags, self.field(index, "flags", steps + 1))
                self.sampler.follow(Arrivals(index, first, flags, fine, option, version))

    def stored(self):
        env_steps = sum(ring.head * ring.num_lanes for ring in self.rings)
        spans, lanes = [ring.readable() for ring in self.rings], [ring.num_lanes for ring in self.rings]
        return Stored(spans, lanes, env_steps, self.updates)

    def usable_rows(self):
        """All rows that may be learned from: Places with all of them, and their flags, options and versions [M]."""
        parts, fields = [], []
        for index, ring in enumerate(self.rings):
            steps = np.arange(*ring.readable())
            flags, option, version = (self.field(index, name, steps) for name in ("flags", "option", "version"))
            step, lane = np.nonzero(usable(flags, self.field(index, "flags", steps + 1)))
            parts.append(Places(np.full(len(step), index), steps[step], lane))
            fields.append([flags[step, lane], option[step, lane], version[step, lane]])
        return Places.join(parts), *(np.concatenate(each) for each in zip(*fields, strict=True))

    def draw(self, count, follow=True):
        """Places as a memory would draw them, all of them usable and within the spans."""
        if follow:
            self.follow()
        stored, parts, missing = self.stored(), [], count
        rows = self.usable_rows()[0]
        while missing:
            places = self.sampler.draw(stored, missing, self.rng)
            assert len(places.ring) == missing
            assert (np.diff(places.ring) >= 0).all()  # one ring after another
            spans = np.array(stored.spans)[places.ring]
            assert ((spans[:, 0] <= places.step) & (places.step < spans[:, 1])).all()
            assert ((places.lane >= 0) & (places.lane < np.array(stored.lanes)[places.ring])).all()
            parts.append(places.take(np.isin(key(places), key(rows))))
            missing -= len(parts[-1].ring)
        return Places.join(parts)


def key(places):
    """A number [M] per row."""
    return (places.ring * 1_000_000 + places.step) * 100 + places.lane


def wrapped(sampler, **options):
    """Driver with three rings that have wrapped, each at another head, with all kinds of rows."""
    driver = Driver(sampler, ((24, 3), (40, 1), (16, 2)), **options)
    for _ in range(31):  # followed bit by bit, as in a run
        for ring, steps in enumerate((3, 2, 1)):
            driver.write(ring, steps)
        driver.updates += 7
        driver.follow()
        driver.sampler.draw(driver.stored(), 5, driver.rng)
    return driver


def counted(places, rows):
    """How often each of the rows [M] was drawn [M]."""
    order = np.argsort(key(rows))
    found = order[np.searchsorted(key(rows)[order], key(places))]
    return np.bincount(found, minlength=len(order))


def check_frequencies(counts, probabilities):
    """Chi-squared test of drawn counts [M] at about four standard deviations; rare cells are put together."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert (counts[expected == 0] == 0).all()
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    rare = int((expected < 5).sum())
    if rare:
        begins = np.append(0, np.arange(rare, len(expected)))
        counts, expected = np.add.reduceat(counts, begins), np.add.reduceat(expected, begins)
    counts, expected = counts[expected > 1], expected[expected > 1]
    freedom = len(counts) - 1
    assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 4 * np.sqrt(2 * freedom) + 4
