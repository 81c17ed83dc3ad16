"""A merge of damaged files writes nothing; one that runs out of disk or finds the folder taken
leaves nothing that looks whole and is not, and called again it ends with the same bytes. It never
has the model in memory.

Merges that are killed are in tests/failures/test_killed_at_random.py.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from roundpipe.errors import ConfigError
from roundpipe_hf import folders, merge_and_save
from tests.hf.export.test_merging import ATTENTION, adapter_of, base
from tests.support.byte_tokenizers import tokenizer_of


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("source")
    path = base("llama", folder, max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) >= 4
    return adapter_of(path, folder / "adapter", target_modules="all-linear"), path


NUMBERS = r"takes about \d+ bytes, and \d+ are free"


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_a_full_disk(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = folders.write_tensors, []

    def fails(path: Path, *args: Any) -> None:
        write(path, *args)
        written.append(path)
        if len(written) == 3:
            raise OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("roundpipe_hf.export.merging.write_tensors", fails)
        with pytest.raises(
            OSError, match=rf"disk of {out} while model-00003.*{NUMBERS}.*call again"
        ):
            merge_and_save(*source, out)
    assert len(list(out.glob("*.safetensors"))) == 2
    assert not list(out.glob("*.part"))
    merge_and_save(*source, out)
    merge_and_save(*source, tmp_path / "whole")
    assert content(out) == content(tmp_path / "whole")


def test_a_disk_that_fills_while_the_tokenizer_is_copied(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a file had its name, and the error said nothing of what to do."""
    adapter, path = source[0], shutil.copytree(source[1], tmp_path / "base")
    (path / "tokenizer.json").write_text("{}" * 100)
    copyfile, out = shutil.copyfile, tmp_path / "out"

    def fails(source: Path, target: Path) -> None:
        copyfile(source, target)
        os.truncate(target, 100)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fails)
        with pytest.raises(OSError, match=rf"disk of {out} while .*{NUMBERS}.*call again"):
            merge_and_save(adapter, path, out)
    assert not [file for file in out.iterdir() if file.suffix == ".part" or "token" in file.name]
    merge_and_save(adapter, path, out)
    assert (out / "tokenizer.json").read_text() == "{}" * 100


def test_too_little_room_is_seen_before(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_SPARED_BYTES", 2**60)
    with pytest.raises(ConfigError, match=r"about 0\.\d GB are to be written and [\d.]+ GB are"):
        merge_and_save(*source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_else(source: tuple[Path, Path], tmp_path: Path) -> None:
    adapter, path = source
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        merge_and_save(adapter, path, tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    before = content(path)
    with pytest.raises(ConfigError, match="holds something else"):
        merge_and_save(adapter, path, path)
    assert content(path) == before


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def widen(file: Path) -> None:
    tensors = load_file(file)
    key = next(key for key in tensors if tensors[key].dim() == 2)
    save_file({**tensors, key: tensors[key].repeat(2, 1)}, file, metadata={"format": "pt"})


def lose_a_tensor(file: Path) -> None:
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (cut, "model-0000.* is damaged .* get it again"),
        (Path.unlink, "model-0000.* is missing.* get it again"),
        (widen, r"has shape \(\d+, \d+\), the model has \(\d+, \d+\).* get it again"),
        (lose_a_tensor, "of LlamaForCausalLM are in no file.* get it again"),
    ],
)
@pytest.mark.parametrize("place", [0, -1])
def test_files_of_the_base_that_are_not_whole(
    damage: Callable[[Path], None],
    match: str,
    place: int,
    source: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """What was missing, or another model's, and not the adapter's to change, was left out or
    written all the same: a checkpoint that looked whole and could not be loaded."""
    adapter, path = source[0], shutil.copytree(source[1], tmp_path / "base")
    damage(sorted(path.glob("*.safetensors"))[place])
    with pytest.raises(ConfigError, match=match):
        merge_and_save(adapter, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (cut, "adapter_model.safetensors is damaged .* get it again"),
        (Path.unlink, "adapter has no adapter_model.safetensors; get it again"),
        (lose_a_tensor, "does not fit LlamaForCausalLM.* and 0 others are only in one of them"),
    ],
)
def test_an_adapter_that_is_not_whole(
    damage: Callable[[Path], None], match: str, source: tuple[Path, Path], tmp_path: Path
) -> None:
    """The error was safetensors' own, without a name."""
    adapter, path = shutil.copytree(source[0], tmp_path / "adapter"), source[1]
    damage(adapter / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=match):
        merge_and_save(adapter, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_the_hub_is_fetched_whole(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its config was."""
    adapter, path = source

    def fetch(name: str, file: str, **_: Any) -> str | None:
        assert name == "somebody/adapter"
        (tmp_path / "cached").mkdir(exist_ok=True)
        if not (adapter / file).exists():
            return None
        return str(shutil.copyfile(adapter / file, tmp_path / "cached" / file))

    monkeypatch.setattr("roundpipe_hf.export.adapter.cached_file", fetch)
    merge_and_save("somebody/adapter", path, tmp_path / "out")
    merge_and_save(adapter, path, tmp_path / "of the folder")
    for file in (tmp_path / "out").glob("*.safetensors"):
        made = load_file(tmp_path / "of the folder" / file.name)
        torch.testing.assert_close(load_file(file), made, rtol=0, atol=0)


def test_a_finished_folder_is_known_again(source: tuple[Path, Path], tmp_path: Path) -> None:
    adapter, path = source
    out = tmp_path / "out"
    merge_and_save(adapter, path, out)
    times = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    merge_and_save(adapter, path, out)
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == times
    other = adapter_of(path, tmp_path / "other", **ATTENTION)
    with pytest.raises(ConfigError, match="holds something else"):
        merge_and_save(other, path, out)


def test_what_lies_beside_an_adapter_does_not_matter(
    source: tuple[Path, Path], tmp_path: Path
) -> None:
    """A result in the adapter's own folder changed what the folder was known by."""
    adapter, path = tmp_path / "adapter", source[1]
    shutil.copytree(source[0], adapter)
    merge_and_save(adapter, path, adapter / "merged")
    (adapter / "runs").mkdir()
    before = content(adapter / "merged")
    merge_and_save(adapter, path, adapter / "merged")
    assert content(adapter / "merged") == before


def test_a_merge_of_another_adapter_is_not_gone_on_with(
    source: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, path = source
    out = tmp_path / "out"
    own = shutil.copytree(adapter, tmp_path / "adapter")

    def stops(self: folders.NewFolder, *args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(folders.NewFolder, "finish", stops)
        with pytest.raises(KeyboardInterrupt):
            merge_and_save(own, path, out)
    adapter_of(path, own, target_modules="all-linear", r=2)
    with pytest.raises(ConfigError, match="'identity': .*, not the beginning of"):
        merge_and_save(own, path, out)


# One small merge first, because libraries allocate some things once. Then the most that is no
# file's, seen at every tensor.
MEASURE = """
import sys
from pathlib import Path
import tqdm.auto
from roundpipe_hf import export_gguf, merge_and_save

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

class Bar(tqdm.auto.tqdm):
    most = 0
    def update(self, n=1):
        Bar.most = max(Bar.most, anonymous())
        return super().update(n)

small, large, out = sys.argv[1:]
merge_and_save(f"{small}/adapter", f"{small}/base", f"{out}/small")
export_gguf(f"{out}/small", f"{out}/small.gguf", "q8_0")
tqdm.auto.tqdm = Bar
before = anonymous()
merge_and_save(f"{large}/adapter", f"{large}/base", f"{out}/large")
assert Bar.most
print(Bar.most - before)
Bar.most, before = 0, anonymous()
export_gguf(f"{out}/large", f"{out}/large.gguf", "q8_0")
print(Bar.most - before)
"""


@pytest.mark.slow
def test_the_model_is_never_in_memory(tmp_path: Path) -> None:
    for name, layers in (("small", 1), ("large", 24)):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=320,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=8,
        )
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(tmp_path / name / "base")
        tokenizer_of("gpt-2").save_pretrained(tmp_path / name / "base")
        settings = {"r": 2, "target_modules": "all-linear", "init_lora_weights": False}
        get_peft_model(model, LoraConfig(**settings)).save_pretrained(tmp_path / name / "adapter")
    size = sum(file.stat().st_size for file in (tmp_path / "large/base").iterdir())
    command = [sys.executable, "-c", MEASURE, *map(str, (tmp_path / "small", tmp_path / "large"))]
    process = subprocess.run(
        [*command, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"},
    )
    assert process.returncode == 0, process.stderr
    assert size > 150e6
    # A tensor and what PEFT adds to it, in float32; a few objects for each layer.
    merging, exporting = map(int, process.stdout.split()[-2:])
    assert max(merging, exporting) < size / 8, (merging, exporting)
