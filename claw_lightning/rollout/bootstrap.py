"""Start a worker in any interpreter without putting this package's neighbours on its import path.

Run by file name: ``<python> .../claw_lightning/rollout/bootstrap.py``. Where the learner's package lies in
site-packages, a PYTHONPATH that led there would hand a Python 3.8 worker the learner's own numpy and torch.
"""

import os
import signal
import sys
import types

if __name__ == "__main__":
    # Sent to all processes of a run at its end, as Ctrl-C is; SIGUSR1 by SLURM before that. The learner decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    here = os.path.dirname(os.path.abspath(__file__))
    # A script's folder comes first on the path; this one's file names would hide others' modules.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    package = types.ModuleType("claw_lightning")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["claw_lightning"] = package
    if sys.version_info < (3, 8):
        sys.exit(
            "workers need Python 3.8 or newer with numpy and torch; data.worker_python is " + sys.version.split()[0]
        )

    # Before anything slow is imported: from here on the kernel ends this process with the learner (Linux).
    from claw_lightning.rollout.parent import follow_parent

    follow_parent()
    from claw_lightning.rollout import launch

    lines, settings = launch.take_settings()
    try:
        import numpy  # noqa: F401  (told apart from an adapter that cannot be imported)

        failure = launch.import_first(settings)
        from claw_lightning.rollout.worker import run_and_exit
    except ImportError as error:
        sys.exit("workers need numpy and torch in data.worker_python (%s): %s" % (sys.executable, error))

    run_and_exit(lines, settings, failure)
