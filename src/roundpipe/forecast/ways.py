"""Ways to train: what may be chosen beside a model, a batch and a machine."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from ..errors import ConfigError


class OptimizerCosts(NamedTuple):
    """``moment_bytes``: per trained element; ``per_core``: elements that one core updates in a
    millisecond (docs/optimizers.md); ``call``: how it is made."""

    moment_bytes: float
    per_core: float
    call: str


OPTIMIZERS = {
    "adamw": OptimizerCosts(8, 1050e3, "roundpipe.optim.AdamW"),
    "adamw_bf16": OptimizerCosts(4, 770e3, "roundpipe.optim.LeanAdamW(moments=torch.bfloat16)"),
    "adamw_8bit": OptimizerCosts(2 + 8 / 256, 555e3, "roundpipe.optim.LeanAdamW(moments='8bit')"),
    "lion": OptimizerCosts(4, 450e3, "roundpipe.optim.Lion"),
    "sgd": OptimizerCosts(0, 900e3, "roundpipe.optim.SGD"),
}
MADE_FROM_DENSE = ("nf4", "fp8", "int8", "nf4_double", "mxfp4")
# As fast as "nf4" and a little less exact, so only where they are asked for.
_ASKED_FOR = ("nf4_double", "mxfp4")
_FEWEST_TOKENS = 2048  # of a microbatch


class Choice(NamedTuple):
    """What may be chosen beside the model and the batch. ``quantization``: "none" or a format.
    ``optimizer_state_dir``: None where state lies in memory."""

    quantization: str
    is_async: bool
    optimizer: str
    pin_model: str
    optimizer_state_dir: str | None = None

    def __str__(self) -> str:
        when = "async" if self.is_async else "sync"
        weights = "dense" if self.quantization == "none" else self.quantization
        where = "" if self.optimizer_state_dir is None else ", state on disk"
        return f"{weights} {when} {self.optimizer} {self.pin_model}{where}"

    def arguments(self) -> dict[str, Any]:
        """For `RoundPipeTrainingArguments` and ``load_pretrained``, and the optimizer to make."""
        made: dict[str, Any] = {"async_optimizer": self.is_async, "pin_model": self.pin_model}
        if self.optimizer_state_dir is not None:
            made["optimizer_state_dir"] = self.optimizer_state_dir
        if self.quantization != "none":
            made["quantization"] = self.quantization
        if self.optimizer != "adamw":
            made["optimizer"] = OPTIMIZERS[self.optimizer].call
        return made


def choices(
    quantization: str | None,
    is_async: bool | None,
    optimizer: str | None,
    pin_model: str | None,
    of_checkpoint: str,
    *,
    is_full: bool,
) -> list[Choice]:
    """Every way to train with what was chosen, the plainest first.

    Args:
        quantization, is_async, optimizer, pin_model: None where nothing was chosen.
        of_checkpoint: how its weights are quantized, or "none".
        is_full: all weights train.

    Raises:
        ConfigError: a choice that is unknown, or does not go with the checkpoint.
    """
    if of_checkpoint != "none" and quantization not in (None, of_checkpoint):
        raise ConfigError(
            f"quantization is {quantization!r}, and the checkpoint is quantized already, as "
            f"{of_checkpoint}; leave it out"
        )
    formats: Sequence[str] = ("none", *MADE_FROM_DENSE)
    if of_checkpoint != "none":
        formats = (of_checkpoint,)
    elif is_full:
        if quantization in MADE_FROM_DENSE:
            raise ConfigError(
                f"quantization is {quantization!r}, and quantized weights do not train; plan for "
                "adapters (lora=16), or leave it out"
            )
        formats = _chosen("quantization", quantization, formats) and ("none",)
    # State in fewer bits is worth it where there is much of it.
    lean = ("adamw_bf16", "adamw_8bit") if is_full else ()
    optimizers = _chosen("optimizer", optimizer, tuple(OPTIMIZERS))
    chosen = _chosen("quantization", quantization, formats)
    if quantization is None and of_checkpoint == "none":
        chosen = [name for name in chosen if name not in _ASKED_FOR]
    found = product(
        chosen,
        (False, True) if is_async is None else (is_async,),
        optimizers if optimizer is not None else ("adamw", *lean),
        _chosen("pin_model", pin_model, ("alloc", "off")),
    )
    return [Choice(*one) for one in found]


def _chosen(name: str, given: str | None, known: Sequence[str]) -> Sequence[str]:
    if given is None:
        return known
    if given not in known:
        raise ConfigError(f"{name} is {given!r}; use one of {', '.join(map(repr, known))}")
    return (given,)


def microbatch_counts(default: int, batch: int, seq: int) -> list[int]:
    """Numbers of microbatches that are tried: smaller ones leave room for more layers at once, and
    with more of them devices are less idle. None is so small that a device may wait for its kernels
    to be queued, which takes no time in what is predicted."""
    more = [times * default for times in (2, 4) if times * default <= batch]
    return [default, *(count for count in more if batch // count * seq >= _FEWEST_TOKENS)]
