"""What the operating system and its control groups give this process: cores and host memory, and a
terminal.

Imports nothing of this package.
"""
