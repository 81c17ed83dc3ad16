"""Drop-in optimizers for masters on the host, which read gradients as they were offloaded and
update in one pass."""

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..kernels.updates import Decision, Formula, Rule, Tensors
from ..params.placement.newest import record
from ..params.window import Master
from ..step import context
from .state import SteadyState, has_complex, listed

_ADAM, _ADAM_AMSGRAD, _SGD, _SGD_MOMENTUM = range(4)  # as update.c numbers them


class OnePass(SteadyState, torch.optim.Optimizer):
    """Steps by rules where it can, else as torch does. To be named before a class of
    ``torch.optim``.

    ``step`` only decides; see [Note: newest values].
    """

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        params = listed(params)
        # torch's fused steps, whose settings these are, take no complex numbers; its others do.
        given = kwargs if has_complex(params) else _fused_by_default(kwargs)
        super().__init__(params, *args, **given)

    def decisions(self, masters: Sequence[Master], group: dict[str, Any]) -> list[Decision]:
        """Decides what this step does to those ``masters`` of a param ``group`` that have a
        gradient. Makes their state on first use."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of all masters; there is none to set to zero."""
        for group in self.param_groups:
            for master in group["params"]:
                master.grad = None  # without reading it first, which would make it

    def step(self, closure: Any = None) -> Any:
        """Decides one update of every master that has a gradient; inside ``step_fn`` it is computed
        when that returns.

        Gradients are read as they were offloaded, in any floating-point dtype, and summed in fp32.
        Masters that are not fp32 (all, if one is complex), and options that only torch has
        (``foreach``, ``capturable``, ``differentiable``), go through torch's own step.
        """
        if not self._has_rules():
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.has_gradient]
            if masters:
                step = context.current_step()
                record(self.decisions(masters, group), None if step is None else step.updates)
        return loss

    def _has_rules(self) -> bool:
        return all(
            group["fused"]
            and not group.get("capturable")
            and all(issubclass(kind, Master) for kind in set(map(type, group["params"])))
            and {one.dtype for one in group["params"] if one.is_owned} <= {torch.float32}
            for group in self.param_groups
        )


def decision_of_whole(master: Master, moments: tuple[Tensor, ...], rule: Rule) -> Decision:
    """A decision with state as large as the master.

    Raises:
        ConfigError: it is not, and the kernel would read beyond its end.
    """
    count = master.numel()
    for moment in moments:
        if moment.numel() != count:
            raise ConfigError(
                f"a parameter of shape {tuple(master.shape)} has optimizer state of shape "
                f"{tuple(moment.shape)}; load the state dict of an optimizer over this model"
            )
    return Decision(master, moments, rule)


@dataclass(frozen=True)
class AdamRule:
    """Adam and AdamW at one step. ``step`` counts from 1."""

    step: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    amsgrad: bool
    maximize: bool
    is_decoupled: bool

    def apply(self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors]) -> None:
        means, squares, *largest = map(list, zip(*moments, strict=True))
        step = torch.full((), self.step, dtype=torch.float32, device=weights[0].device)
        kernel = torch._fused_adamw_ if self.is_decoupled else torch._fused_adam_
        kernel(
            list(weights),
            list(gradients),
            means,
            squares,
            largest[0] if largest else [],
            [step] * len(weights),
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=self.amsgrad,
            maximize=self.maximize,
        )

    def formula(self) -> Formula:
        correction1, correction2 = 1 - self.beta1**self.step, 1 - self.beta2**self.step
        return Formula(
            rule=_ADAM_AMSGRAD if self.amsgrad else _ADAM,
            coefficients=(
                1 - self.beta1,
                self.beta2,
                1 - self.beta2,
                math.sqrt(correction2),
                self.eps,
                -self.lr / correction1,
            ),
            sign=-1.0 if self.maximize else 1.0,
            coupled_decay=0.0 if self.is_decoupled else self.weight_decay,
            decay=1 - self.lr * self.weight_decay if self.is_decoupled else 1.0,
        )


class AdamFamily(OnePass):
    """What optimizers have in common whose state counts steps and has moments."""

    def new_moments(
        self, master: Master, group: dict[str, Any]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Makes what the state of a ``master`` in a param ``group`` begins with: names and
        tensors."""
        names = _moment_names(amsgrad=group["amsgrad"])
        return ((name, master.memory.zeros(master.shape, master.dtype)) for name in names)

    def decided(
        self, masters: Sequence[Master], group: dict[str, Any], *, amsgrad: bool, is_decoupled: bool
    ) -> Iterator[tuple[Master, dict[str, Any], AdamRule]]:
        """Counts one more step for each of ``masters``, and returns it with its state and the rule
        of that step, which has the numbers of ``group``, and ``amsgrad`` and ``is_decoupled``.

        They are counted in one call of torch's, because after each the interpreter has to be waited
        for again.
        """
        states = [self.state[master] for master in masters]
        for master, state in zip(masters, states, strict=True):
            if not state:
                # All or none, because there may be no room for them.
                moments = dict(self.new_moments(master, group))
                state.update(step=torch.zeros((), dtype=torch.float32), **moments)
        counts = [state["step"] for state in states]
        torch._foreach_add_(counts, 1)
        steps: list[float] = torch.stack(counts).tolist()
        beta1, beta2 = group["betas"]
        rules = {
            step: AdamRule(
                step=step,
                lr=float(group["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                amsgrad=amsgrad,
                maximize=group["maximize"],
                is_decoupled=is_decoupled,
            )
            for step in set(steps)
        }
        return zip(masters, states, map(rules.__getitem__, steps), strict=True)

    def decisions(self, masters: Sequence[Master], group: dict[str, Any]) -> list[Decision]:
        amsgrad = group["amsgrad"]
        decided = self.decided(
            masters, group, amsgrad=amsgrad, is_decoupled=group["decoupled_weight_decay"]
        )
        moments_of = operator.itemgetter(*_moment_names(amsgrad=amsgrad))
        return [
            decision_of_whole(master, moments_of(state), rule) for master, state, rule in decided
        ]


def _moment_names(*, amsgrad: bool) -> tuple[str, ...]:
    return "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if amsgrad else ())


@dataclass(frozen=True)
class SGDRule:
    """Stochastic gradient descent. ``is_first``: the velocity is not there yet and becomes the
    gradient."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    is_first: bool

    def apply(self, weights: Tensors, gradients: Tensors, moments: Sequence[Tensors]) -> None:
        torch._fused_sgd_(
            list(weights),
            list(gradients),
            [velocity for [velocity] in moments] if self.momentum else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,
            dampening=self.dampening,
            nesterov=self.nesterov,
            maximize=self.maximize,
            is_first_step=self.is_first,
        )

    def formula(self) -> Formula:
        return Formula(
            rule=_SGD if self.momentum == 0 else _SGD_MOMENTUM,
            coefficients=(
                self.momentum,
                1 - self.dampening,
                self.is_first,
                self.nesterov,
                -self.lr,
            ),
            sign=-1.0 if self.maximize else 1.0,
            coupled_decay=self.weight_decay,
        )


class SGD(OnePass, torch.optim.SGD):
    """Stochastic gradient descent, with momentum as in Sutskever et al. 2013 (torch's variant).

    Takes the arguments of ``torch.optim.SGD`` and keeps its state: nothing, or 4 bytes per element
    of fp32 velocity with ``momentum``. Construct it over ``optim_parameters()``.

    Example:
        >>> optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1, momentum=0.9)
        >>> engine.step(optimizer.step)
    """

    def decisions(self, masters: Sequence[Master], group: dict[str, Any]) -> list[Decision]:
        momentum = float(group["momentum"])
        rules = [
            SGDRule(
                lr=float(group["lr"]),
                momentum=momentum,
                dampening=group["dampening"],
                weight_decay=float(group["weight_decay"]),
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first=is_first,
            )
            for is_first in (False, True)
        ]
        decisions = []
        for master in masters:
            state = self.state[master] if momentum else {}
            is_first = momentum != 0 and state.get("momentum_buffer") is None
            if is_first:
                state["momentum_buffer"] = master.memory.empty(master.shape, master.dtype)
            moments = (state["momentum_buffer"],) if momentum else ()
            decisions.append(decision_of_whole(master, moments, rules[is_first]))
        return decisions


class Adam(AdamFamily, torch.optim.Adam):
    """Adam (Kingma and Ba 2014), with ``amsgrad`` as in Reddi et al. 2018.

    Takes the arguments of ``torch.optim.Adam`` and keeps its state: two fp32 moments, 8 bytes per
    element, or 12 with ``amsgrad``. Weight decay is added to the gradient. Construct it over
    ``optim_parameters()``.
    """


class AdamW(AdamFamily, torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2017).

    Takes the arguments of ``torch.optim.AdamW`` and keeps its state: two fp32 moments, 8 bytes per
    element, or 12 with ``amsgrad``. Construct it over ``optim_parameters()``.

    Example:
        >>> optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-4)
        >>> engine.step(optimizer.step)
    """


# torch's own, whose update is more than elementwise: they run as torch wrote them, on ``.grad``.


class Adafactor(SteadyState, torch.optim.Adafactor):
    """Adafactor (Shazeer and Stern 2018), which keeps a row and a column instead of a matrix of
    second moments.

    Takes the arguments of ``torch.optim.Adafactor`` and keeps its state. Runs torch's own step on
    ``.grad``, which takes 4 bytes per element while it runs. Construct it over
    ``optim_parameters()``.
    """


class Muon(SteadyState, torch.optim.Muon):
    """Muon (Jordan et al. 2024): momentum made orthogonal by Newton-Schulz iterations.

    Takes the arguments of ``torch.optim.Muon`` and keeps its state, 4 bytes per element. Runs
    torch's own step on ``.grad``, which takes 4 more while it runs. Construct it over the matrices
    among ``optim_parameters()``, and another optimizer over the rest.

    Example:
        >>> masters = engine.optim_parameters()
        >>> muon = roundpipe.optim.Muon([master for master in masters if master.ndim == 2])
        >>> adamw = roundpipe.optim.AdamW([master for master in masters if master.ndim != 2])
    """


def _fused_by_default(kwargs: dict[str, Any]) -> dict[str, Any]:
    chosen = any(kwargs.get(name) for name in ("foreach", "differentiable", "capturable"))
    return kwargs if chosen else {"fused": True, **kwargs}
