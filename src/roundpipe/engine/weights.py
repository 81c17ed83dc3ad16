"""The weights of an engine as its user sees them: working copies, masters, gradients."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import ConfigError
from ..layers.structure import Structure
from ..params.masters import Masters
from ..params.working import ParameterStore
from ..step import context
from ..step.hyperparameters import know_master
from ..step.thread import StepThread
from .forwarding import ForwardingModule
from .state import Host

T = TypeVar("T")


class Listed(list[T]):
    """A list that may be read with `next` as well, as torch's ``parameters()`` are."""

    _rest: Iterator[T] | None = None

    def __next__(self) -> T:
        if self._rest is None:
            self._rest = iter(self)
        return next(self._rest)


def let_pass(parameters: Iterable[torch.Tensor]) -> None:
    """Marks what is in their ``.grad`` as there to be looked at: a step takes no notice of it."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.is_only_shown = True  # type: ignore[attr-defined]


class HostWeights(ForwardingModule):
    """An `Engine`, whose attributes these are, lets its user do this with the weights."""

    _host: Host
    _structure: Structure
    _store: ParameterStore
    _masters: Masters
    _steps: StepThread

    def _begin(self, what: str) -> None:
        self._host.begin(what, self._structure)

    def _flush(self, what: str) -> None:
        self._begin(what)
        self._steps.flush()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[Any]:
        """Yields names and working weights, up to date; in an optimizer context names and masters.

        Waits for pending updates outside of an optimizer context. ``parameters()`` does the same
        without names.
        """
        if context.sees_masters():
            yield from self.optim_named_parameters(prefix, remove_duplicate)
            return
        self._flush("named_parameters()")
        yield from self.model.named_parameters(prefix, recurse, remove_duplicate)

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> "Listed[tuple[str, nn.Parameter]]":
        """Lists names, as in the original model, and masters of all trainable parameters.

        A master has its weight's shape, lies on the host in ``optim_dtype``, and exists from this
        call on: 4 bytes per element in fp32. Its ``grad`` is there only inside ``step_fn``.

        Args:
            prefix: put before every name.
            remove_duplicate: list a tied weight once, by its first name.
        """
        if context.current_step() is None:
            self._steps.user_writes.follow()
        named: list[tuple[str, nn.Parameter]] = []
        for name, parameter in self.model.named_parameters(
            prefix, remove_duplicate=remove_duplicate
        ):
            if parameter.requires_grad:
                master = self._masters.of(parameter)
                know_master(master)
                named.append((name, master))
        return Listed(named)

    def optim_parameters(self) -> "Listed[nn.Parameter]":
        """Lists the masters of all trainable parameters, each once. Construct optimizers over
        these.

        Example:
            >>> optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-4)
        """
        return Listed(master for _, master in self.optim_named_parameters())

    def synchronize(self) -> None:
        """Waits for everything, writes back the newest weights, and puts copies of the accumulated
        gradients into the model's ``.grad``, in the weights' dtype.

        A weight without a gradient gets ``grad = None``. Changes of these copies have no effect on
        training.
        """
        self._flush("synchronize()")
        for parameter in self._store.parameters:
            gradient = self._steps.window.gradient(parameter) if parameter.requires_grad else None
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
        let_pass(self._store.parameters)

    def _refuse_other_gradients(self) -> None:
        """Raises for a gradient that somebody else has put into ``.grad`` of the model's own: by a
        backward past the engine, of a penalty on weights for example, or by hand; and for one that
        was set in a master's."""
        for parameter, master in self._masters.existing():
            if master.is_set_outside:
                raise ConfigError(
                    f"the gradient of the engine's copy of {self._store.name_of(parameter)!r} was "
                    "set outside of step_fn, and the update would not see it: set it to None, and "
                    "change gradients in step_fn or add to them by engine.add_gradients"
                )
        for parameter in self._store.parameters:
            gradient = parameter.grad
            if gradient is None or not parameter.requires_grad:
                continue
            if not hasattr(gradient, "is_only_shown"):
                raise ConfigError(
                    f"parameter {self._store.name_of(parameter)!r} has a gradient in .grad that "
                    "did not come through the engine, whose update would not see it. Hand it over "
                    "by engine.add_gradients({parameter: parameter.grad}), and set .grad to None"
                )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the original model's state dict, every update in it.

        Takes what ``nn.Module.state_dict`` takes. Tensors are the model's own, not copies: the next
        update that is written back shows in them.
        """
        self._flush("state_dict()")
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads weights; masters of the loaded keys follow at the incoming precision. Drops
        accumulated gradients, keeps the optimizer's moments.

        Args:
            state_dict: tensors by the original model's names, in its shapes and any dtype.
            strict: as torch's: names that are missing or unknown are an error.
            assign: must be False.

        Raises:
            ConfigError: ``assign=True``, which would replace the memory that devices copy from.
        """
        if assign:
            raise ConfigError(
                "load_state_dict(assign=True) would replace the engine's weights; use assign=False"
            )
        self._flush("load_state_dict()")
        self._steps.zero_grad()
        self._steps.note_load()
        try:
            return self.model.load_state_dict(state_dict, strict=strict)
        finally:
            # Also after an error, which torch raises with part of the weights loaded, and whatever
            # became of the keys.
            for name, parameter in self.model.named_parameters(remove_duplicate=False):
                self._masters.follow_load(parameter, state_dict.get(name))

    def reload_parameters(self) -> None:
        """Makes masters and devices follow the model after it was loaded, or changed in a way that
        torch does not count: through ``.data`` in place, or through NumPy.

        A master becomes what its parameter holds, to the bit. Only one whose parameter nobody is
        known to have written, and which is what was written back from it, keeps its own precision.
        Drops accumulated gradients, keeps the optimizer's moments. What torch counts needs no call
        of this: see docs/internals/model-state.md.

        Raises:
            ConfigError: an update had not been written back when the parameters were changed. It
                has taken the place of the change.

        Example:
            >>> engine.synchronize()
            >>> engine.model.load_state_dict(weights)
            >>> engine.reload_parameters()
        """
        self._begin("reload_parameters()")
        self._steps.wait_idle()
        self._steps.raise_late_error()
        if self._masters.are_ahead:
            raise ConfigError(
                "an update was still to be written back when the parameters were changed; call "
                "synchronize() before changing them, then reload_parameters()"
            )
        self._steps.zero_grad()
        self._steps.note_load()
        for parameter, _ in self._masters.existing():
            self._masters.follow_load(parameter, None)

    def send_again(self) -> None:
        """Has the next call send devices every weight and buffer again, because somebody may have
        written to them through ``.data`` or NumPy. May be called at any time.

        Masters do not follow, other than in `reload_parameters`: weights may be exchanged and put
        back.
        """
        self._steps.send_again()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients not yet stepped, and the copies ``synchronize()`` made of them.

        What a step that is under way works on is not touched, but what it leaves is dropped.
        ``set_to_none`` is accepted as torch's is, and ignored: gradients are always dropped.
        """
        self._begin("zero_grad()")
        self._steps.zero_grad()
        for parameter in self._store.parameters:
            parameter.grad = None
