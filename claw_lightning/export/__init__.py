"""A trained policy as a file that needs nothing of this package: ONNX, or torch.export's ``.pt2``.

``graph.py`` is what is exported, ``files.py`` writes it, ``check.py`` plays the file against the agent, ``alone.py``
is the program that plays it without this package, ``command.py`` the command around them. docs/export.md says how files
are used.
"""

from claw_lightning.export.command import Exported, export_checkpoint
from claw_lightning.export.graph import PolicyGraph

__all__ = ["Exported", "PolicyGraph", "export_checkpoint"]
