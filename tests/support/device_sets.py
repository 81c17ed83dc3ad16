"""The devices tests run on, and how closely each kind has to agree with plain PyTorch. Knows
nothing of the engine but its devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from roundpipe import virtual


@dataclass(frozen=True, kw_only=True)
class DeviceSet:
    """Some devices of one kind. Virtual devices compute with the oracle's own kernels, a GPU does
    not."""

    kind: Literal["virtual", "cuda"]
    count: int

    def __str__(self) -> str:
        return f"{self.kind}{self.count}"

    @property
    def argument(self) -> list[torch.device]:
        """What RoundPipe's `devices` takes."""
        return (
            virtual(self.count)
            if self.kind == "virtual"
            else [torch.device("cuda", i) for i in range(self.count)]
        )

    def check(
        self,
        actual: Tensor | Mapping[str, Tensor],
        expected: Tensor | Mapping[str, Tensor],
        *,
        bitwise: bool = True,
    ) -> None:
        """Compare tensors, or dictionaries of them (the same names in both).

        `bitwise` says that the order of operations is the same as the oracle's: equal to the bit on
        virtual devices. Otherwise, and always on a GPU (whose kernels sum in another order: fp32
        noise grows to a few 1e-6 over six steps), to a tolerance.
        """
        if isinstance(actual, Tensor) and isinstance(expected, Tensor):
            actual, expected = {"value": actual}, {"value": expected}
        assert isinstance(actual, Mapping), f"got {actual!r}"
        assert isinstance(expected, Mapping)
        assert sorted(actual) == sorted(expected), "not the same names"
        rtol, atol = (
            (1e-4, 1e-5) if self.kind == "cuda" else (0.0, 0.0) if bitwise else (1e-5, 1e-6)
        )
        for name, value in expected.items():
            torch.testing.assert_close(
                actual[name].detach().cpu(),
                value.detach().cpu(),
                rtol=rtol,
                atol=atol,
                msg=lambda text, name=name: f"{name} on {self}: {text}",
            )


VIRTUAL = [DeviceSet(kind="virtual", count=count) for count in (1, 2, 3)]
ACCELERATORS = [
    DeviceSet(kind="cuda", count=count) for count in (1, 2) if count <= torch.cuda.device_count()
]
ONE, TWO, THREE = VIRTUAL
