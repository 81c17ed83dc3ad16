"""Tells how much host memory the inputs that calls keep may take: what is free, of the system's or
of a limit, when everything else that an engine needs is there."""

from collections.abc import Iterable
from math import inf

from torch import nn

from ..errors import ConfigError
from ..params.dtypes import GradientRules
from ..quantized import stored_bytes
from ..system.host_memory import SPARED_BYTES, free_host_bytes, resident_bytes

# Of the masters' bytes: two, as torch's AdamW makes them. Until a step has made some, nobody knows
# better.
_MOMENTS = 2


class HostRoom:
    """One engine's. Used by the caller's thread, but for ``note_update``.

    Args:
        most: what the process is to stay under; infinite where nobody has said.
        parameters: the model's.
        has_state_file: masters and moments take no memory.
        num_ranks: processes of which each has about as large a share of the masters, and of the
            others' copies in the weights' dtype.

    Attributes:
        on_disk: bytes of masters in a state file, and of moments as AdamW keeps them.
    """

    def __init__(
        self,
        most: float,
        parameters: Iterable[nn.Parameter],
        rules: GradientRules,
        *,
        has_state_file: bool = False,
        num_ranks: int = 1,
    ) -> None:
        self.most = most
        parameters = list({id(parameter): parameter for parameter in parameters}.values())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.weights = sum(map(stored_bytes, parameters))
        self.frozen = self.weights - sum(map(stored_bytes, trained))
        self.gradients = sum(p.numel() * rules.dtypes(p).offloaded.itemsize for p in trained)
        own = sum(p.numel() * rules.master(p).itemsize for p in trained) // num_ranks
        copies = sum(map(stored_bytes, trained)) * (num_ranks - 1) // num_ranks
        self.masters = 0 if has_state_file else own + copies
        self._moments = 0 if has_state_file else _MOMENTS * own
        self.on_disk = (own, _MOMENTS * own) if has_state_file else (0, 0)
        self._has_updated = False
        self._latest: float | None = None

    def refuse_too_little(self, *, in_files: int = 0) -> None:
        """Raises ConfigError if the limit is less than what is needed whatever an optimizer keeps.

        Args:
            in_files: bytes of weights that stay there.
        """
        weights = self.weights - in_files
        needed = weights + self.masters + self.gradients
        if needed > self.most:
            raise ConfigError(
                f"max_host_memory is {_gigabytes(self.most)}, and {_gigabytes(needed)} are needed "
                f"before an optimizer keeps anything: {_gigabytes(weights)} for weights, "
                f"{_gigabytes(self.masters)} for masters, {_gigabytes(self.gradients)} for "
                "gradients; raise it, train adapters, quantize what is frozen, or use "
                "optimizer_state_dir"
            )

    def note_update(self, ms: float) -> None:
        """A step is over. On the optimizer thread."""
        self._has_updated = True

    def for_inputs(self, held_bytes: int, *, has_masters: bool, has_stepped: bool) -> float:
        """Bytes that all kept inputs may take together on the host.

        Args:
            held_bytes: what they take of it now.
            has_masters: these are there.
            has_stepped: a step was queued at least.
        """
        if has_stepped and not self._has_updated and self._latest is not None:
            return self._latest  # because some of what the first step makes is there, some to come
        free = free_host_bytes()
        left = (free - SPARED_BYTES if free else inf, self.most - resident_bytes())
        coming = 0 if self._has_updated else self.gradients + self._moments
        coming += 0 if has_masters else self.masters
        self._latest = max(0.0, min(left) + held_bytes - coming)
        return self._latest


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.4g} GB"
