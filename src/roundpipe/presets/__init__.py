"""How known architectures become a sequence of layers, found by `preset.cut`; generic presets are
`decoder` and `architectures.encoder_decoder`.

Imports `layers`, `kernels`, `microbatch`, `errors`, and the Hugging Face libraries.
"""

from .preset import Cut, register_preset

__all__ = ["Cut", "register_preset"]
