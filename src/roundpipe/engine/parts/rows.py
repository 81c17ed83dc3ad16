"""A part may cut its inputs along their first dimension only if that is known to be the batch.

[Note: rows] The model's own code may put anything first: tokens of all rows together, or the
sequence, of which no part can be left out. What is known is how many rows the model was called
with. A first dimension of another length is not the batch. One of that length may still be
something else where the second is as long: a sequence of as many tokens as there are rows looks
like its transpose. If it is as long as a microbatch has rows, what the part returns may look like
its transpose. Some cases are clear all the same: the last dimension of floating-point numbers are
features; what convolutions over two or three dimensions take has the batch first; and torch's own
modules that compute each row for itself may be cut along whatever it is. All that is not clear runs
whole, which is always right. So does what is clearly given rows second: it would not be cut.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...microbatch import batch_size_of
from ...microbatch.packed import RoundPipePackedData

_log = logging.getLogger("roundpipe")
_IS_PLAIN = "the first dimension of its inputs is not as long as the batch has rows"
_ROW_BY_ROW = (nn.Linear, nn.Embedding, nn.LayerNorm)
_OVER_IMAGES = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)


class PartInputs:
    """Tells of a part's inputs what its layers say. ``name`` is the part's, for the log."""

    def __init__(self, name: str, layers: Sequence[nn.Module]) -> None:
        self.name = name
        self._is_row_by_row = all(type(layer) in _ROW_BY_ROW for layer in layers)
        modules = [module for layer in layers for module in layer.modules()]
        self._of_images = {
            len(module.kernel_size) + 2 for module in modules if isinstance(module, _OVER_IMAGES)
        }

    def may_have_rows_second(self, tensor: torch.Tensor) -> bool:
        """Says by the number of its dimensions whether the second may be its batch."""
        if self._is_row_by_row or tensor.dim() in self._of_images:
            return False
        return tensor.dim() - tensor.is_floating_point() > 1


class BatchRows:
    """The rows of the batch that a model in parts was called with. Used by the caller's thread.

    ``count``: how many, None if the model was given no tensor that has any. ``name``: of the
    engine, for the log.
    """

    def __init__(self, name: str) -> None:
        self.count: int | None = None
        self._name = name
        self._told: set[str] = set()

    def why_whole(
        self, part: PartInputs, args: tuple[Any, ...], kwargs: dict[str, Any], num_microbatch: int
    ) -> str | None:
        """Why the inputs of ``part`` are not to be cut into so many; None where they may be. See
        [Note: rows]."""
        leaves = pytree.tree_leaves((args, kwargs))
        first = batch_size_of(args, kwargs)
        by_kind = any(self._has_rows_second(part, leaf) for leaf in leaves)
        if any(isinstance(leaf, RoundPipePackedData) for leaf in leaves) or first in (None, 1):
            return _IS_PLAIN if by_kind else None  # because it is cut already, or cannot be
        if self.count is None:
            return "the model was called with no tensor whose rows could be counted"
        if first != self.count:
            return _IS_PLAIN
        of_microbatches = {first // num_microbatch, -(-first // num_microbatch)}
        lengths = {first, *of_microbatches} - {0, 1}
        if any(
            isinstance(leaf, torch.Tensor)
            and leaf.shape[:1] == (first,)
            and part.may_have_rows_second(leaf)
            and leaf.shape[1] in lengths
            for leaf in leaves
        ):
            return "the second dimension of an input is as long as the batch or a microbatch"
        return _IS_PLAIN if by_kind else None

    def _has_rows_second(self, part: PartInputs, leaf: Any) -> bool:
        """Says if each microbatch would get all rows of it, as of position ids of three kinds."""
        return (
            isinstance(leaf, torch.Tensor)
            and leaf.dim() > 1
            and leaf.shape[0] != self.count != 1
            and leaf.shape[1] == self.count
            and part.may_have_rows_second(leaf)
        )

    def tell(self, part: PartInputs, why: str) -> None:
        """Logs once for each reason that ``part``, the first of possibly many, runs whole."""
        if why not in self._told:
            self._told.add(why)
            _log.log(
                logging.INFO if why == _IS_PLAIN else logging.WARNING,
                "%s: %s runs as one microbatch, as do other parts like it, because %s; if the "
                "first dimension of its inputs is the batch, set num_microbatch for it in "
                "override_config",
                self._name,
                part.name,
                why,
            )
