"""What a checkpoint's files hold, where it lies: read when it is written elsewhere."""

from pathlib import Path
from typing import Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.quantized import QuantizedWeight

from ..folders import SAFETENSORS_NAMES
from ..quantization.reading import as_dict, dense_dtype, quantized_weights, tensors_of


class Weights:
    """The weights of a checkpoint, mapped.

    Args:
        files: all of the checkpoint's.
        config: its own, whose ``quantization_config`` is taken out.

    Attributes:
        tensors: by name; quantized ones as `QuantizedWeight`.
        in_file: the name of the file that each is in, a quantized one with its first part.

    Raises:
        ConfigError: a file is damaged, or holds what is not read or not written again.
    """

    def __init__(self, files: list[Path], config: Any) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        in_file: dict[str, str] = {}
        for file in files:
            own = tensors_of(file)
            self.tensors |= own
            in_file |= dict.fromkeys(own, file.name)
        for name, tensor in self.tensors.items():
            if str(tensor.dtype).removeprefix("torch.") not in SAFETENSORS_NAMES:
                raise ConfigError(f"{name} is {tensor.dtype}, which is not written again")
        said = getattr(config, "quantization_config", None)
        if said is not None:
            del config.quantization_config
            self.tensors = quantized_weights(self.tensors, as_dict(said), dense_dtype(config))
        self.in_file = {
            name: in_file.get(name) or in_file[f"{name}_blocks"] for name in self.tensors
        }


def dense(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself; a quantized one as a new tensor."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
