"""RateLimiter: keeps learner and workers at a fixed number of samples per inserted step."""

from __future__ import annotations

from typing import Any


class RateLimiter:
    """Samples per inserted step (SPI), kept within a band (as in Reverb's SampleToInsertRatio).

    ``error = (inserted - warmup) * spi - sampled`` counts samples that are owed. The learner may draw n more while
    ``error >= n``; the workers may insert while ``error <= band``. Steps of the warm-up are not owed: with
    one update of 256 per step after 1,000 random steps, SPI is 256 and 20,000 steps give 19,000 updates, as in
    stable-baselines3.

    Args:
        samples_per_insert: SPI; batch size x updates / steps inserted.
        warmup: steps inserted before the first sample is drawn.
        band: samples that the workers may run ahead. At least one request of the learner plus one vector step of all
            workers, else both would wait for each other: smaller values are refused.
        request: samples that the learner draws at once.
        insert: steps that one vector step of all workers inserts.
        max_inserts: steps after which inserting ends; 0: never.
    """

    def __init__(
        self,
        samples_per_insert: float,
        warmup: int,
        request: int,
        insert: int,
        band: float | None = None,
        max_inserts: int = 0,
    ) -> None:
        if samples_per_insert <= 0:
            raise ValueError(f"data.samples_per_insert is {samples_per_insert}; it must be positive")
        smallest = request + insert * samples_per_insert
        self.band = 2.0 * smallest if band is None else band
        if self.band < smallest:
            raise ValueError(f"data.rate_band is {self.band:g} samples; learner and workers need at least {smallest:g}")
        self.samples_per_insert, self.warmup, self.max_inserts = samples_per_insert, warmup, max_inserts
        self.request = request
        self.inserted = 0
        self.sampled = 0

    @property
    def error(self) -> float:
        """Samples owed by the learner (negative: ahead)."""
        return (self.inserted - self.warmup) * self.samples_per_insert - self.sampled

    @property
    def can_sample(self) -> bool:
        """Whether the learner may draw its next request."""
        return self.inserted >= self.warmup and self.error >= self.request

    @property
    def finished(self) -> bool:
        """Whether all samples were drawn that the run's steps will ever pay for."""
        if self.max_inserts <= 0:
            return False
        return (self.max_inserts - self.warmup) * self.samples_per_insert - self.sampled < self.request

    @property
    def inserts_allowed(self) -> int:
        """Total steps up to which the workers may insert now."""
        allowed = self.warmup + int((self.sampled + self.band) / self.samples_per_insert)
        return min(allowed, self.max_inserts) if self.max_inserts > 0 else allowed

    @property
    def achieved(self) -> float:
        """Samples per inserted step so far; 0 during warm-up."""
        paid = self.inserted - self.warmup
        return self.sampled / paid if paid > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Counters, for a checkpoint."""
        counters = {"inserted": self.inserted, "sampled": self.sampled, "warmup": self.warmup}
        return {**counters, "samples_per_insert": self.samples_per_insert}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counters of :meth:`state_dict`.

        Samples drawn so far count as if they had been drawn at this SPI: what is owed stays what it was, and a run that
        goes on at another one neither makes up for the past in a burst nor waits until it has.
        """
        self.inserted, self.sampled, self.warmup = state["inserted"], state["sampled"], state["warmup"]
        before = state.get("samples_per_insert", self.samples_per_insert)
        if before != self.samples_per_insert:
            self.sampled += int((self.inserted - self.warmup) * (self.samples_per_insert - before))
            self.sampled = max(0, self.sampled)
