"""Which weights of a model are worth quantizing. Makes none."""

from typing import Any

from torch import nn


def quantizable(model: nn.Module, quantization: str) -> list[str]:
    """Names of a model's weights that a quantization is for: of linear layers but the head (what a
    classifier has beside its base model, too, because that trains), and stacked experts; "mxfp4" is
    for experts only."""
    stacked = [name for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name]
    if quantization == "mxfp4":
        return stacked
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    base: Any = getattr(model, "base_model", model)
    body = {id(module) for module in base.modules()} - {id(get_head())}
    linear = (
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module) in body
    )
    return [*linear, *stacked]
