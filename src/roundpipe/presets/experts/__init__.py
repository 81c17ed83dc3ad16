"""Mixtures of experts, of any architecture: their routers' choices, their auxiliary losses, their
products in groups of tokens, and adapters of stacked weights.

Imports the other modules of `presets`, `recompute`, `device`, `microbatch` and `errors`.
"""
