"""Checkpoints and models whose weights are quantized: read as they are stored, and written.

May import `roundpipe`, not the trainers.
"""
