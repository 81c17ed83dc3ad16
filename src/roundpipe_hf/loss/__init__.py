"""A Trainer's loss: what is known of how it reduces its rows, and the two ways it runs.

Imports `engine` and what that may import.
"""
