"""What an adapter may do before torch is imported, in a process as users have it."""

import pytest

from claw_lightning.errors import WorkerError
from tests.builders import Rig

ADAPTER = """
import sys
BEFORE = "torch" in sys.modules  # when this file is imported
from claw_lightning.rollout.envs import CodedEnv, EnvError


class Early(CodedEnv):
    found = None

    @classmethod
    def import_first(cls, init_args):
        Early.found = (BEFORE, "torch" in sys.modules, init_args["mark"])
        if init_args["mark"] == "refuse":
            raise EnvError("mine: is missing; install it")
        if init_args["mark"] == "quit":
            sys.exit(0)

    def __init__(self, num_envs=1, seed=0, mark=""):
        super().__init__("coded", num_envs, seed)
        if self.found != (False, False, mark):
            raise EnvError("came too late: %s" % (self.found,))
"""


@pytest.fixture
def rig(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(ADAPTER)
    made = []

    def build(mark):
        made.append(Rig(tmp_path, "mine.Early", "describe", init_args={"mark": mark}))
        return made[-1]

    yield build
    for one in made:
        one.pool.close(grace=5.0)


def test_an_adapter_comes_before_torch(rig):
    rig = rig("x")
    rig.worker.start()
    rig.worker.wait(60.0)
    messages, _ = rig.worker.messages()
    assert [message["kind"] for message in messages] == ["ready"], rig.log_path.read_text()


@pytest.mark.parametrize(
    "mark, message", [("refuse", "mine: is missing; install it"), ("quit", "SystemExit: 0")]
)  # fmt: skip
def test_what_goes_wrong_there_is_told_as_any_other_error(rig, mark, message):
    with pytest.raises(WorkerError, match=message):
        rig(mark).pool.start()
