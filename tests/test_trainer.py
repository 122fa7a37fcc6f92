"""What make_trainer is given that is no callback."""

import pytest

import callbacks
from claw_lightning.errors import ConfigError
from claw_lightning.module import OptionCritic
from claw_lightning.trainer import make_trainer


@pytest.mark.parametrize(
    "chosen", ["TargetUpdate", ["TargetUpdate"], [callbacks.TargetUpdate], callbacks.TargetUpdate, [object()], [None]]
)
def test_what_is_no_callback_is_one_line(chosen):
    with pytest.raises(ConfigError, match=r"^make_trainer\(callbacks\): .* is no callback; give objects"):
        make_trainer(callbacks=chosen, logger=False)


def test_an_agent_before_there_are_networks_is_one_line():
    with pytest.raises(ConfigError, match="^agent\\(\\): the networks come with fit"):
        OptionCritic().agent()
