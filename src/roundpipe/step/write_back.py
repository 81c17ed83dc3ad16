"""Which version each layer's working copies hold, and the writing of newer ones. See [Note:
versions]."""

from collections.abc import Iterable, Iterator, Sequence

from ..params.masters import Masters
from ..params.placement.pending import PendingUpdates
from ..params.window import GradientWindow
from ..params.working import LayerParameters, ParameterStore
from ..system.host_memory import free_host_bytes
from ..threads.interrupts import SteadyCondition
from ..trace import spans
from .late_error import LateError

_SPARED_BYTES = 2 << 30  # left to the system and the caller when memory is taken for speed only
_TOGETHER_BYTES = (
    64 << 20
)  # of working copies, which are written in one call: with adapters, those of many layers


class WriteBack:
    """Writes working copies on the optimizer thread, or on the caller's while that is idle.

    What keeps it from doing so goes to ``late`` and to the calls that wait for those weights,
    whoever comes first.
    """

    def __init__(
        self, condition: SteadyCondition, store: ParameterStore, masters: Masters, late: LateError
    ) -> None:
        self._condition = condition
        self._store = store
        self._masters = masters
        self._late = late
        self._written_back = [0] * len(store.layers)
        self.error: BaseException | None = None  # of the newest attempt, if that failed

    @property
    def version(self) -> int:
        """What every layer holds at least."""
        return min(self._written_back)

    def is_written_back(self, layer: int, version: int) -> bool:
        """Whether the layer's working copies hold ``version``. Called by workers under the engine's
        condition.

        Raises what keeps them from ever holding it.
        """
        if self._written_back[layer] >= version:
            return True
        if self.error is not None:
            self._late.forget(self.error)  # because the call that waits here delivers it
            raise self.error
        return False

    def write_back(
        self,
        version: int,
        layers: Sequence[LayerParameters],
        updates: PendingUpdates | None = None,
        window: GradientWindow | None = None,
    ) -> None:
        """Shallow layers first, because the next call's forward needs them first."""
        try:
            for some in self._small_ones_together(layers):
                with spans.span("write_back", layers=_numbers(some)):
                    self._masters.write_back(some, version, updates)
                if window is not None:
                    window.release_layers(
                        some
                    )  # before a call that may offload there has all its weights
                self._mark(_numbers(some), version)
            self.error = None
        except BaseException as error:
            error.add_note(f"RoundPipe: writing back the weights after step {version}")
            with self._condition:
                self._late.keep(error)
                self.error = error  # for the calls that wait for this version
            raise

    def write_back_behind(self, version: int) -> None:
        """Writes back the layers that do not hold ``version`` yet."""
        self.write_back(
            version,
            [layer for layer in self._store.layers if self._written_back[layer.layer] < version],
        )

    def update_aside(self, version: int, updates: PendingUpdates, window: GradientWindow) -> None:
        """While calls still read the version before: layers with one working copy are written back
        by the next step."""
        for some in self._small_ones_together(self._store.layers):
            with spans.span("update", layers=_numbers(some)):
                written_back = self._masters.write_back_aside(some, version, updates)
                self._masters.update(
                    (layer for layer in some if layer.layer not in written_back), updates
                )
            window.release_layers(some)
            self._mark(written_back, version)
        if not self._store.spares:
            self._make_spares()

    def _small_ones_together(
        self, layers: Sequence[LayerParameters]
    ) -> Iterator[list[LayerParameters]]:
        """Neighbours, while they are small together: none waits for the update of a large one
        behind it."""
        some, num_bytes = list[LayerParameters](), 0
        for layer in layers:
            own = self._masters.bytes_ahead(layer)
            if some and num_bytes + own > _TOGETHER_BYTES:
                yield some
                some, num_bytes = [], 0
            some.append(layer)
            num_bytes += own
        if some:
            yield some

    def set_back(self, layer: int, version: int) -> None:
        """Newer weights of the layer have yet to be written back."""
        with self._condition:
            self._written_back[layer] = version

    def advance(self, version: int) -> None:
        """After a failure nothing is written back, yet calls that wait for the version must go
        on."""
        with self._condition:
            self._written_back = [max(written_back, version) for written_back in self._written_back]
            self._condition.notify_all()

    def _make_spares(self) -> None:
        """After an update, when all other memory that a step takes is taken, but for another set of
        gradients."""
        num_bytes = self._store.second_buffer_bytes()
        if num_bytes and 2 * num_bytes + _SPARED_BYTES < free_host_bytes():
            self._store.make_spares()

    def _mark(self, layers: Iterable[int], version: int) -> None:
        with self._condition:
            for layer in layers:
                self._written_back[layer] = max(self._written_back[layer], version)
            self._condition.notify_all()


def _numbers(layers: Iterable[LayerParameters]) -> list[int]:
    return [layer.layer for layer in layers]
