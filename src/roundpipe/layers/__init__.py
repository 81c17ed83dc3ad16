"""How a module is seen while a stage runs: replicas, their parameters and buffers, snapshots,
compiled forwards.

Imports `transfer`, `recompute`, `params` and what these may import.
"""
