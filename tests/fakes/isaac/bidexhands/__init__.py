"""Stand-in for Bi-DexHands; running this file needs what few workers have."""

import matplotlib.pyplot  # noqa: F401
