"""Errors that are the user's to mend: shown as one line, with the traceback in the log file only."""

from __future__ import annotations


class ClawError(Exception):
    """Base class; the message names the setting or file and the cure."""


class ConfigError(ClawError):
    """A setting cannot be used as given."""


class WorkerError(ClawError):
    """A worker process failed for good; the message carries its log's path."""


class UsageError(ClawError):
    """The command line or a configuration file does not parse; exit status 2."""


class RankError(ClawError):
    """Another rank of the run has failed, gone, or drifted away; the message names it."""
