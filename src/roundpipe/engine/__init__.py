"""What users hold: engines over sequences and over models in parts, their checkpoints, and
wrapping.

Imports every other room of this package.
"""
