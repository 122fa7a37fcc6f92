"""OrderlyStop inside one process; tests/test_exit.py looks at whole runs."""

import os
import signal

import pytest

from callbacks import OrderlyStop
from claw_lightning.hooks import UpdateCallback
from tests.runs import fit_lockstep


class Signal(UpdateCallback):
    """Sends a signal to this process at an update."""

    def __init__(self, number):
        self.number = number

    def on_update_end(self, trainer, module):
        if module.updates == 21:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_after_the_step_and_handlers_come_back(tmp_path, number, capfd):
    before = signal.getsignal(number)
    stop = OrderlyStop()
    trainer, module, data = fit_lockstep(tmp_path, callbacks=[stop, Signal(number)])
    assert stop.received == number
    # The step of two updates was finished, and no evaluation played.
    assert module.updates == 22 and not data.finished
    assert "val/return" not in trainer.callback_metrics
    assert signal.getsignal(number) == before
    err = capfd.readouterr().err
    assert f"{number.name}: stopping after this step" in err


def test_handlers_come_back_after_an_error_too(tmp_path):
    class Broken(UpdateCallback):
        def on_update_end(self, trainer, module):
            raise RuntimeError("broken")

    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with pytest.raises(RuntimeError, match="broken"):
            fit_lockstep(tmp_path, callbacks=[OrderlyStop(), Broken()])
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
