"""AdamW for hosts with little memory: moments in bf16 or 8 bits, masters in fp32 or bf16. Not
exact, by choice.

Bytes per parameter beside the working copy and the gradient: masters 4 (bf16: 2), both moments 8
(bf16: 4, 8 bits: 2.03). See docs/optimizers.md.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.updates import BLOCK, Decision, Formula, Rule, Tensors
from ..memory.scratch import scratch
from ..params.window import Master
from .moments import PIECE, BFloat16, Blocks8, Float32, Format, Noise, root_, round_to_bf16
from .optimizers import AdamFamily, AdamRule, decision_of_whole
from .state import of_owned

MomentFormat = torch.dtype | Literal["8bit"]

# For the first moment, which has a sign and may be 0, and the second, which is divided by.
FORMATS: dict[MomentFormat, tuple[Format, Format]] = {
    torch.float32: (Float32(), Float32()),
    torch.bfloat16: (BFloat16(), BFloat16()),
    "8bit": (
        Blocks8(dtype=torch.int8, power=2, least=0),
        Blocks8(dtype=torch.uint8, power=4, least=1),
    ),
}
_LEAN = 4  # as update.c numbers it
_NAMES = (("exp_avg", "exp_avg_scale"), ("exp_avg_sq", "exp_avg_sq_scale"))


@dataclass
class LeanRule:
    """AdamW on what the formats hold, for one master and step: the reference of
    `kernels/lean.h`.

    Sums and products are operations of their own, so that every machine and device has the same
    numbers. ``done``: elements so far, because chunks come in order.
    """

    adam: AdamRule
    formats: tuple[Format, Format]
    noise: Noise
    done: int = 0

    def apply(self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors]) -> None:
        for weight, gradient, own in zip(weights, gradients, moments, strict=True):
            self._apply_to(weight.view(-1), gradient.view(-1), [each.view(-1) for each in own])

    def _apply_to(self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor]) -> None:
        half = len(moments) // 2
        for start in range(0, weight.numel(), PIECE):
            piece = slice(start, min(start + PIECE, weight.numel()))
            blocks = slice(start // BLOCK, -(-piece.stop // BLOCK))
            stored = [
                [pair[0][piece], *(s[blocks] for s in pair[1:])]
                for pair in (moments[:half], moments[half:])
            ]
            self._apply(weight[piece], gradient[piece], stored)

    def _apply(self, weight: Tensor, gradient: Tensor, stored: list[list[Tensor]]) -> None:
        count, device = weight.numel(), weight.device
        is_wide = weight.dtype is torch.float32
        wide = weight if is_wide else scratch("weight", count, device=device).copy_(weight)
        values = [
            form.read(kept, name)
            for form, kept, (name, _) in zip(self.formats, stored, _NAMES, strict=True)
        ]
        self._update(wide, gradient, *values)
        halves = self.noise.for_moments(self.done, count, device)
        for form, moment, kept, half in zip(self.formats, values, stored, halves, strict=True):
            form.write(moment, kept, half)
        if not is_wide:
            round_to_bf16(wide, weight, self.noise.for_master(self.done, count, device))
        self.done += count

    def _update(self, weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
        beta1, share1, beta2, share2, correction, eps, step = self._coefficients()
        sign = -1.0 if self.adam.maximize else 1.0
        change = scratch("change", weight.numel(), device=weight.device)
        mean.mul_(beta1).add_(torch.mul(gradient, sign * share1, out=change))
        square.mul_(beta2).add_(torch.mul(gradient, share2, out=change).mul_(gradient))
        size = scratch("size", weight.numel(), device=weight.device).copy_(square)
        root_(size).mul_(correction).add_(eps)
        weight.mul_(self._decay).add_(torch.mul(mean, step, out=change).div_(size))

    def _coefficients(self) -> tuple[float, ...]:
        adam = self.adam
        correction1, correction2 = 1 - adam.beta1**adam.step, 1 - adam.beta2**adam.step
        return (
            adam.beta1,
            1 - adam.beta1,
            adam.beta2,
            1 - adam.beta2,
            1 / math.sqrt(correction2),
            adam.eps,
            -adam.lr / correction1,
        )

    @property
    def _decay(self) -> float:
        return 1 - self.adam.lr * self.adam.weight_decay

    def formula(self) -> Formula:
        return Formula(
            rule=_LEAN,
            coefficients=self._coefficients(),
            sign=-1.0 if self.adam.maximize else 1.0,
            decay=self._decay,
            keys=self.noise.keys,
            stored=tuple(dtype for form in self.formats for dtype in form.dtypes),
        )


class LeanAdamW(AdamFamily, torch.optim.AdamW):
    """AdamW whose moments, and masters if they are bf16, are rounded stochastically.

    It computes in fp32 and rounds up or down at random, so that what is stored is right on average
    (see [Note: stochastic rounding]). Not torch's numbers, by choice. Bytes per element of both
    moments together: 4 in bf16, 2.03 in 8 bits (block-wise, as in Dettmers et al. 2021, a scale for
    each 256 values), 8 in fp32.

    Args:
        params: masters in fp32 or bf16, or param groups of such, from ``optim_parameters()``.
        lr, betas, eps, weight_decay, maximize: as ``torch.optim.AdamW``'s.
        moments: ``torch.bfloat16``, ``"8bit"`` (block-wise), or ``torch.float32`` (exact, for bf16
            masters).

    Raises:
        ConfigError: another value for ``moments``; in ``step``, masters that are neither fp32 nor
            bf16.

    Example:
        >>> optimizer = roundpipe.optim.LeanAdamW(engine.optim_parameters(), moments="8bit")
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: MomentFormat = torch.bfloat16,
        maximize: bool = False,
    ) -> None:
        if moments not in FORMATS:
            raise ConfigError(
                f"moments is {moments!r}; use torch.bfloat16, '8bit' or torch.float32"
            )
        self._moments = moments
        self._places: dict[int, int] = {}
        super().__init__(
            params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as torch does; its ``moments`` are the optimizer's unless it says other."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("moments", self._moments)
        for master in self.param_groups[-1]["params"]:
            self._places[id(master)] = len(self._places)

    def new_moments(
        self, master: Master, group: dict[str, Any]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for form, names in zip(FORMATS[group["moments"]], _NAMES, strict=True):
            yield from zip(names, form.zeros(master), strict=False)

    def decisions(self, masters: Sequence[Master], group: dict[str, Any]) -> list[Decision]:
        formats, decisions = FORMATS[group["moments"]], []
        for master, state, rule in self.decided(masters, group, amsgrad=False, is_decoupled=True):
            moments = tuple(state[name] for names in _NAMES for name in names if name in state)
            chosen = self._rule(master, rule, formats)
            made = decision_of_whole if chosen is rule else Decision
            decisions.append(made(master, moments, chosen))
        return decisions

    def _rule(self, master: Master, rule: AdamRule, formats: tuple[Format, Format]) -> Rule:
        if {master.dtype, *formats[0].dtypes} == {torch.float32}:
            return rule  # because nothing is rounded
        # Another for each parameter and step, and the same whenever a run is repeated.
        noise = Noise(int(rule.step) << 32 | self._places[id(master)])
        return LeanRule(rule, formats, noise)

    def _has_rules(self) -> bool:
        for group in self.param_groups:
            for master in group["params"]:
                is_known = isinstance(master, Master) and (
                    not master.is_owned or master.dtype in (torch.float32, torch.bfloat16)
                )
                if not is_known:
                    raise ConfigError(
                        f"LeanAdamW has a {type(master).__name__} in {master.dtype}; make it over "
                        "RoundPipe.optim_parameters() with optim_dtype torch.float32 or "
                        "torch.bfloat16"
                    )
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict`` of its own to the bit, or one of ``torch.optim.AdamW`` rounded
        into this optimizer's formats."""
        formats = [group["moments"] for group in self.param_groups]
        state_dict = of_owned(self, state_dict)
        # Without the state, because torch would cast codes to the master's dtype.
        super().load_state_dict({**state_dict, "state": {}})
        for group, own in zip(self.param_groups, formats, strict=True):
            group.setdefault("moments", own)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        masters = [(master, group) for group in self.param_groups for master in group["params"]]
        for key, (master, group) in zip(saved, masters, strict=True):
            if key in state_dict["state"]:
                self.state[master] = _adopted(
                    state_dict["state"][key], master, FORMATS[group["moments"]]
                )


def _adopted(
    saved: dict[str, Any], master: torch.Tensor, formats: tuple[Format, Format]
) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.as_tensor(saved["step"], dtype=torch.float32).clone()}
    noise = Noise(0)
    for number, (form, names) in enumerate(zip(formats, _NAMES, strict=True)):
        empty = form.zeros(master)
        if saved[names[0]].dtype == empty[0].dtype:
            state |= {
                name: saved[name].contiguous().clone()
                for name, _ in zip(names, empty, strict=False)
            }
            continue
        state |= dict(zip(names, empty, strict=False))
        values, stored = saved[names[0]].reshape(-1), [tensor.view(-1) for tensor in empty]
        for start in range(0, values.numel(), PIECE):
            codes = stored[0][start : start + PIECE]
            blocks = slice(start // BLOCK, -(-(start + codes.numel()) // BLOCK))
            form.write(
                values[start : start + PIECE].float().clone(),
                [codes, *(s[blocks] for s in stored[1:])],
                noise.for_moments(start, codes.numel())[number],
            )
    return state
