"""Examples end with one line that says what to do, where something has to be done first: a package
is not installed, an adapter is none. They ended in tracebacks."""

import runpy
import sys
from pathlib import Path

import pytest

import fetch_assets
from fetch_assets import SMOLLM2, AssetError, cached
from tests.support import ROOT

EXAMPLES = ROOT / "examples"
MISSING = [
    ("sft.py", "trl", "trl"),
    ("dpo.py", "trl", "trl"),
    ("grpo.py", "datasets", "trl"),
    ("run_clm.py", "datasets", "hf"),
    ("run_image_classification.py", "datasets", "hf"),
]


@pytest.mark.parametrize(("script", "package", "extra"), MISSING)
def test_a_package_that_is_not_installed(
    script: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert (
        ended.value.code
        == f"error: {package} is not installed: pip install 'roundpipe-hf[{extra}]'"
    )


def test_a_part_of_ours_that_is_missing_is_no_users_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "roundpipe_hf.trl.sft", None)
    with pytest.raises(ModuleNotFoundError, match=r"roundpipe_hf\.trl\.sft"):
        runpy.run_path(str(EXAMPLES / "sft.py"), run_name="__main__")


def test_a_reader_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for before anything is downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch_assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AssetError, match=r"gguf, which reads SmolLM2.*'roundpipe-hf\[hf\]'"):
        cached(SMOLLM2, lambda source, target: None)
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_folder_that_is_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to the explanation is in the next line."""
    flags = ["--adapter", str(tmp_path), "--base", str(tmp_path), "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["export.py", *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "export.py"), run_name="__main__")
    first, *more = str(ended.value.code).splitlines()
    assert first.startswith(f"error: {tmp_path} has no adapter_config.json")
    assert more == ["what to do: python -m roundpipe explain ConfigError"]
