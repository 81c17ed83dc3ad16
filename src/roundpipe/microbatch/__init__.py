"""Cut a batch into microbatches and join their outputs again. Knows nothing of stages, devices or
threads.

Imports `errors`, `device` and torch.
"""

from .merge import merge
from .split import Microbatches, batch_size_of, refuse_packed, split

__all__ = ["Microbatches", "batch_size_of", "merge", "refuse_packed", "split"]
