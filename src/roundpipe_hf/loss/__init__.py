"""A Trainer's loss over microbatches: what it is given for the model, and how its parts add up.

Imports `engine` and what that may import.
"""
