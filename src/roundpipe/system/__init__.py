"""What the operating system and its control groups give this process: cores and host memory.

Imports nothing of this package.
"""
