"""Presets make a sequence of layers of architectures that are known. `preset.cut` finds the one for
a model; generic ones are `decoder` and `architectures.encoder_decoder`.

Imports `layers`, `kernels`, `microbatch`, `errors`, and the Hugging Face libraries.
"""

from .preset import Cut, register_preset

__all__ = ["Cut", "register_preset"]
