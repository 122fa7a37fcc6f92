"""Prefetcher: the next batch while the learner is busy with this one. Transfer: batches to a GPU beside its work.

Only draws run in the thread. Who may draw, and what a draw counts for, is decided by whoever asks for it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from claw_lightning.replay.batch import ReplayBatch

T = TypeVar("T")

#: In which a draw that was begun comes to its end, unless something is wrong.
CLOSE_SECONDS = 5.0


class Prefetcher(Generic[T]):
    """Draws one thing ahead, in one thread of its own.

    The thread is a daemon that starts with the first request: a process that never calls :meth:`close` ends all the
    same.

    Args:
        draw: called in the thread, once per request.

    Attributes:
        pending: whether something was asked for and not handed out, which stays so when drawing it failed.
    """

    def __init__(self, draw: Callable[[], T]) -> None:
        self._draw = draw
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.pending = False

    def request(self) -> None:
        """Have the next one drawn; returns at once.

        Raises:
            RuntimeError: the one before was not taken.
        """
        if self.pending:
            raise RuntimeError("a batch was drawn ahead already and not taken")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="replay-prefetch", daemon=True)
            self._thread.start()
        self.pending = True
        self._requests.put(True)

    def take(self, timeout: float) -> T | None:
        """What was asked for; None where it is not there after ``timeout`` seconds.

        Raises:
            BaseException: whatever drawing it raised, with its traceback of the thread; again at every call.
        """
        if self._error is None:
            try:
                result, self._error = self._results.get(timeout=timeout)
            except queue.Empty:
                return None
        if self._error is not None:
            raise self._error
        self.pending = False
        return result

    def close(self) -> None:
        """End the thread, but wait no longer than CLOSE_SECONDS for a draw to come to its end. Idempotent."""
        if self._thread is not None:
            self._requests.put(False)
            self._thread.join(CLOSE_SECONDS)
        self._thread = None

    def _run(self) -> None:
        while self._requests.get():
            try:
                self._results.put((self._draw(), None))
            except BaseException as error:
                self._results.put((None, error))


class Transfer:
    """Sends batches to a GPU on a stream of their own, so that the copies run beside the kernels of the learner.

    Draws of a replay on the GPU run on that stream as well: what a draw writes there, the next one finds.

    Args:
        device: of the learner.
        cuda: stands in for ``torch.cuda`` (streams and events) in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self._cuda = device, cuda
        self._stream = cuda.Stream(device=device)
        # Memory that the stream will write into may belong to kernels that were started before.
        self._stream.wait_stream(cuda.current_stream(device))

    def send(self, draw: Callable[[], ReplayBatch]) -> tuple[ReplayBatch, Any]:
        """Draw a batch and begin its copy; returns its tensors on the device and the event that ends the copy.

        From any thread, but one at a time. The page-locked copy may go at once: its allocator waits for the stream.
        """
        with self._cuda.stream(self._stream):
            batch = draw().pin_memory().to(self.device, non_blocking=True)
            event = self._cuda.Event()
            event.record(self._stream)
        return batch, event

    def receive(self, batch: ReplayBatch, event: Any) -> ReplayBatch:
        """Let the current stream wait for the copy (the host does not), and keep the memory until it has used it."""
        current = self._cuda.current_stream(self.device)
        current.wait_event(event)
        batch.record_stream(current)
        return batch
