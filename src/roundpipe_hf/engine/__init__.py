"""A Trainer's engine: made, called, stepped and refused as Trainer's arguments ask.

Imports `arguments`, `compat` and `errors`.
"""
