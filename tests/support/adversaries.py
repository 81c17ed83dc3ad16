"""Adversarial devices for tests: made in sets, and asked afterwards whether anything was done
without a wait."""

from roundpipe.testing.adversarial import AdversarialDevice


class FullDevice(AdversarialDevice):
    """Tells planners that it has next to no room, so that all kept inputs wait on the host."""

    def limit_bytes(self, held: int = 0) -> int:
        return 1


class Adversaries:
    """Some adversarial devices with one seed; stands where a `DeviceSet` gives the `devices`
    argument."""

    def __init__(
        self,
        count: int,
        seed: int = 0,
        num_bytes: int | None = None,
        *,
        kind: type[AdversarialDevice] = AdversarialDevice,
    ) -> None:
        self.count = count
        self.argument = [kind(index, seed=seed, num_bytes=num_bytes) for index in range(count)]

    def __str__(self) -> str:
        return f"adversarial{self.count}"

    @property
    def faults(self) -> list[str]:
        return [fault for device in self.argument for fault in device.faults]
