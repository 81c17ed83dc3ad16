"""Settings of a run: what a call says beats what the model says, which beats the built-in value."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from .errors import ConfigError
from .microbatch.merge import check_merge_function
from .microbatch.specs import check_takes
from .plan.execute_plan import ModelExecutePlan

RecomputeGrain = Literal["stage", "layer"]


@dataclass(frozen=True)
class RoundPipeRunConfig:
    """Says how one call runs. Every field defaults to None, meaning "not set".

    Args:
        requires_grad: build what backward needs; else ``torch.is_grad_enabled()``.
        output_device: where merged outputs go; else the CPU.
        preserve_rng_state: give every (layer, microbatch) its own random stream; else True.
        recompute_grain: ``"stage"`` recomputes a backward stage whole, ``"layer"`` one layer at a
            time (lower peak).
        num_microbatch: microbatches per call; else the number of devices + 1.
        split_input: ``(args, kwargs, n) -> (args_list, kwargs_list)`` or a pair of chunk specs for
            args and kwargs.
        split_label: ``(label, n) -> label_list`` or a chunk spec.
        merge_output: ``(outputs, rows) -> merged`` or ``(outputs) -> merged``, a chunk spec, or
            False to get the microbatches as they are, as `RoundPipePackedData`.
        execute_plan: the stages to use; else planned from the layers' sizes.
        keep_graphs: a forward that is a part of the caller's graph keeps what devices have room for
            of its layers' graphs until the backward, which recomputes the others only; else False.
            What the caller computes in between needs its room as well, so it begins once a few
            training steps have shown how much that is.
        tokens_at_once: modules that compute each token by itself (MLPs and norms, those that a
            layer names in ``row_wise``) run for so many tokens at a time, forward and again in
            their backward, so that less is alive on a device; 0 never cuts them; else they are cut
            where no plan fits otherwise.

    Raises:
        ConfigError: a value that a field cannot have.

    Example:
        >>> time_first = RoundPipeRunConfig(
        ...     num_microbatch=8,
        ...     merge_output=lambda outputs, rows: torch.cat(outputs, dim=1),
        ... )
        >>> outputs = engine(x, roundpipe_run_config=time_first)
    """

    requires_grad: bool | None = None
    output_device: torch.device | str | None = None
    preserve_rng_state: bool | None = None
    recompute_grain: RecomputeGrain | None = None
    num_microbatch: int | None = None
    split_input: Callable[..., Any] | tuple[Any, Any] | None = None
    split_label: Callable[..., Any] | Any | None = None
    merge_output: Callable[..., Any] | Any | bool | None = None
    execute_plan: ModelExecutePlan | None = None
    keep_graphs: bool | None = None
    tokens_at_once: int | None = None

    def __post_init__(self) -> None:
        if self.num_microbatch is not None:
            count = _whole_number(self.num_microbatch)
            if count is None or count < 1:
                raise ConfigError(
                    f"num_microbatch is {self.num_microbatch!r}; it must be an integer, at least 1"
                )
            object.__setattr__(self, "num_microbatch", count)
        if self.tokens_at_once is not None:
            tokens = _whole_number(self.tokens_at_once)
            if tokens is None or tokens < 0 or isinstance(self.tokens_at_once, bool):
                raise ConfigError(
                    f"tokens_at_once is {self.tokens_at_once!r}; give a number of tokens, such as "
                    "4096, or 0 to run all at once"
                )
            object.__setattr__(self, "tokens_at_once", tokens)
        if self.output_device is not None:
            _check_is_there(torch.device(self.output_device))
        if self.recompute_grain not in (None, "stage", "layer"):
            raise ConfigError(
                f"recompute_grain is {self.recompute_grain!r}; use 'stage' or 'layer'"
            )
        check_takes(self.split_input, 3, "split_input", "(args, kwargs, n)")
        check_takes(self.split_label, 2, "split_label", "(label, n)")
        check_merge_function(self.merge_output)
        if self.execute_plan is not None and not isinstance(self.execute_plan, ModelExecutePlan):
            raise ConfigError(
                f"execute_plan is a {type(self.execute_plan).__name__}; give a ModelExecutePlan"
            )

    @property
    def builds_graph(self) -> bool:
        """True where a forward is to be a part of the caller's graph.

        Raises:
            ConfigError: it is to be one in ``torch.inference_mode``, where there are no graphs.
        """
        if self.requires_grad and torch.is_inference_mode_enabled():
            raise ConfigError(
                "requires_grad=True was given inside torch.inference_mode(), which builds no "
                "graph; use torch.no_grad() there, or leave requires_grad out"
            )
        return torch.is_grad_enabled() if self.requires_grad is None else self.requires_grad

    def over(self, base: "RoundPipeRunConfig") -> "RoundPipeRunConfig":
        """Returns this config where it is set, and ``base`` where it is not."""
        own = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}
        return replace(base, **own)


def _whole_number(value: Any) -> int | None:
    """NumPy's included."""
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_is_there(device: torch.device) -> None:
    if device.type in ("cpu", "meta"):
        return
    count = torch.get_device_module(device).device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"output_device is {str(device)!r}, and this machine has {count} {device.type} "
            "devices; name one that is there, or leave it out for the host"
        )
