"""Signals before and after a run; in between they belong to the callback OrderlyStop."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import threading
import time
from typing import Any

#: Seconds within which SIGTERM or SIGHUP again is the same request: schedulers and closing terminals repeat themselves.
SAME_REQUEST_SECONDS = 1.0


class Interrupted(BaseException):
    """A signal before the run began. No KeyboardInterrupt: Lightning answers that with an exit status of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StartUpSignals:
    """Answers signals until the run's own callback (OrderlyStop) takes them, and after it has given them back.

    First signal: unwind, which ends what was started. Second one (as OrderlyStop has it): end at once, exit status 1.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: int | None = None
        self._received_at = 0.0
        self._raises = True
        self._previous: dict[int, Any] = {}

    def __call__(self, number: int, frame: Any) -> None:
        """The handler."""
        if number == signal.SIGHUP:
            release_closed_streams()
        now = time.monotonic()
        if self.received is not None:
            if number == signal.SIGINT or now - self._received_at > SAME_REQUEST_SECONDS:
                os._exit(1)
            return
        self.received, self._received_at = number, now
        if self._raises:
            raise Interrupted(number)

    def stand_by(self) -> None:
        """The run has begun: from now on a first signal is only noted, as what follows is the end in any case."""
        self._raises = False

    def __enter__(self) -> StartUpSignals:
        """Take the signals; SIGHUP not where the process was started to ignore it (``nohup``)."""
        if threading.current_thread() is threading.main_thread():
            for number in self.NUMBERS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self)
        return self

    def __exit__(self, *error: object) -> None:
        """Give them back. Once one was received, more of them find the process ending: it then just dies of them."""
        for number, handler in self._previous.items():
            is_default = handler is None or self.received is not None
            signal.signal(number, signal.SIG_DFL if is_default else handler)


def release_closed_streams() -> None:
    """After a hang-up, let output that nobody can receive go nowhere instead of raising wherever it is written."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            poll = select.poll()
            poll.register(number, 0)
            is_closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
            # Who reads a pipe (tee) is about to be ended by the same hang-up.
            if is_closed or stat.S_ISFIFO(os.fstat(number).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
