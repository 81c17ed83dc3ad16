"""Checkpoints quantized here: what others read, kept for the next time, whole whatever happens."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from roundpipe.errors import ConfigError
from roundpipe.quantized import FORMATS, QuantizedWeight
from roundpipe_hf import folders, load_pretrained
from roundpipe_hf.quantization import packing
from tests.hf.quantization.test_reading import CONFIG, llama

NUM_FILES = 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    llama().save_pretrained(folder, max_shard_size="70KB")
    assert len(list(folder.glob("*.safetensors"))) >= NUM_FILES
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("has_own_head", [False, True], ids=["of a language model", "its own"])
def test_a_classifier_has_a_dense_head_that_trains(
    source: Path, tmp_path: Path, has_own_head: bool
) -> None:
    """Scripts load it from a language model's files by ``num_labels``, and PEFT trains its head."""
    how: dict[str, Any] = {"model_class": AutoModelForSequenceClassification, "num_labels": 3}
    plain = LlamaForSequenceClassification.from_pretrained(source, num_labels=3)
    if has_own_head:
        source = tmp_path / "classifier"
        plain.save_pretrained(source)
    for _ in range(2):  # quantized here, and as it was quantized
        model = load_pretrained(source, quantization="int8", quantized_dir=tmp_path / "out", **how)
        assert model.config.num_labels == 3
        assert model.score.weight.shape == plain.score.weight.shape
        assert torch.equal(model.score.weight, plain.score.weight) == has_own_head
        assert {name for name, one in model.named_parameters() if one.requires_grad} >= {
            "score.weight"
        }
        quantized = {n for n, one in model.named_parameters() if isinstance(one, QuantizedWeight)}
        assert quantized == {n for n, _ in plain.named_parameters() if n.endswith("proj.weight")}
        source = tmp_path / "out"


def test_a_config_of_the_callers_counts(source: Path, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(source, rms_norm_eps=0.25)
    model = load_pretrained(
        source, quantization="int8", quantized_dir=tmp_path / "out", config=config
    )
    assert model.model.norm.variance_epsilon == 0.25
    assert not hasattr(config, "quantization_config")


_NAMES = {0: "a", 1: "b", 2: "c"}
_GIVEN: dict[str, dict[str, Any]] = {
    "names of labels": {"id2label": _NAMES, "num_labels": 3},
    "regression": {"num_labels": 1, "problem_type": "regression"},
    "a dtype by its name": {"dtype": "float32"},
    "a dtype by its older name": {"torch_dtype": torch.float32},
    "a setting": {"rms_norm_eps": 0.25, "attn_implementation": "eager"},
    "a config of the caller's own": {"config": LlamaConfig(**CONFIG, num_labels=3)},
    "a folder with a config": {"config": "classifier", "rms_norm_eps": 0.25},
}


@pytest.mark.parametrize("given", _GIVEN.values(), ids=_GIVEN.keys())
def test_what_is_given_counts_as_in_from_pretrained(
    source: Path, tmp_path: Path, given: dict[str, Any]
) -> None:
    """Also of files that are quantized already, of which a caller's config need not know: else
    codes would be taken for values."""
    if isinstance(given.get("config"), str):
        LlamaConfig(**CONFIG, num_labels=3).save_pretrained(tmp_path / given["config"])
        given = {**given, "config": str(tmp_path / given["config"])}
    plain = LlamaForSequenceClassification.from_pretrained(source, **given)
    given = {**given, "model_class": LlamaForSequenceClassification, "output_loading_info": True}
    first, info = load_pretrained(
        source, quantization="int8", quantized_dir=tmp_path / "out", **given
    )
    again, _ = load_pretrained(tmp_path / "out", **given)
    assert info["missing_keys"] == {"score.weight"}
    assert first.config.name_or_path == first.name_or_path == str(source)
    assert again.config.name_or_path == str(tmp_path / "out")
    for model in (first, again):
        assert isinstance(model.model.layers[0].self_attn.q_proj.weight, QuantizedWeight)
        assert model.model.norm.weight.dtype is plain.model.norm.weight.dtype
        of_files = {key: model.config.to_dict()[key] for key in ("_name_or_path", "architectures")}
        assert model.config.to_dict() == plain.config.to_dict() | of_files
        assert model.config._attn_implementation == plain.config._attn_implementation


@pytest.mark.parametrize("quantization", ["nf4", "nf4_double", "fp8", "int8"])
def test_linear_layers_but_the_head_are_quantized(
    source: Path, tmp_path: Path, quantization: str
) -> None:
    model = load_pretrained(source, quantization=quantization, quantized_dir=tmp_path / "out")
    plain = load_pretrained(source)
    for (name, weight), original in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(weight, QuantizedWeight) == name.endswith("proj.weight"), name
        expected = original
        if isinstance(weight, QuantizedWeight):
            form = FORMATS[quantization]
            parts = form.quantize(original.detach())
            expected = form.dequantize(parts, original.shape, original.dtype)
            weight = weight.dequantize()
        assert torch.equal(weight, expected), name
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


def test_stacked_experts(tmp_path: Path) -> None:
    config = GptOssConfig(
        **CONFIG, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    plain = load_pretrained(tmp_path / "source")
    expert = plain.model.layers[0].mlp.experts.gate_up_proj
    for quantization in ("mxfp4", "nf4", "nf4_double", "fp8", "int8"):
        model = load_pretrained(
            tmp_path / "source",
            quantization=quantization,
            quantized_dir=tmp_path / quantization,
        )
        experts = model.model.layers[0].mlp.experts.gate_up_proj
        form = FORMATS[quantization]
        expected = form.dequantize(form.quantize(expert.detach()), expert.shape, expert.dtype)
        # Those in eight bits were written with scales that were not read: codes became values.
        assert isinstance(experts, QuantizedWeight), quantization
        assert torch.equal(experts.dequantize(), expected), quantization
        attention = model.model.layers[0].self_attn.q_proj.weight
        assert isinstance(attention, QuantizedWeight) == (quantization != "mxfp4")


@pytest.mark.bitsandbytes
def test_bitsandbytes_reads_ours(source: Path, tmp_path: Path) -> None:
    ours = load_pretrained(source, quantization="nf4", quantized_dir=tmp_path / "out")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "out", device_map={"": "cpu"})
    from bitsandbytes.functional import dequantize_4bit

    weights = dict(ours.named_parameters())
    for name, weight in theirs.named_parameters():
        if hasattr(weight, "quant_state"):
            dense = dequantize_4bit(weight.data, weight.quant_state)
            assert torch.equal(dense, weights[name].dequantize()), name


def test_it_is_kept_in_the_cache(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "HF_HOME", str(tmp_path))
    load_pretrained(source, quantization="nf4")
    (folder,) = (tmp_path / "roundpipe").iterdir()
    times = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    load_pretrained(source, quantization="nf4")
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == times
    load_pretrained(source, quantization="int8")
    assert len(list((tmp_path / "roundpipe").iterdir())) == 2


def keys() -> Callable[[str], bool]:
    model = packing.on_meta(LlamaForCausalLM, LlamaConfig(**CONFIG))
    return packing.quantized_keys(model, "nf4")


@pytest.mark.parametrize("machines", [1, 2])
def test_processes_that_begin_together(source: Path, tmp_path: Path, machines: int) -> None:
    """The ranks of a run do so: one writes, the other finds what was written. Machines share the
    folder, and no folder for temporary files."""
    script = "import sys\nfrom pathlib import Path\nfrom roundpipe_hf.quantization import packing\n"
    script += "source, out = map(Path, sys.argv[1:])\n"
    script += "files = sorted(source.glob('*.safetensors'))\n"
    script += "packing.quantize_checkpoint(files, out, 'nf4', lambda key: 'proj' in key)\n"
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "out")]
    own = [tmp_path / f"machine{rank % machines}" for rank in range(2)]
    for folder in own:
        folder.mkdir(exist_ok=True)
    both = [subprocess.Popen(command, env=os.environ | {"TMPDIR": str(folder)}) for folder in own]
    assert [process.wait(timeout=100) for process in both] == [0, 0]
    packing.quantize_checkpoint(files_of(source), tmp_path / "alone", "nf4", keys())
    assert content(tmp_path / "out") == content(tmp_path / "alone")


def test_a_folder_that_is_written_is_locked_for_other_machines(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both had written the same unfinished file, as the lock was in their own temporary folder."""
    out, seen, write_tensors = tmp_path / "out", [], packing.write_tensors

    def looks(path: Path, *args: Any) -> None:
        with pytest.raises(Timeout):
            FileLock(out / "quantizing.lock").acquire(timeout=0)
        seen.append(path)
        write_tensors(path, *args)

    monkeypatch.setattr(packing, "write_tensors", looks)
    packing.quantize_checkpoint(files_of(source), out, "nf4", keys())
    assert len(seen) == len(files_of(source))
    assert not (out / "quantizing.lock").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_disk_without_locks_is_written_all_the_same(
    number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that was a file with its holder's name outlived a holder that was killed, and another
    machine waited for it forever."""

    def fails(*_: int) -> None:
        raise OSError(number, "no locks")

    out, seen, write_tensors = tmp_path / "out", set(), packing.write_tensors

    def looks(*args: Any) -> None:
        seen.update(file.read_bytes() for file in out.glob("*.lock"))
        write_tensors(*args)

    monkeypatch.setattr(packing, "write_tensors", looks)
    monkeypatch.setattr(fcntl, "flock", fails)
    packing.quantize_checkpoint(files_of(source), out, "nf4", keys())
    assert (out / "config.json").exists()
    assert seen <= {b""}


@pytest.mark.parametrize("begun", ["nf4", "int8"])
def test_another_machine_begins_between_looking_and_writing(
    begun: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files, of another format, were taken for parts of what was asked for."""
    out, refuse_damaged = tmp_path / "out", packing.refuse_damaged

    def meanwhile(files: list[Path]) -> None:
        refuse_damaged(files)
        monkeypatch.setattr(packing, "refuse_damaged", refuse_damaged)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        packing.quantize_checkpoint(files, out, begun, keys())

    monkeypatch.setattr(packing, "refuse_damaged", meanwhile)
    if begun == "nf4":
        packing.quantize_checkpoint(files_of(source), out, "nf4", keys())
    else:
        with pytest.raises(ConfigError, match="out holds something else"):
            packing.quantize_checkpoint(files_of(source), out, "nf4", keys())
    monkeypatch.setattr(packing, "refuse_damaged", refuse_damaged)
    packing.quantize_checkpoint(files_of(source), tmp_path / "alone", begun, keys())
    for name, made in content(tmp_path / "alone").items():
        assert (out / name).read_bytes() == made, name


def test_another_user_reads_what_is_finished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may neither open the lock that was left among temporary files, nor remove what was left in
    the folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = tmp_path / "out"
    packing.quantize_checkpoint(files_of(source), out, "nf4", keys())
    (out / "quantizing.json").write_text("{}")
    locks = {*tmp_path.glob("*.lock")}

    def refuses(self: Path, **_: Any) -> None:
        raise PermissionError(errno.EPERM, "not yours", str(self))

    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    monkeypatch.setattr(Path, "unlink", refuses)
    packing.quantize_checkpoint(files_of(source), out, "nf4", keys())
    assert len({*tmp_path.glob("*.lock")} - locks) == 1


def test_a_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way, whatever was said before: nothing unfinished is left, and it goes on later."""
    write_tensors, saved = packing.write_tensors, []

    def fails(path: Path, *args: Any) -> None:
        write_tensors(path, *args)
        saved.append(path)
        if len(saved) == 3:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(packing, "write_tensors", fails)
        message = r"model-00003.* takes about \d+ bytes, and \d+ are free.* call again"
        with pytest.raises(OSError, match=message):
            packing.quantize_checkpoint(files_of(source), tmp_path / "out", "nf4", keys())
    names = [file.name for file in (tmp_path / "out").iterdir()]
    assert len([name for name in names if name.endswith(".safetensors")]) == 2
    assert not [name for name in names if name.endswith(".part")]
    packing.quantize_checkpoint(files_of(source), tmp_path / "out", "nf4", keys())
    load_pretrained(tmp_path / "out")


def test_too_little_room_is_seen_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_SPARED_BYTES", 2**60)
    with pytest.raises(
        ConfigError, match=r"about 0\.\d GB are to be written and [\d.]+ GB are free"
    ):
        load_pretrained(source, quantization="nf4", quantized_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_else(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        load_pretrained(source, quantization="nf4", quantized_dir=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_unknown_quantization(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization is 'int3'; 'nf4', 'fp8'"):
        load_pretrained(source, quantization="int3", quantized_dir=tmp_path / "out")


def test_a_shape_that_does_not_divide(tmp_path: Path) -> None:
    config = LlamaConfig(**{**CONFIG, "intermediate_size": 33, "hidden_size": 36, "head_dim": 8})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"proj.weight: nf4: \d+ weights of shape"):
        load_pretrained(tmp_path / "source", quantization="nf4", quantized_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(source: Path, tmp_path: Path) -> None:
    load_pretrained(source, quantization="nf4", quantized_dir=tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    gone = sorted(set(index["weight_map"].values()))[1]
    (tmp_path / "out" / gone).unlink()
    with pytest.raises((ConfigError, OSError), match=gone.replace(".", r"\.")):
        load_pretrained(tmp_path / "out")
    with safe_open(source / gone, "pt"):
        pass  # the original was left alone


def test_another_checkpoint_or_quantization_does_not_get_what_is_there(
    source: Path, tmp_path: Path
) -> None:
    """A complete folder was taken for whatever was asked for: int8 was answered with nf4, and a
    checkpoint that was trained further with the weights of before."""
    own = shutil.copytree(source, tmp_path / "source")
    out = tmp_path / "out"
    load_pretrained(own, quantization="nf4", quantized_dir=out)
    before = content(out)
    for asked, path in (("int8", own), ("nf4", source)):
        with pytest.raises(ConfigError, match="out holds something else"):
            load_pretrained(path, quantization=asked, quantized_dir=out)
    shutil.copytree(source, own, dirs_exist_ok=True, copy_function=shutil.copyfile)
    with pytest.raises(ConfigError, match="out holds something else"):
        load_pretrained(own, quantization="nf4", quantized_dir=out)
    with pytest.raises(ConfigError, match="source holds something else"):
        load_pretrained(own, quantization="nf4", quantized_dir=own)
    assert content(out) == before


def test_files_that_the_index_does_not_name_are_left_out(source: Path, tmp_path: Path) -> None:
    """Mistral's checkpoints have all weights once more in a file of other names."""
    own = shutil.copytree(source, tmp_path / "source")
    shutil.copyfile(files_of(own)[0], own / "consolidated.safetensors")
    load_pretrained(own, quantization="nf4", quantized_dir=tmp_path / "out")
    assert [file.name for file in files_of(tmp_path / "out")] == [
        file.name for file in files_of(source)
    ]


@pytest.mark.parametrize("damage", ["cut", "no header", "no JSON", "missing", "index"])
def test_a_damaged_source_is_named_before_anything_is_written(
    source: Path, tmp_path: Path, damage: str
) -> None:
    own = shutil.copytree(source, tmp_path / "source")
    victim = files_of(own)[-1]
    whole = victim.read_bytes()
    if damage == "cut":
        victim.write_bytes(whole[:-8])
    elif damage == "no header":
        victim.write_bytes(whole[:4])
    elif damage == "no JSON":
        victim.write_bytes(whole[:8] + b"x" + whole[9:])
    elif damage == "missing":
        victim.unlink()
    else:
        victim = own / "model.safetensors.index.json"
        victim.write_text(victim.read_text()[:-20])
    with pytest.raises(ConfigError, match=rf"{victim.name} is (damaged|missing).* get it again"):
        load_pretrained(own, quantization="nf4", quantized_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_of_a_wider_model_is_named_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    """All of it was quantized and kept, and then could not be loaded."""
    own = shutil.copytree(source, tmp_path / "source")
    file = next(file for file in files_of(own) if any("q_proj" in key for key in load_file(file)))
    tensors = load_file(file)
    key = next(key for key in tensors if "q_proj" in key)
    tensors[key] = tensors[key].repeat(2, 1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"{key} has shape \(128, 64\) in .* takes \(64, 64\).* get it again"
    ):
        load_pretrained(own, quantization="nf4", quantized_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_folder_of_ours_is_named(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    load_pretrained(source, quantization="nf4", quantized_dir=out)
    for file in files_of(out)[::3]:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        with pytest.raises(ConfigError, match=rf"{file.name} is damaged .* empty its folder"):
            load_pretrained(source, quantization="nf4", quantized_dir=out)
        file.write_bytes(whole)
    last = files_of(out)[-1]
    last.unlink()
    with pytest.raises(ConfigError, match=rf"{last.name} is missing.* empty its folder"):
        load_pretrained(source, quantization="nf4", quantized_dir=out)
