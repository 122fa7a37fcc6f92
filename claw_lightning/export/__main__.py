"""``python -m claw_lightning.export CHECKPOINT --output policy.onnx``, where only the wheel is installed."""

import sys

from claw_lightning.export.command import main

sys.exit(main())
