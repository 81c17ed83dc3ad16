"""The parts of a model that is no sequence: which they are, and what joins their engines to its own
code.

Imports what `engine` may import.
"""
