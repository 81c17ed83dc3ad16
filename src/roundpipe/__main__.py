"""The command line: ``python -m roundpipe plan MODEL``, ``doctor`` and others."""

import signal
import sys

if __name__ == "__main__":
    from .forecast.command import run

    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see system/loading.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run())
