"""Stand-in for gym 0.23, which IsaacGymEnvs imports for its spaces only."""

from gym import spaces
from gym.spaces import Space

__version__ = "0.23.1"
__all__ = ["Space", "spaces"]
