"""Devices for tests that make a missing wait or a late copy fail every time.

Imports `device` and what that may import.
"""

from .adversarial import AdversarialDevice

__all__ = ["AdversarialDevice"]
