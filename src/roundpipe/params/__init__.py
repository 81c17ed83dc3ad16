"""The copies of every parameter: working (host), master (host), resident (device), and their
gradients.

Imports `kernels`, `memory`, `device` and what these may import.
"""
