"""Reading side of the experience: batches out of the workers' rings."""

from claw_lightning.replay.batch import ReplayBatch
from claw_lightning.replay.memory import ReplayMemory

__all__ = ["ReplayBatch", "ReplayMemory"]
