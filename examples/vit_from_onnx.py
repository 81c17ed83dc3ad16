"""A small vision transformer out of an ONNX file, as the backbone of transformers' ViT.

The file holds a saliency model: a DINOv2-shaped backbone (384 wide, 12 blocks, patches of 14
pixels) and a decoder, which is left behind. `ViTModel` has no LayerScale, so its factors are
multiplied into the matrices before them: the same function, to rounding.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WIDTH, BLOCKS, HEADS, PATCH = 384, 12, 6, 14
GRID = 37  # positions along a side, for images of 518 pixels
# The exporter gave these two no name of their own.
GRID_POSITIONS, FIRST_POSITION = "onnx::Reshape_1962", "onnx::Concat_1957"


def convert(onnx_file: Path, folder: Path) -> None:
    """Writes a checkpoint of `ViTModel`. Smaller images than it was made for need
    ``interpolate_pos_encoding=True``."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        patch_size=PATCH,
        image_size=GRID * PATCH,
        layer_norm_eps=1e-6,
    )
    model = ViTModel(config, add_pooling_layer=False)
    model.load_state_dict(_state_dict(_named_weights(onnx_file)))
    model.save_pretrained(folder)


def _named_weights(onnx_file: Path) -> dict[str, Tensor]:
    """By their names in the backbone. Matrices are stored transposed and are named by the operation
    that uses them."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(onnx_file).graph
    stored: dict[str, Any] = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer
    }
    weights = {name.removeprefix("backbone."): value for name, value in stored.items()}
    for node in graph.node:
        if (
            node.op_type == "MatMul"
            and node.input[1] in stored
            and node.name.startswith("/backbone/")
        ):
            module = node.name.removeprefix("/backbone/").rsplit("/", 1)[0].replace("/", ".")
            weights[f"{module}.weight"] = stored[node.input[1]].T
    return {name: torch.tensor(value) for name, value in weights.items()}


def _state_dict(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    embeddings = (
        "cls_token",
        "patch_embeddings.projection.weight",
        "patch_embeddings.projection.bias",
    )
    state = {f"embeddings.{name}": weights[f"embeddings.{name}"] for name in embeddings}
    grid = weights[GRID_POSITIONS].reshape(1, GRID * GRID, WIDTH)
    state["embeddings.position_embeddings"] = torch.cat([weights[FIRST_POSITION], grid], dim=1)
    for kind in ("weight", "bias"):
        state[f"layernorm.{kind}"] = weights[f"layernorm.{kind}"]
        for index in range(BLOCKS):
            state |= _block(weights, f"encoder.layer.{index}", f"layers.{index}", kind)
    return state


def _block(weights: dict[str, Tensor], old: str, new: str, kind: str) -> dict[str, Tensor]:
    def scaled(tensor: Tensor, scale: Tensor) -> Tensor:
        return tensor * (scale[:, None] if kind == "weight" else scale)

    attention, scales = (
        f"{old}.attention",
        [weights[f"{old}.layer_scale{part}.lambda1"] for part in (1, 2)],
    )
    block = {
        f"attention.{name[0]}_proj": weights[f"{attention}.attention.{name}.{kind}"]
        for name in _PROJECTIONS
    }
    block["attention.o_proj"] = scaled(weights[f"{attention}.output.dense.{kind}"], scales[0])
    block["mlp.fc1"] = weights[f"{old}.mlp.fc1.{kind}"]
    block["mlp.fc2"] = scaled(weights[f"{old}.mlp.fc2.{kind}"], scales[1])
    block["layernorm_before"] = weights[f"{old}.norm1.{kind}"]
    block["layernorm_after"] = weights[f"{old}.norm2.{kind}"]
    return {f"{new}.{name}.{kind}": value for name, value in block.items()}


_PROJECTIONS = ("query", "key", "value")
