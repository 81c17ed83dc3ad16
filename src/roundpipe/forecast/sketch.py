"""What each layer computes and holds, found by running it once on the meta device, where tensors
have shapes and no values.

[Note: sketch] Of layers that are alike two run, because a first one may get an input that carries
no gradient; what the second one shows stands for all others. They run one after another and then
backward, as in a stage run of one microbatch, and memory is counted as a virtual device counts it.
Attention runs as the fused kernel that devices have, which keeps no scores. The chain runs twice,
once to count operations and what autograd keeps, once to see what is alive, because who counts
keeps tensors alive.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..autoplan.cutting import TOKENS_AT_ONCE
from ..autoplan.graph_bytes import GraphBytes
from ..device import VirtualDevice
from ..errors import ConfigError, PlanError
from ..microbatch.sizes import first_of_graph, tensor_leaves
from ..recompute.row_wise import RowCuts

_ENDLESS = 1 << 60
_FEW, _LONG = 512, 32_768  # tokens of a short row, and of what takes long
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass
class LayerSketch:
    """One layer and one microbatch.

    ``forward`` and ``backward`` are operations; ``saved``, ``largest`` and ``inputs`` the bytes
    that an engine measures. Of live bytes: ``forward_peak`` above what there was before its
    forward, of which ``left`` stays until its backward; ``backward_peak`` above what there was
    before its backward, which changes that by ``backward_change``, its gradients included.
    """

    forward: float = 0.0
    backward: float = 0.0
    saved: int = 0
    largest: int = 0
    inputs: int = 0
    forward_peak: int = 0
    left: int = 0
    backward_peak: int = 0
    backward_change: int = 0


def sketches(
    layers: Sequence[nn.Module], inputs: dict[str, torch.Tensor], tokens_at_once: int = 0
) -> list[LayerSketch]:
    """Of every layer, the loss with the last. See [Note: sketch].

    Args:
        inputs: of the first layer, on the meta device. The last returns an object with a loss.
        tokens_at_once: what row-wise modules run for, 0 for all.

    Raises:
        ConfigError: a layer looks at values, so that it cannot run without.
    """
    alike: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        alike.setdefault(_kind(layer), []).append(index)
    chain = sorted(index for same in alike.values() for index in same[:2])
    made = [LayerSketch() for _ in chain]
    run = [layers[index] for index in chain]
    with _cut(run, tokens_at_once):
        for counts in (True, False):
            _Run(made, counts=counts).through(run, inputs)
    known = dict(zip(chain, made, strict=True))
    for same in alike.values():
        known.update(dict.fromkeys(same[2:], known[same[1]]) if len(same) > 2 else {})
    return [known[index] for index in range(len(layers))]


def tokens_at_once(layers: Sequence[nn.Module], rows: int, seq: int, room: int) -> int:
    """Returns what row-wise modules run for in a microbatch: 0, for all, unless that is known to be
    too much. Long rows take long on the meta device as well, so they are not run to find that out.

    Args:
        room: bytes of a device for tensors.

    Raises:
        PlanError: even in parts they are too much.
    """
    if rows * seq <= _LONG or least_bytes(layers, rows * seq, in_parts=False) <= room:
        return 0
    needed = least_bytes(layers, rows * seq, in_parts=True)
    if needed > room:
        raise PlanError(
            f"a microbatch of {rows} x {seq} tokens keeps {needed / 1e9:.1f} GB for the backward "
            f"of one layer alone, and a device has {room / 1e9:.1f} GB for tensors; make seq "
            "smaller or num_microbatch larger"
        )
    return TOKENS_AT_ONCE


def least_bytes(layers: Sequence[nn.Module], tokens: int, *, in_parts: bool) -> int:
    """Tells what a device holds at least while one layer goes back, from one short row and from
    two: what a graph keeps grows by each token, and what rows share is left out.

    Args:
        tokens: of a microbatch.
        in_parts: row-wise modules are cut, where there are any.
    """
    one, two = (
        [sketch.saved for sketch in sketches(layers, batch_of(rows, _FEW), in_parts and _FEW // 2)]
        for rows in (1, 2)
    )
    return max(
        few + (many - few) * (tokens - _FEW) // _FEW for few, many in zip(one, two, strict=True)
    )


def batch_of(rows: int, seq: int) -> dict[str, torch.Tensor]:
    """Inputs of a first layer, as the Trainer calls a model whose loss is its own: logits are made
    part by part."""
    ids = torch.zeros(rows, seq, dtype=torch.long, device="meta")
    made: dict[str, Any] = {"input_ids": ids, "labels": ids, "skip_logits": True}
    return made


@contextmanager
def _cut(layers: Sequence[nn.Module], tokens_at_once: int) -> Iterator[None]:
    classes = {module: type(module) for layer in layers for module in layer.modules()}
    try:
        if tokens_at_once:
            for layer in layers:
                RowCuts().apply(layer, tokens_at_once)
        yield
    finally:
        for module, kind in classes.items():
            module.__class__ = kind


def _kind(layer: nn.Module) -> Any:
    parameters = tuple((p.shape, p.dtype, p.requires_grad) for p in layer.parameters())
    return type(layer), getattr(layer, "kind", None), parameters


class _Run:
    """One chain of layers, there and back, for what it ``counts`` or for what is alive."""

    def __init__(self, made: list[LayerSketch], *, counts: bool) -> None:
        self._made, self._counts = made, counts
        device = VirtualDevice(0, _ENDLESS)
        assert device.capacity is not None
        self._lane, self._memory = device.compute, device.capacity
        # Only now, because it imports Triton.
        from torch.utils.flop_counter import FlopCounterMode

        self._flops = FlopCounterMode(
            display=False,
            custom_mapping={
                _FUSED: _attention_flops,
                _FUSED_BACKWARD: _attention_backward_flops,
                torch.ops.aten._grouped_mm: _grouped_flops,
            },
        )
        self._before = (0, 0.0)
        self._lowest: LayerSketch | None = None  # of those with a backward

    def through(self, layers: Sequence[nn.Module], inputs: dict[str, torch.Tensor]) -> None:
        with ExitStack() as contexts:
            for context in (
                self._lane.work(),
                torch.enable_grad(),
                _FusedAttention(),
                patch.object(torch, "autocast", _Autocast),
                self._flops if self._counts else nullcontext(),
            ):
                contexts.enter_context(context)
            output: Any = None
            for position, layer in enumerate(layers):
                try:
                    output = self._forward(layer, position, output, inputs)
                except (RuntimeError, NotImplementedError) as error:
                    raise ConfigError(
                        f"layer {position} ({type(layer).__name__}) does not run without values "
                        f"in this dtype ({error}); plan with dtype=torch.bfloat16, which experts "
                        "need, or load it to know what it holds"
                    ) from error
                self._watch(output, position)
            loss = output.loss
            del output
            self._begin()
            loss.backward()
            if self._lowest is not None:
                self._end(self._lowest)
        for layer in layers:
            for parameter in layer.parameters():
                parameter.grad = None

    def _forward(
        self, layer: nn.Module, position: int, value: Any, inputs: dict[str, torch.Tensor]
    ) -> Any:
        sketch, is_first = self._made[position], position == 0
        tensors = tensor_leaves(inputs if is_first else value)
        sketch.inputs = sum(tensor.nbytes for tensor in tensors)
        graph = GraphBytes([*layer.parameters(), *(tensors if is_first else ())])
        hooks = torch.autograd.graph.saved_tensors_hooks(graph.pack, torch.Tensor.detach)
        before, flops = self._begin()
        with hooks if self._counts else nullcontext():
            output = layer(**inputs) if is_first else layer(value)
        del value, tensors
        if self._counts:
            sketch.saved, sketch.largest = graph.num_bytes, graph.largest_bytes
            sketch.forward = self._flops.get_total_flops() - flops
        sketch.forward_peak = self._memory.peak - before
        sketch.left = self._memory.used - before
        return output

    def _watch(self, output: Any, position: int) -> None:
        """When the gradient of a layer's output is there, the layer behind it is done."""
        made = self._made

        def arrived(gradient: torch.Tensor) -> None:
            if position + 1 < len(made):
                self._end(made[position + 1])

        leaf = first_of_graph(output)
        if leaf is not None:
            leaf.register_hook(arrived)
            self._lowest = self._lowest or made[position]

    def _begin(self) -> tuple[int, float]:
        self._memory.peak = self._memory.used
        flops = float(self._flops.get_total_flops()) if self._counts else 0.0
        self._before = self._memory.used, flops
        return self._before

    def _end(self, sketch: LayerSketch) -> None:
        before, flops = self._before
        if self._counts:
            sketch.backward = self._flops.get_total_flops() - flops
        sketch.backward_peak = self._memory.peak - before
        sketch.backward_change = self._memory.used - before
        self._begin()


class _Autocast(torch.autocast):
    """The meta device has none, and adapters of experts switch that of their device off."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


class _FusedAttention(TorchFunctionMode):
    """On the meta device torch takes attention apart, scores and all."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value, *rest = args
        named = dict(zip(("attn_mask", "dropout_p", "is_causal"), rest, strict=False)) | kwargs
        return _FUSED(
            query,
            key,
            value,
            named.get("dropout_p", 0.0),
            named.get("is_causal", False),
            attn_mask=named.get("attn_mask"),
            scale=named.get("scale"),
        )[0]


def _attention_flops(query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Two products over half of the scores: those of a causal model."""
    *outer, tokens, width = query
    count = torch.Size(outer).numel()
    return int(2 * count * tokens * key[-2] * width)


def _attention_backward_flops(gradient: Any, query: Any, key: Any, *_: Any, **__: Any) -> int:
    """Five products, the scores' once more among them."""
    return _attention_flops(query, key) * 5 // 2


def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """One product for each group of rows, as experts make them; with both in three dimensions all
    groups are as large."""
    groups = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * groups * left[-2] * left[-1] * right[-1])
