"""Counts what autograd keeps of a layer on a device."""

from collections.abc import Iterable

import torch


class GraphBytes:
    """Counts what autograd keeps of a layer. ``pack`` and ``count`` are made for
    ``saved_tensors_hooks``.

    Storages count once and whole; the layer's own parameters do not. Holds the storages, because
    freed memory that is used again would look like a storage already counted.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._own = {_place(parameter.untyped_storage()) for parameter in parameters}
        self._kept: dict[int, torch.UntypedStorage] = {}

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())

    @property
    def largest_bytes(self) -> int:
        """The largest single one: the gradient of something that large passes through the layer's
        backward."""
        return max((storage.nbytes() for storage in self._kept.values()), default=0)

    def count(self, tensor: torch.Tensor) -> None:
        # Sparse ones have no storage; what they hold is not counted.
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if _place(storage) not in self._own:
            self._kept[_place(storage)] = storage

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts, and lets autograd keep the tensor. Without its node, which may be the one that
        keeps it: where no backward comes by, after a failure for example, that circle would never
        go."""
        self.count(tensor)
        return tensor.detach()


def _place(storage: torch.UntypedStorage) -> int:
    """Its address, or where there is no memory, on the meta device, that of torch's note of it."""
    return storage.data_ptr() or storage._cdata
