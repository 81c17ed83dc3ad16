"""Frozen weights in four or eight bits: their formats, and a tensor that holds one and is seen as
the dense weight.

Imports `kernels` and `errors`.
"""

from .choose import quantizable
from .eight_bits import FP8, INT8
from .format import Format
from .four_bits import MXFP4, NF4
from .weight import QuantizedWeight, stored_bytes

# By the names that users know. "nf4_double" is NF4 whose magnitudes are quantized too.
FORMATS: dict[str, Format] = {one.name: one for one in (NF4(), FP8(), INT8(), MXFP4())}
FORMATS["nf4_double"] = NF4(nested_block_size=256)

__all__ = [
    "FORMATS",
    "FP8",
    "INT8",
    "MXFP4",
    "NF4",
    "Format",
    "QuantizedWeight",
    "quantizable",
    "stored_bytes",
]
