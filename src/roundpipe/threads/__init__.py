"""Worker threads, the mailbox they meet at, interrupts, and what else the interpreter does to
threads.

Imports `errors` and `trace`.
"""
