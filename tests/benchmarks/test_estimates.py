"""The benchmark of estimates runs on a toy model, and finds what was predicted."""

import sys

import estimates
import measure
import pytest


def test_predictions_are_held_against_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(estimates, "STEPS", 8)
    monkeypatch.setattr(sys, "argv", ["estimates.py", "--tiny", "--setting", "0"])
    assert estimates.main() == 0
    (record,) = measure.parse_records(capsys.readouterr().out)
    assert estimates.LEAST <= record["device_ratio"] <= estimates.MOST
    assert record["step_ms"] > 0
