"""Reading side of the experience: batches out of the workers' rings."""

from claw_lightning.replay.batch import ReplayBatch
from claw_lightning.replay.hindsight import Hindsight, Relabeller
from claw_lightning.replay.memory import ReplayMemory
from claw_lightning.replay.samplers import Sampler

__all__ = ["Hindsight", "Relabeller", "ReplayBatch", "ReplayMemory", "Sampler"]
