"""An asset is in the cache complete and as pinned, or not at all. Uses a wheel made here and no
network."""

import hashlib
import shutil
import zipfile
from pathlib import Path

import pytest

import fetch_assets
from fetch_assets import Asset, AssetError, IndexUnreachableError, cache_root, cached

CONTENT = b"words"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asset:
    """A written back asset: pip finds its wheel in a folder and asks nobody else."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_asset-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_asset/words.txt", CONTENT)
        archive.writestr(
            "tiny_asset-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-asset\nVersion: 1.0\n",
        )
        archive.writestr(
            "tiny_asset-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_asset-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return pinned(wheel_sha256=sha256(wheel.read_bytes()))


def pinned(wheel_sha256: str, member_sha256: str = sha256(CONTENT), version: str = "1.0") -> Asset:
    return Asset(
        package="tiny-asset",
        version=version,
        wheel_sha256=wheel_sha256,
        member="tiny_asset/words.txt",
        member_sha256=member_sha256,
        folder="tiny",
        revision=1,
    )


def copy(source: Path, target: Path) -> None:
    shutil.copy(source, target / source.name)


def refuse(source: Path, target: Path) -> None:
    raise AssertionError("converted a second time")


def left_in_cache() -> list[str]:
    return sorted(path.name for path in cache_root().iterdir())


@pytest.fixture
def without_pip(asset: Asset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of it takes more than a second; the first and the last test have it."""
    (wheel,) = (tmp_path / "index").iterdir()
    monkeypatch.setattr(
        fetch_assets, "_download_wheel", lambda _, scratch: Path(shutil.copy(wheel, scratch))
    )


def test_is_fetched_and_converted_once(asset: Asset) -> None:
    folder = cached(asset, copy)
    assert (folder / "words.txt").read_bytes() == CONTENT
    assert cached(asset, refuse) == folder
    assert left_in_cache() == ["tiny-1.0-r1"]


@pytest.mark.usefixtures("without_pip")
def test_failed_conversion_leaves_nothing(asset: Asset) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "half").touch()
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        cached(asset, fail)
    assert left_in_cache() == []
    assert (cached(asset, copy) / "words.txt").exists()


@pytest.mark.usefixtures("without_pip")
def test_second_process_may_finish_first(asset: Asset) -> None:
    """Both convert; the one that comes late uses what the other left."""

    def overtaken(source: Path, target: Path) -> None:
        copy(source, target)
        cached(asset, copy)

    assert (cached(asset, overtaken) / "words.txt").read_bytes() == CONTENT
    assert left_in_cache() == ["tiny-1.0-r1"]


@pytest.mark.usefixtures("without_pip")
def test_other_wheel_or_other_file_than_pinned_is_refused(asset: Asset) -> None:
    with pytest.raises(AssetError, match="tiny_asset-1.0-py3-none-any.whl has sha256"):
        cached(pinned(wheel_sha256=sha256(b"other")), copy)
    with pytest.raises(AssetError, match="words.txt has sha256"):
        cached(pinned(wheel_sha256=asset.wheel_sha256, member_sha256=sha256(b"other")), copy)
    assert left_in_cache() == []


def test_missing_release_is_told_from_an_unreachable_index(
    asset: Asset, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = pinned(wheel_sha256=asset.wheel_sha256, version="2.0")
    with pytest.raises(AssetError, match="tiny-asset==2.0") as caught:
        cached(missing, copy)
    assert not isinstance(caught.value, IndexUnreachableError)

    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(IndexUnreachableError, match="cannot be reached"):
        cached(missing, copy)
