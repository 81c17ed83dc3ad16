"""Which weights of a model are worth quantizing. Makes none."""

from typing import Any

from torch import nn


def quantizable(model: nn.Module, quantization: str) -> list[str]:
    """Names of a model's weights that a quantization is for: of linear layers but the head, and
    stacked experts; "mxfp4" is for experts only."""
    stacked = [name for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name]
    if quantization == "mxfp4":
        return stacked
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    linear = (
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    )
    return [*linear, *stacked]
