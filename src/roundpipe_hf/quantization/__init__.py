"""Checkpoints and models whose weights are quantized: read as they are stored, and written.

Imports `compat`, and `roundpipe` itself.
"""
