"""Frozen weights in four or eight bits: their formats, and a tensor that holds one and is seen as
the dense weight. May import `errors`."""

from .formats import FORMATS, FP8, INT8, MXFP4, NF4, Format
from .weight import QuantizedWeight

__all__ = ["FORMATS", "FP8", "INT8", "MXFP4", "NF4", "Format", "QuantizedWeight"]
