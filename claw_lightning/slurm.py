"""Jobs of SLURM that are interrupted and come back: where they were, and how they ask to be run again.

Lightning's own way stores from within a signal handler, amid an update and without the replay, into a file that the
next job in the same folder takes for its own. Here a job that is to make way ends orderly, as after any signal; a note
in the working directory, under the job's number and its command line, says where its last checkpoint is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

REQUEUE_SECONDS = 60.0  # that ``scontrol`` may take


def job_id() -> str | None:
    """Number of the job that this process belongs to; None outside of jobs, and in interactive ones."""
    if os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive") or "SLURM_NTASKS" not in os.environ:
        return None
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    return os.environ.get("SLURM_JOB_ID")


def requeue_signal(trainer: Any) -> int | None:
    """The signal before whose second part this job is to be requeued; None where that is not wanted."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    environment = getattr(getattr(trainer, "_accelerator_connector", None), "cluster_environment", None)
    if job_id() is None or not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal or signal.SIGUSR1


def _note() -> Path | None:
    job = job_id()
    # A job may run several commands, one after another.
    command = hashlib.sha256(json.dumps(sys.argv[1:]).encode()).hexdigest()[:8]
    return None if job is None else Path(f".slurm-{job}-{command}.json")


def remember(checkpoint: Path, requeued: bool = False) -> None:
    """Note where this job's last checkpoint is. Nothing outside of jobs; nothing that cannot be written ends a run."""
    path = _note()
    if path is None:
        return
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        aside.write_text(json.dumps({"checkpoint": str(checkpoint.resolve()), "requeued": requeued}))
        aside.replace(path)
    except OSError as error:
        log.warning("%s could not be written (%s); a requeued job would begin anew", path, error.strerror or error)


def forget() -> None:
    """The command has done its work: the same one begins anew."""
    path = _note()
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def last_checkpoint() -> Path | None:
    """Where a job that was requeued goes on; None in its first run."""
    path = _note()
    try:
        content = json.loads(path.read_text()) if path is not None else {}
        checkpoint, requeued = Path(content["checkpoint"]), bool(content["requeued"])
        restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return checkpoint if checkpoint.is_file() and (requeued or restarts > 0) else None


def requeue() -> bool:
    """Ask SLURM to run this job again; whether it will."""
    job = job_id()
    if job is None:
        return False
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=REQUEUE_SECONDS, check=False
        )
        reason = " ".join(done.stderr.split()) or f"status {done.returncode}"
        succeeded = done.returncode == 0
    except (OSError, subprocess.SubprocessError) as error:
        reason, succeeded = str(error), False
    if succeeded:
        log.info("job %s is requeued", job)
    else:
        log.error("job %s could not be requeued (scontrol: %s); go on by --ckpt_path last", job, reason)
    return succeeded
