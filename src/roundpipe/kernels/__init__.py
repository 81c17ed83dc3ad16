"""Kernels for the CPU and the GPU, each beside the plain torch code that it must agree with.

Imports `system`, `errors` and torch.
"""
