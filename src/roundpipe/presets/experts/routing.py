"""Mixture-of-experts blocks: a recompute sends every token to the experts of the forward, and the
router's logits travel on to the auxiliary loss.

Knows no architecture: whatever a block chooses, it chooses with ``topk``.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypedDict

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...layers.compiler import COMPILES
from ...recompute.user_data import doing_recompute, get_recompute_data, save_for_recompute

Chain = tuple[Any, torch.Tensor]
_OURS = -1  # torch's own hooks are numbered from 0


class Routed(TypedDict):
    """What travels for the auxiliary loss: the logits of all routers so far (None: it is not
    wanted).

    They form a chain, each block adding a link, which takes no time however long it is. See
    `keeps_choices`.
    """

    router_logits: (
        tuple[()] | Chain | None
    )  # ((..., (tokens of all rows, experts)), (tokens of all rows, experts))
    attention_mask: torch.Tensor | None  # (rows, tokens): which tokens the auxiliary loss counts
    has_siblings: bool  # the batch has other microbatches, so the last layer makes sums


class KeptChoice(TorchFunctionMode):
    """Within it ``topk`` chooses in a recompute what it chose in the forward.

    Rounding may differ there (another kernel, another device), and a token close to the border
    between two experts would get the gradient of an expert that did not compute it.

    Args:
        kept: what the forward chose; None: this is the forward.
    """

    def __init__(self, kept: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self._kept = kept
        self.chosen: list[torch.Tensor] = []  # within it, (tokens, experts of a token) each

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.topk and func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        if self._kept is not None:
            indices = self._kept[len(self.chosen)]
            result = _chosen_again(indices, *args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        self.chosen.append(result.indices)
        return result


def choices_of_the_forward() -> tuple[torch.Tensor, ...] | None:
    """Returns what the forward chose of the layer that recomputes; None where nothing does."""
    return get_recompute_data() if doing_recompute() else None


def keeps_choices(run: Callable[..., tuple[Any, tuple[torch.Tensor, ...]]]) -> Callable[..., Any]:
    """Makes a layer's forward of ``run(layer, state, kept)``, which returns what `run_routed` does:
    in a recompute it is given what it chose in the forward.

    A compiled layer must ask for that each time, which is no code that can be compiled. So the
    asking stays outside, and ``run`` compiles as one piece. So does the chain of logits, of which
    ``run`` sees no link but its own: a compiled layer takes a longer chain for another argument.
    """

    def forward(layer: nn.Module, state: Any) -> Any:
        chain = state["router_logits"]
        kept = choices_of_the_forward()
        made, chosen = run(layer, {**state, "router_logits": None if chain is None else ()}, kept)
        save_for_recompute(*chosen)
        said = made["router_logits"]
        return {**made, "router_logits": (chain, said) if isinstance(said, torch.Tensor) else chain}

    setattr(forward, COMPILES, (run, keeps_choices))
    return forward


def _chosen_again(
    indices: torch.Tensor, input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any
) -> Any:
    return torch.return_types.topk((input.gather(dim, indices), indices))


def run_routed(
    run: Callable[..., Any],
    state: Any,
    block: nn.Module,
    router: str | None,
    kept: Sequence[torch.Tensor] | None,
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Has ``run`` run a block: a recompute chooses as the forward did, and what the ``router``
    says takes the place of the state's ``router_logits`` where that is wanted. Returns what the
    block made, and what it chose.

    ``router``: None, the block has none. ``kept``: see `KeptChoice`.
    """
    said = state["router_logits"]
    choice = KeptChoice(kept)
    if said is None or router is None:
        with choice:
            made = run(state)
    else:
        with choice, _outputs_of(operator.attrgetter(router)(block)) as outputs:
            made = run(state)
        (said,) = outputs
        said = said[0] if isinstance(said, tuple) else said
    return {**made, "router_logits": said}, tuple(choice.chosen)


def chooses(block: nn.Module) -> bool:
    """Whether it has experts, by the name that transformers gives them."""
    return any(name.split(".")[-1] == "experts" for name, _ in block.named_modules())


def wants_auxiliary_loss(
    model_class: type[nn.Module], config: Any, output_router_logits: bool | None
) -> bool:
    """What a call says beats the config: the model's own, or of a model that sees that of its text,
    where its forward has an argument of that name (from transformers 5.24 on)."""
    if output_router_logits is not None:
        return bool(output_router_logits)
    name = "output_router_logits"
    if not hasattr(config, name) and name in signature(model_class.forward).parameters:
        config = config.get_text_config()
    return bool(getattr(config, name, False))


@contextmanager
def _outputs_of(module: nn.Module) -> Iterator[list[Any]]:
    """What ``module`` returns while the context lasts.

    The dictionary of hooks is replaced, not added to: a replica shares it with the user's module,
    and another device may be running that at this moment.
    """
    outputs: list[Any] = []
    before = module._forward_hooks
    # By hand, because the compiler cannot follow torch's own way of adding one.
    module._forward_hooks = OrderedDict(before)
    module._forward_hooks[_OURS] = lambda _, __, output: outputs.append(output)
    try:
        yield outputs
    finally:
        module._forward_hooks = before
