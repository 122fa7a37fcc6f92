"""claw-lightning: off-policy option-critic for dexterous hands, collected in the background."""

__version__ = "0.1.0"
