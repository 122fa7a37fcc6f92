"""Export a trained policy to ONNX or torch.export, for use without this package.

    python scripts/export.py runs/version_0 --output policy.onnx
    python scripts/export.py runs/version_0/checkpoints/best.ckpt --output policy.pt2 --student

The same as ``python -m claw_lightning.export``, which an installed wheel has too. How such files are used is in
docs/export.md; scripts/examples/run_onnx.py is an example.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package need not be installed

from claw_lightning.export.command import main

if __name__ == "__main__":
    sys.exit(main())
