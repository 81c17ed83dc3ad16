"""The command line: ``python -m roundpipe plan MODEL``, ``doctor`` and others."""

import sys

if __name__ == "__main__":
    from .forecast.command import run

    sys.exit(run())
