"""No hydra application around: never initialised."""


class HydraConfig:
    """Answers no."""

    @staticmethod
    def initialized() -> bool:
        """Whether a hydra application runs."""
        return False
