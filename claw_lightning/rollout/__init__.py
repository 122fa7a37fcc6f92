"""All that a worker process imports: Python >= 3.8, numpy >= 1.20 and torch >= 1.12, nothing else.

Nothing here imports from outside this folder, so that the worker can live in an older interpreter than the learner.
"""
