"""Ctrl-C while ``python -m roundpipe`` loads its libraries, for seconds, ends it at once.

Python would print a traceback of whatever is being imported then. `__main__` hands Ctrl-C back.
"""

import signal
import sys

_NAMES = {"roundpipe", "-mroundpipe"}
# While -m looks for what to run, it is in the place of that file's path.
_is_command = sys.argv[:1] == ["-m"] and bool(_NAMES.intersection(sys.orig_argv))
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
