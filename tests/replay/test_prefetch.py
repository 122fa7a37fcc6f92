"""Batches drawn ahead: one, in a thread, at exactly the rate of a run without; and their way to a GPU, by fakes."""

import threading
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from claw_lightning.errors import ConfigError
from claw_lightning.replay import ReplayBatch, ReplayMemory
from claw_lightning.replay.prefetch import Prefetcher, Transfer
from claw_lightning.replay.samplers import Prioritized, Uniform
from claw_lightning.rollout.ring import LaneRing, RowLayout
from tests.builders import PATIENCE, write_step
from tests.runs import make_batch, make_data

NUM_LANES = 4


class Crew:
    """Stands in for the pool: workers that take all steps they may take, whenever somebody looks at them."""

    alive, restarts, recycled = 2, 0, 0

    def __init__(self, rings):
        self.workers = [_Hand(ring) for ring in rings]
        self.looks = 0

    def is_lost(self, worker):
        return False

    def poll(self):
        self.looks += 1
        for worker in self.workers:
            while worker.head < worker.control.steps_allowed:
                write_step(worker.ring, [[worker.head, lane] for lane in range(NUM_LANES)], [0] * NUM_LANES)

    def close(self):
        pass


class _Hand:
    def __init__(self, ring):
        self.ring, self.control = ring, SimpleNamespace(steps_allowed=0)
        self.is_placed, self.pid = True, None

    @property
    def head(self):
        return self.ring.head


def run_of(sampler=None, **settings):
    """Data module with such workers, as :meth:`start_workers` leaves it."""
    data = make_data(**{"mode": "overlapped", "num_workers": 2, "sampler": sampler, **settings})
    rings = [LaneRing(RowLayout(2, 1), data.ring_steps, NUM_LANES) for _ in range(2)]
    module = SimpleNamespace(updates=0)
    data.trainer = SimpleNamespace(lightning_module=module, should_stop=False)
    data.memory, data.pool = ReplayMemory(rings, 0, data.sampler), Crew(rings)
    if data.prefetch:
        data._prefetcher = Prefetcher(data._draw)
    return data, module


def learn(data, module, steps=10**9):
    """As a training step does: updates, priorities, and the end once all is learned. Returns batches learned from."""
    batches = []
    while len(batches) < steps and (batch := data.next_batch()) is not None:
        limiter = data.limiter
        assert 0 <= limiter.error <= limiter.band
        module.updates += data.updates_per_step
        assert data.state_dict()["limiter"]["sampled"] == module.updates * data.batch_size
        if batch.places is not None:
            data.update_priorities(batch.places, torch.rand(data.updates_per_step, data.batch_size))
        batches.append(batch)
        if data.finished:
            break
    return batches


@pytest.mark.parametrize("sampler", [Uniform, Prioritized])
@pytest.mark.parametrize("spi, rate_band", [(8, None), (8, 96), (0.9, None), (37, None)])
def test_a_run_learns_and_collects_the_same_numbers(spi, rate_band, sampler):
    found = []
    for prefetch in (False, True):
        settings = {"samples_per_insert": spi, "rate_band": rate_band, "max_env_steps": 200}
        data, module = run_of(sampler(), prefetch=prefetch, **settings)
        batches = learn(data, module)
        assert data.finished and data.next_batch() is None and data.trainer.should_stop
        assert not prefetch or not data._prefetcher.pending
        found.append((len(batches), data.limiter.sampled, data.env_steps, data.limiter.achieved, batches[-1].env_steps))
        assert data.limiter.sampled == len(batches) * 32 == int(100 * spi / 32) * 32
        steps = [batch.env_steps for batch in batches]
        assert steps == sorted(steps) and all((k + 1) * 32 <= (n - 100) * spi for k, n in enumerate(steps))
        data.close()
    assert found[0][:2] == found[1][:2] and found[1][2] <= 200


def test_every_observation_is_counted_once():
    data, module = run_of(prefetch=True)
    batches = learn(data, module)
    assert sum(batch.moments[0] for batch in batches) == batches[-1].env_steps
    data.close()


def test_one_batch_is_drawn_ahead_and_in_another_thread(monkeypatch):
    data, module = run_of(prefetch=True)
    threads, ahead, sample = [], threading.Event(), data.memory.sample

    def drawn(*arguments):
        batch = sample(*arguments)
        threads.append(threading.current_thread())
        if len(threads) == 2:
            ahead.set()
        return batch

    monkeypatch.setattr(data.memory, "sample", drawn)
    (batch,) = learn(data, module, steps=1)
    assert ahead.wait(PATIENCE), "nobody draws the second batch while the first one is learned from"
    assert threads[0] is threading.main_thread() and threads[1] is not threads[0]
    assert data.limiter.sampled == 2 * len(batch) * data.batch_size
    assert data._prefetcher.pending
    learn(data, module)
    assert len(set(threads[1:])) <= 2  # the one thread, and the learner's where nothing was allowed ahead
    thread = threads[1]
    data.close()
    assert not thread.is_alive()


def test_nothing_is_drawn_ahead_that_the_rate_does_not_allow():
    data, module = run_of(prefetch=True, samples_per_insert=1, rate_band=40)  # a request is 32, a vector step 8
    data.next_batch()
    assert not data._prefetcher.pending and data.limiter.error < 32
    data.close()


class Held(Uniform):
    """Its draws in the thread wait until they are let go, and then may fail."""

    wants_errors = True

    def __init__(self, fails=False):
        self.order, self.fails = [], fails
        self.entered, self.go = threading.Event(), threading.Event()

    def draw(self, stored, count, rng):
        if threading.current_thread() is not threading.main_thread():
            self.entered.set()
            assert self.go.wait(PATIENCE)
            if self.fails:
                raise OSError("the disk of the rings is gone")
        self.order.append("draw")
        return super().draw(stored, count, rng)

    def update(self, places, errors):
        self.order.append("update")


def test_priorities_wait_for_the_draw():
    data, module = run_of(Held(), prefetch=True)
    batch, sampler = data.next_batch(), data.sampler
    assert sampler.entered.wait(PATIENCE)
    update = threading.Thread(target=data.update_priorities, args=(batch.places, torch.zeros(2, 16)))
    update.start()
    update.join(0.1)
    assert sampler.order == ["draw"] and update.is_alive()
    sampler.go.set()
    update.join(PATIENCE)
    assert sampler.order == ["draw", "draw", "update"]
    data.close()


def test_an_error_of_the_thread_reaches_the_learner_with_its_traceback():
    data, module = run_of(Held(fails=True), prefetch=True)
    data.next_batch()
    data.sampler.go.set()
    for _ in range(2):
        with pytest.raises(OSError, match="disk of the rings") as error:
            data.next_batch()
        names = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
        assert names[-1] == "draw" and "_run" in names and "next_batch" in names
    assert data.state_dict()["limiter"]["sampled"] == 32  # what was drawn in vain was not learned from
    data.close()
    assert data.limiter.sampled == 32


@pytest.mark.parametrize("how", ["stop", "close"])
def test_a_batch_that_nobody_learns_from_is_not_counted(how):
    data, module = run_of(prefetch=True)
    learned = learn(data, module, steps=3)
    assert data._prefetcher.pending and data.limiter.sampled == 4 * 32
    if how == "stop":
        data.stop_requested = lambda: True
        assert data.next_batch() is None and data.trainer.should_stop
    assert data.state_dict()["limiter"]["sampled"] == len(learned) * 32 == 96
    data.close()
    assert data.limiter.sampled == 96 == data.state_dict()["limiter"]["sampled"]
    data.close()
    assert data.limiter.sampled == 96


def test_a_draw_that_does_not_end_holds_up_nobody(monkeypatch):
    for room in ("claw_lightning.data", "claw_lightning.replay.prefetch"):
        monkeypatch.setattr(f"{room}.CLOSE_SECONDS", 0.01)
    data, module = run_of(Held(), prefetch=True)
    data.next_batch()
    assert data.sampler.entered.wait(PATIENCE)
    prefetcher, looks = data._prefetcher, data.pool.looks
    data.stop_requested = lambda: data.pool.looks > looks + 1  # workers are looked after while it is waited for
    assert data.next_batch() is None
    assert data.state_dict()["limiter"]["sampled"] == 32
    thread = prefetcher._thread
    assert thread.daemon
    data.close()
    assert thread.is_alive() and data._prefetcher is None
    data.sampler.go.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_only_one_is_drawn_ahead():
    prefetcher = Prefetcher(lambda: 1)
    prefetcher.request()
    with pytest.raises(RuntimeError, match="not taken"):
        prefetcher.request()
    assert prefetcher.take(PATIENCE) == 1 and not prefetcher.pending
    prefetcher.close()
    prefetcher.close()


@pytest.mark.parametrize(
    "settings, key",
    [({"mode": "lockstep"}, "data.mode lockstep"), ({"record_events": True}, "data.record_events"),
     ({"replay_events": "events.jsonl"}, "data.replay_events")],
)  # fmt: skip
def test_runs_that_repeat_by_their_order_are_not_drawn_ahead(settings, key):
    settings = {"mode": "overlapped", **settings}
    with pytest.raises(ConfigError, match=f"data.prefetch does not go with {key}") as error:
        make_data(prefetch=True, **settings)
    assert "\n" not in str(error.value)
    for device in ("cpu", "cuda"):
        assert not make_data(**settings)._prefetches(torch.device(device))


def test_without_a_word_only_a_gpu_prefetches():
    data = make_data(mode="overlapped")
    assert data._prefetches(torch.device("cuda", 0)) and not data._prefetches(torch.device("cpu"))
    assert not make_data(mode="overlapped", prefetch=False)._prefetches(torch.device("cuda", 0))


# -- to a GPU, without one ----------------------------------------------------------------------------------------


class FakeCuda:
    """Streams and events that write down what they are told, in place of ``torch.cuda``."""

    def __init__(self):
        self.calls, self.used = [], "main"

    def Stream(self, device):
        return _FakeStream(self, "side")

    def Event(self):
        return SimpleNamespace(record=lambda stream: self.calls.append(f"event on {stream.name}"))

    def current_stream(self, device):
        return _FakeStream(self, "main")

    def stream(self, stream):
        return stream


class _FakeStream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def __enter__(self):
        self.cuda.used = self.name

    def __exit__(self, *_):
        self.cuda.used = "main"

    def wait_stream(self, other):
        self.cuda.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.cuda.calls.append(f"{self.name} waits for the event")


def test_a_batch_is_copied_on_a_stream_of_its_own_that_the_learner_waits_for(monkeypatch):
    cuda = FakeCuda()
    transfer = Transfer(torch.device("cpu"), cuda)
    monkeypatch.setattr(ReplayBatch, "pin_memory", lambda batch: cuda.calls.append(f"pin on {cuda.used}") or batch)
    monkeypatch.setattr(
        ReplayBatch, "to", lambda batch, device, non_blocking: cuda.calls.append(f"copy on {cuda.used}") or batch
    )
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: cuda.calls.append(f"kept for {stream.name}")
    )
    whole = make_batch()
    batch, event = transfer.send(lambda: cuda.calls.append(f"draw on {cuda.used}") or whole)
    assert cuda.used == "main"
    assert transfer.receive(batch, event) is whole
    assert cuda.calls == [
        "side waits for main", "draw on side", "pin on side", "copy on side", "event on side",
        "main waits for the event", *["kept for main"] * len(whole.tensors()),
    ]  # fmt: skip


def test_batches_go_through_the_transfer_in_both_threads(monkeypatch):
    data, module = run_of(prefetch=True)
    sent, received = [], []

    def send(draw):
        sent.append(threading.current_thread())
        return draw(), len(sent)

    data._transfer = SimpleNamespace(send=send, receive=lambda batch, event: received.append(event) or batch)
    batches = learn(data, module)
    assert received == list(range(1, len(batches) + 1))
    assert len(set(sent)) == 2
    data.close()


def test_tensors_of_a_batch():
    batch = make_batch()
    assert batch.to("cpu") is batch.to(torch.device("cpu"), non_blocking=True) is batch
    batch.weights = torch.ones(2, 8)
    batch.places = np.arange(3)
    moved = batch.to("meta")
    assert moved is not batch and moved.places is batch.places and moved.env_steps == batch.env_steps
    assert [tensor.device.type for tensor in moved.tensors()] == ["meta"] * 3
