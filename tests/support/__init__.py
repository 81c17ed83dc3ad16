"""Helpers of the tests: models, oracles, devices, and ways to make things slow, fail or hang."""

from pathlib import Path

# What a process that a test starts needs on its path, so that it can import `tests` as pytest does.
ROOT = Path(__file__).parents[2]
