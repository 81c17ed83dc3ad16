"""Worker threads, interrupts, and what else the interpreter does to threads.

Imports `errors` and `trace`.
"""
