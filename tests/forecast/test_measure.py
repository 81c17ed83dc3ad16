"""Measurements of this machine: the arithmetic is checked on lanes whose times are known."""

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.device import VirtualDevice
from roundpipe.errors import ConfigError
from roundpipe.forecast import measure
from roundpipe.forecast.machine import Machine

from .runs import measure_little, small_config


class Clocked:
    """A lane on which each piece of work takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.now = seconds, 0.0

    def work(self) -> None:
        self.now += self._seconds

    def mark(self) -> "Clocked.Mark":
        return Clocked.Mark(self.now)

    def record(self) -> "Clocked":
        return self

    def wait(self) -> None:
        return

    class Mark:
        def __init__(self, at: float) -> None:
            self._at = at

        def seconds_since(self, earlier: "Clocked.Mark") -> float:
            return self._at - earlier._at


def test_the_slowest_lane_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_SECONDS", 1e-3)
    lanes: list[Any] = [Clocked(1 / 1024), Clocked(1 / 256), Clocked(1 / 512)]
    assert measure._rate([(lane, lane.work) for lane in lanes]) == pytest.approx(256)


def test_what_is_made_once_does_not_count() -> None:
    """The first time takes ten seconds, which a kernel may need to be compiled."""
    times = count()
    rate = measure._settled(lambda number: number / 16 + (10 if next(times) == 0 else 0), 1e-3)
    assert rate == 16


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    measure_little(monkeypatch)
    return measure.measure()


def test_an_update_is_planned_to_take_what_it_took(found: dict[str, Any]) -> None:
    machine, elements = Machine(**found["machine"]), 10**9
    measured_ms = 1e3 * elements / found["parameters_per_second"]
    planned_ms = machine.update_ms(elements, "adamw", torch.bfloat16.itemsize)
    by_arithmetic = Machine(host=1e9, cores=machine.cores).update_ms(elements, "adamw", 2)
    assert planned_ms == pytest.approx(max(measured_ms, by_arithmetic))


def test_rates_of_virtual_devices_are_not_those_of_gpus(found: dict[str, Any]) -> None:
    """Plans are for GPUs: without one only the host's part is kept for them."""
    assert found["tflops"] > 0
    assert found["link_up"] > 0
    assert found["link_down"] > 0
    if torch.accelerator.is_available():
        assert {"tflops", "link", "gpus", "gpu_memory"} < found["machine"].keys()
        assert found["page_locking"] > 0
    else:
        assert found["machine"].keys() == {"ram", "host", "cores"}
        assert found["page_locking"] is None


def test_several_devices_copy_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_little(monkeypatch)
    devices = [VirtualDevice(index) for index in range(3)]
    assert min(measure.link_of(devices, seconds=1e-3)[:2]) > 0
    assert measure.matmul_tflops(devices, torch.float32) > 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"machine": {"warp": 9}}', '{"machine": {"ram": "much"}}']
)
def test_a_file_that_is_not_understood_is_none(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = measure.check_writable()
    assert measure.measured_machine() == {}
    path.write_text(text)
    assert measure.measured_machine() == {}
    path.write_text(json.dumps({"machine": {"ram": "9GB", "cores": 3}}))
    assert measure.measured_machine() == {"ram": "9GB", "cores": 3}
    assert measure.measured_machine(is_virtual=True) == {}, "what is virtual was not measured"


def test_rates_of_virtual_devices_are_kept_for_them(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure.check_writable().write_text(json.dumps(found))
    here = measure.measured_machine(is_virtual=True)
    if torch.accelerator.is_available():
        assert "tflops" not in here
    else:
        assert (here["tflops"], here["link"]) == (found["tflops"], found["link_up"])
        assert {"tflops", "link"}.isdisjoint(measure.measured_machine())


def test_a_user_without_a_home_has_measured_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's user may have no entry among users, and no HOME."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert measure.measured_machine() == {}
    with pytest.raises(ConfigError, match="cannot be written to"):
        measure.check_writable()


def test_estimates_take_only_what_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`roundpipe.estimate` says the same on every machine; the command fills in what is here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measure.check_writable().write_text(json.dumps({"machine": {"tflops": 1e-3}}))
    options: dict[str, Any] = {"seq": 16, "async_optimizer": False, "optimizer": "adamw"}
    here = roundpipe.estimate(small_config(), **options)
    given = roundpipe.estimate(small_config(), **options, tflops=Machine().tflops)
    assert here == given
