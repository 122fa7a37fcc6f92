"""No hydra application around: never initialised."""

from typing import Any


class HydraConfig:
    """Answers no."""

    @staticmethod
    def initialized() -> bool:
        """Whether a hydra application runs."""
        return False

    @staticmethod
    def get() -> Any:
        """Raises ValueError."""
        raise ValueError("HydraConfig was not set")
