"""One optimizer step: the thread that runs it, what it decides, and how weights are written back.

Imports `params`, `kernels`, `threads` and what these may import.
"""
