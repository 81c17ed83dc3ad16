"""What the operating system and its control groups give this process: cores, host memory and disk,
and a terminal.

Imports nothing of this package.
"""
