"""Checkpoints made of what was trained: adapters merged into their base, and GGUF files.

Imports `folders`, `quantization`, `loading` and `compat`, and `roundpipe` itself.
"""
