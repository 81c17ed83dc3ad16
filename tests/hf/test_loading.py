"""Weights that need no change stay in their safetensors files, while training too; whatever was
copied is told.

The judge of where a weight lies is the kernel (/proc/self/smaps), of numbers plain
`from_pretrained` and `Trainer`.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, LlamaForCausalLM, Trainer

from roundpipe.errors import ConfigError
from roundpipe.memory.mmap import FileMapping, FileMappings
from roundpipe_hf import RoundPipeTrainer, files, load_pretrained, load_pretrained_mmap
from tests.support.mapped import private_bytes
from tests.support.models import make_llama
from tests.support.reference import weights_of
from tests.support.trainers import (
    assert_same_logs,
    differ,
    logged,
    make_trainer,
    run,
    token_rows,
    weights,
)

ROWS = token_rows(6)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(make_llama(tied=False), tmp_path / "saved")


def save(model: Any, folder: Path, **how: Any) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def lies_in_files(model: nn.Module, folder: Path) -> list[bool]:
    mappings = FileMappings.now()
    return [str(folder) in (mappings.file_of(parameter) or "") for parameter in model.parameters()]


def warnings_in(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(
        record.getMessage() for record in caplog.records if record.name == "roundpipe_hf.loading"
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tied", "sharded"])
def test_every_weight_stays_in_its_file(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_llama(tied=kind == "tied")
    model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    folder = save(model, tmp_path / "saved", max_shard_size="20KB" if kind == "sharded" else "1GB")
    loaded = load_pretrained_mmap(folder)
    assert type(loaded) is LlamaForCausalLM
    assert all(lies_in_files(loaded, folder))
    assert not differ(weights_of(loaded), weights_of(model))
    assert not warnings_in(caplog)
    if kind == "tied":
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    if kind == "sharded":
        assert len(list(folder.glob("*.safetensors"))) > 1


def test_weights_in_the_cache_of_the_hub_stay_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps files under names of their content, and gives them their own names by links."""
    repository = tmp_path / "hub" / "models--somebody--tiny"
    folder = save(make_llama(tied=False), repository / "snapshots" / "0123", max_shard_size="20KB")
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    for number, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(repository / "blobs" / f"{number:064}")
        file.symlink_to(blob)
    loaded = load_pretrained_mmap(
        "somebody/tiny", cache_dir=tmp_path / "hub", local_files_only=True
    )
    assert all(lies_in_files(loaded, repository / "blobs"))
    assert not warnings_in(caplog)
    load_pretrained_mmap(
        "somebody/tiny", cache_dir=tmp_path / "hub", local_files_only=True, dtype=torch.float16
    )
    assert "F32 in the file, torch.float16 in the model" in warnings_in(caplog)


def test_other_dtype_copies_and_says_so_for_every_weight(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_pretrained_mmap(saved, dtype=torch.bfloat16)
    assert not any(lies_in_files(loaded, saved))
    said = warnings_in(caplog)
    assert "39 of 39 parameters" in said
    assert "F32 in the file, torch.bfloat16 in the model" in said
    assert "model.layers.{0-3}.self_attn.q_proj.weight" in said
    assert "lm_head.weight" in said


def test_a_new_head_is_told_and_the_rest_stays(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_pretrained_mmap(
        saved, model_class=AutoModelForSequenceClassification, num_labels=3
    )
    assert lies_in_files(loaded, saved).count(False) == 1
    assert "not in the checkpoint, so made anew: score.weight" in warnings_in(caplog)


def test_stacked_experts_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The files hold one matrix per expert, the model all of a block's experts in one parameter."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
    )
    folder = save(Qwen3MoeForCausalLM(config), tmp_path / "moe")
    loaded = load_pretrained_mmap(folder)
    names = [name for name, _ in loaded.named_parameters()]
    copied = [
        name for name, lies in zip(names, lies_in_files(loaded, folder), strict=True) if not lies
    ]
    assert copied
    assert all(".experts." in name for name in copied)
    said = warnings_in(caplog)
    assert "made from other tensors" in said
    assert "model.layers.{0-1}.mlp.experts.gate_up_proj" in said
    assert "q_proj" not in said


def test_a_pickled_checkpoint_is_told(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    load_pretrained_mmap(saved)
    assert "the checkpoint has no safetensors files" in warnings_in(caplog)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid 1\n"])
def test_what_is_no_such_file_is_named(content: bytes, saved: Path) -> None:
    """A download that brought nothing, or a pointer: its first bytes are no length."""
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged .* get it again"):
        load_pretrained_mmap(saved)


def test_a_model_that_is_not_in_the_cache_is_fetched(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read from the files itself was only looked for in the cache, and said to be none."""
    asked: list[bool] = []

    def fetch(name: str, file: str, **options: Any) -> str | None:
        asked.append(bool(options.get("local_files_only")))
        there = saved / file
        return str(there) if there.exists() and not asked[-1] else None

    monkeypatch.setattr(files, "cached_file", fetch)
    assert files.Checkpoint("somebody/model", {}).files == [saved / "model.safetensors"]
    assert asked[0]
    assert not asked[-1]


@pytest.mark.parametrize("size", [20, -1])
def test_a_file_that_was_cut_is_named(size: int, saved: Path) -> None:
    """A download that was interrupted, in the header or behind it."""
    file = saved / "model.safetensors"
    os.truncate(file, size if size > 0 else file.stat().st_size + size)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged .* get it again"):
        load_pretrained_mmap(saved)


def widen(file: Path) -> str:
    tensors = load_file(file)
    key = next(key for key, tensor in tensors.items() if tensor.ndim == 2)
    save_file(tensors | {key: tensors[key].repeat(2, 1)}, file, metadata={"format": "pt"})
    return key


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "in memory"])
@pytest.mark.parametrize("damage", ["index", "missing", "wider", "cut"])
def test_what_is_wrong_with_a_checkpoint_is_named(damage: str, mmap: bool, tmp_path: Path) -> None:
    """The libraries said that a string has no end, or which option was not set."""
    folder = save(make_llama(tied=False), tmp_path / "saved", max_shard_size="20KB")
    file = sorted(folder.glob("*.safetensors"))[1]
    match = rf"{file.name} is missing.* get it again"
    if damage == "index":
        file = folder / "model.safetensors.index.json"
        file.write_text(file.read_text()[:-20])
        match = rf"{file.name} is damaged.* get it again"
    elif damage == "missing":
        file.unlink()
    elif damage == "wider":
        match = rf"{widen(file)} has shape .* takes .* get it again"
    else:
        file.write_bytes(file.read_bytes()[:-8])
        match = rf"{file.name} is damaged.* get it again"
    with pytest.raises(ConfigError, match=match):
        load_pretrained(folder, mmap=mmap)


def test_another_size_may_be_asked_for(saved: Path) -> None:
    """It is made anew then, as transformers does."""
    key = widen(saved / "model.safetensors")
    packed = {"quantization": "int8", "quantized_dir": saved.parent / "int8"}
    ways: list[dict[str, Any]] = [{}, packed]
    for settings in ways:
        model = load_pretrained(saved, ignore_mismatched_sizes=True, **settings)
        assert key in dict(model.named_parameters())


def test_options_that_change_every_weight_are_refused(saved: Path) -> None:
    options: dict[str, Any] = {
        "device_map": "auto",
        "quantization_config": {},
        "disable_mmap": True,
        "use_safetensors": False,
    }
    for name, value in options.items():
        with pytest.raises(ConfigError, match=name):
            load_pretrained_mmap(saved, **{name: value})


def test_a_mapping_holds_a_tensor_only_as_a_whole() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    start = tensor.data_ptr()
    for end, file in ((start + 100, "/a"), (start + 99, None)):
        assert (
            FileMappings([FileMapping(start, end, "/a"), FileMapping(0, 1, "/b")]).file_of(tensor)
            == file
        )
    assert FileMappings([]).file_of(tensor) is None


# Training.


def with_lora(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(
        model,
        LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )


@pytest.mark.parametrize("layout", ["aligned", pytest.param("misaligned", marks=pytest.mark.slow)])
def test_lora_on_mapped_weights_gives_the_numbers_of_weights_in_memory(
    layout: str, saved: Path
) -> None:
    """Bitwise, and the plain Trainer's to 1e-5; the frozen weights still lie in the file, not a
    page of it written."""
    if layout == "misaligned":
        misalign(saved / "model.safetensors")
    mapped = with_lora(load_pretrained_mmap(saved))
    in_memory = with_lora(make_llama(tied=False))
    plain = with_lora(make_llama(tied=False))
    ours = run(make_trainer(RoundPipeTrainer, mapped, ROWS, pin_model="off", devices=2))
    other = run(make_trainer(RoundPipeTrainer, in_memory, ROWS, pin_model="alloc", devices=2))
    assert logged(ours) == logged(other)
    assert not differ(weights(ours), weights(other))
    assert_same_logs(logged(ours), logged(run(make_trainer(Trainer, plain, ROWS))))
    frozen = [not parameter.requires_grad for parameter in mapped.parameters()]
    assert lies_in_files(mapped, saved) == frozen
    assert private_bytes(saved) == 0


def misalign(file: Path) -> None:
    """Moves the tensors to odd addresses: one more byte of header. Whether readers accept that is
    theirs to decide."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" "
    header += b" " * (len(header) % 2 == 0)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])


def test_a_trainer_takes_a_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything trains, so the mapped pages become the process's own one by one; the file stays as
    it was."""
    before = (saved / "model.safetensors").read_bytes()
    ours = make_trainer(RoundPipeTrainer, str(saved), ROWS, pin_model="off")  # type: ignore[arg-type]
    assert all(lies_in_files(ours.model, saved))
    plain = make_trainer(Trainer, LlamaForCausalLM.from_pretrained(saved), ROWS)
    assert_same_logs(logged(run(ours)), logged(run(plain)))
    assert private_bytes(saved) > 0
    assert (saved / "model.safetensors").read_bytes() == before
    in_memory = make_trainer(RoundPipeTrainer, str(saved), ROWS)  # type: ignore[arg-type]
    assert_same_logs(logged(run(in_memory)), logged(plain))
