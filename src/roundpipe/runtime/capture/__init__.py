"""Layers whose kernels are recorded once and replayed.

Imports what `runtime` may import, and `runtime.stage`.
"""
