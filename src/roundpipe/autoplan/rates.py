"""What the machine itself takes as it turns out while running, whatever is trained. Shared between
threads."""

import threading
from collections import deque
from collections.abc import Hashable
from typing import Literal

Way = Literal["up", "down"]

# Share of a new measurement in the smoothed one. No single one counts for more than so many times
# what was known: a hiccup of the machine is no property of a layer, and what is one shows again.
_NEW, _MOST = 0.3, 2.0
# A smaller relative change is no reason to plan again.
NOTABLE = 0.05
# Updates after which their time says something, and of which the shortest counts.
_RECENT = 8


class Changes:
    """Counts changes large enough to plan again, each measured from where the last one that counted
    ended."""

    def __init__(self) -> None:
        self.count = 0
        self._announced: dict[Hashable, float] = {}

    def note(self, key: Hashable, now: float) -> None:
        before = self._announced.get(key)
        if before is None or abs(now - before) > NOTABLE * before:
            self._announced[key] = now
            self.count += 1


class Rates:
    """What the machine itself takes, whatever the shapes: copies each way, and an update. Any
    thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # because sums of bytes and of times belong together
        self._changes = Changes()
        self._copies: dict[Way, tuple[float, float]] = {}
        self._updates_seen = 0
        self._update_ms = 0.0
        self._recent_updates_ms: deque[float] = deque(maxlen=_RECENT)

    @property
    def version(self) -> int:
        """Grows when something changed that could change a plan."""
        return self._changes.count

    def record_copy(self, way: Way, num_bytes: int, ms: float) -> None:
        """Bytes and times are smoothed apart, so that a large copy says more than a small one."""
        if not num_bytes or ms <= 0:
            return
        with self._lock:
            all_bytes, all_ms = self._copies.get(way, (0.0, 0.0))
            all_bytes, all_ms = (1 - _NEW) * all_bytes + num_bytes, (1 - _NEW) * all_ms + ms
            self._copies[way] = all_bytes, all_ms
            self._changes.note(way, all_ms / all_bytes)

    def ms_per_byte(self, way: Way, estimate: float) -> float:
        num_bytes, ms = self._copies.get(way, (0.0, 0.0))
        return ms / num_bytes if num_bytes else estimate

    def record_update(self, ms: float) -> None:
        """The second one stands for the first, in which optimizers allocate their moments."""
        with self._lock:
            self._update_ms = ms if self._updates_seen < 2 else smoothed(self._update_ms, ms)
            self._updates_seen += 1
            self._recent_updates_ms.append(ms)
            self._changes.note("update", self._update_ms)

    @property
    def is_warm(self) -> bool:
        """True once there was an update after the first, in which optimizers allocate."""
        return self._updates_seen >= 2

    @property
    def knows_update(self) -> bool:
        """True once so many updates were seen that some were neither the first ones, which
        allocate, nor disturbed."""
        return self._updates_seen >= _RECENT

    @property
    def least_update_ms(self) -> float:
        """The shortest of the latest updates. What the machine does besides makes updates longer,
        never shorter."""
        with self._lock:
            return min(self._recent_updates_ms, default=0.0)

    def update_ms(self, estimate: float) -> float:
        return self._update_ms if self._updates_seen else estimate


def smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + _NEW * (min(now, _MOST * before) - before)
