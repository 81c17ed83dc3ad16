"""What the user writes to weights between engine calls: it counts from the next call on, or is
refused."""

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import nn

from ..errors import ConfigError
from ..params.masters import Masters
from ..params.working import ParameterStore

if TYPE_CHECKING:
    from .thread import StepThread


class UserWrites:
    """Of one engine, whose step thread is ``steps``. Used by the caller's thread, but for
    ``refuse_overwritten``.

    Calls read what was written from the next one on. Masters follow only when the next step is
    called or somebody lists them: weights that are exchanged for an evaluation and put back leave
    them as they are. See [Note: writes].
    """

    def __init__(self, steps: "StepThread", store: ParameterStore, masters: Masters) -> None:
        self._steps = weakref.proxy(steps)
        self._store = store
        self._masters = masters
        self._is_one_to_follow = False
        self.num_noticed = 0

    def notice(self) -> None:
        """At the door of every engine call.

        Raises:
            ConfigError: a weight was written while an update of it was on its way. The update has
                taken its place, and gradients that came since are dropped.
        """
        if not self._store.writes.are_there:
            return
        # A synchronous step writes back behind the caller's back, and says then if it has
        # overwritten something.
        self._steps.wait_idle()
        written = self._store.writes.differing
        late = [parameter for parameter in written if self._is_behind(parameter)]
        self._write_again(late)
        self._store.writes.settle()
        self.num_noticed += any(not self._store.writes.is_on_host(each) for each in written)
        self._is_one_to_follow |= any(id(parameter) in self._store.stepped for parameter in written)
        if late:
            # Late backward stage runs may have computed with what was written.
            self._steps.zero_grad()
            self._steps.flush()
            raise self._overwritten(late[0])

    def follow(self) -> None:
        """Masters take over what was noticed."""
        if self._is_one_to_follow:
            self._masters.follow_written()
            self._is_one_to_follow = False

    def refuse_overwritten(self, write_back: Callable[[], None]) -> None:
        """A step has written back on the optimizer thread. Raises ConfigError for a weight that
        somebody has written since the step was called, whether before or after that."""
        written = [
            parameter
            for parameter in self._store.writes.differing
            if id(parameter) in self._store.stepped and not self._store.writes.is_on_host(parameter)
        ]
        if written:
            self._write_again(written)
            write_back()
            raise self._overwritten(written[0])

    def _write_again(self, written: Iterable[nn.Parameter]) -> None:
        """Masters are to take the place of what was written, also in a layer's image, which is
        taken for old as a whole."""
        layers = {use.layer for parameter in written for use in self._store.uses[id(parameter)]}
        keys = {id(use.parameter) for layer in layers for use in self._store.layers[layer].uses}
        self._store.ahead.update(keys & self._store.stepped)

    def _is_behind(self, parameter: nn.Parameter) -> bool:
        """Whether the user's own parameter is not the newest, or not what calls read."""
        key = id(parameter)
        if key not in self._store.stepped:
            return False
        home = self._store.whereabouts[self._store.uses[key][0].layer]
        is_newest = key not in self._store.ahead and home.is_home
        return not is_newest or self._steps.version < self._steps.num_steps

    def _overwritten(self, parameter: nn.Parameter) -> ConfigError:
        return ConfigError(
            f"parameter {self._store.name_of(parameter)!r} was changed while an update of it was "
            "still to be written back, which has taken the place of the change; weights may be "
            "changed between steps: call synchronize() before changing them"
        )
