"""``python -m claw_lightning``: the command `lightning` under a name that no other package can take."""

from __future__ import annotations

import sys

from claw_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
