"""Callbacks shipped with claw-lightning; configurations may name them by class name alone."""

from callbacks.checkpoints import RunCheckpoint
from callbacks.curriculum import Curriculum
from callbacks.episode_log import EpisodeLog
from callbacks.episode_video import EpisodeVideo
from callbacks.novelty import NoveltyBonus
from callbacks.option_diagnostics import OptionDiagnostics
from callbacks.pipeline_throughput import PipelineThroughput
from callbacks.policy_publisher import PolicyPublisher
from callbacks.progress import TrainingProgress
from callbacks.q_range import QRange
from callbacks.rollout_writer import RolloutWriter
from callbacks.signals import OrderlyStop
from callbacks.staleness_monitor import StalenessMonitor
from callbacks.target_update import TargetUpdate
from callbacks.worker_health import WorkerHealth

__all__ = [
    "Curriculum",
    "EpisodeLog",
    "EpisodeVideo",
    "NoveltyBonus",
    "OptionDiagnostics",
    "OrderlyStop",
    "PipelineThroughput",
    "PolicyPublisher",
    "QRange",
    "RolloutWriter",
    "RunCheckpoint",
    "StalenessMonitor",
    "TargetUpdate",
    "TrainingProgress",
    "WorkerHealth",
]
