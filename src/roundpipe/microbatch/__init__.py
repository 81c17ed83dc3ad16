"""Cut a batch into microbatches and join their outputs again. Knows nothing of stages, devices or threads."""

from .cut import Microbatches, batch_size_of, refuse_packed, split
from .join import merge

__all__ = ["Microbatches", "batch_size_of", "merge", "refuse_packed", "split"]
