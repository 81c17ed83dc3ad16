"""Quantized checkpoints of others are read where they lie, and train as the plain libraries' do."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roundpipe.errors import ConfigError
from roundpipe.memory.mmap import FileMappings
from roundpipe.quantized import FORMATS, FP8, MXFP4, QuantizedWeight
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, load_pretrained

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def nf4(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nf4") / "out"
    load_pretrained(dense, quantization="nf4", quantized_dir=folder)
    return folder


@pytest.fixture(scope="module")
def nested(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As transformers writes it, with nested magnitudes."""
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    settings: Any = {"quantization_config": how, "device_map": {"": "cpu"}}
    folder = tmp_path_factory.mktemp("nested")
    LlamaForCausalLM.from_pretrained(dense, **settings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As DeepSeek and Qwen publish theirs."""
    folder = tmp_path_factory.mktemp("fp8")
    model = llama()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if "proj" in key]:
        tensors[key], tensors[f"{key}_scale_inv"] = FP8().quantize(tensors[key])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    add_to_config(folder, quantization_config=said)
    return folder


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As gpt-oss is published."""
    folder = tmp_path_factory.mktemp("mxfp4")
    torch.manual_seed(0)
    config = GptOssConfig(
        **CONFIG, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("gate_up_proj", "down_proj"))]:
        parts = MXFP4().quantize(tensors.pop(key))
        tensors |= dict(zip((f"{key}_blocks", f"{key}_scales"), parts, strict=True))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    add_to_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder


def add_to_config(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def dequantized(model: nn.Module) -> nn.Module:
    """The same model with dense weights in place of the quantized ones."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, QuantizedWeight):
                plain = nn.Parameter(parameter.dequantize(), requires_grad=False)
                setattr(module, name, plain)
    return model


KINDS = ["nf4", pytest.param("nested", marks=pytest.mark.bitsandbytes), "fp8", "mxfp4"]


@pytest.fixture(params=KINDS)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


def test_weights_stay_in_their_files(checkpoint: Path) -> None:
    model = load_pretrained(checkpoint)
    mappings = FileMappings.now()
    quantized = [p for p in model.parameters() if isinstance(p, QuantizedWeight)]
    assert quantized
    for weight in quantized:
        assert not weight.requires_grad
        assert all(
            mappings.file_of(part) == str(checkpoint / "model.safetensors") for part in weight.parts
        )
    in_memory = load_pretrained(checkpoint, mmap=False)
    assert not any(
        mappings.file_of(part)
        for p in in_memory.parameters()
        if isinstance(p, QuantizedWeight)
        for part in p.parts
    )


@pytest.mark.bitsandbytes
def test_logits_are_those_of_bitsandbytes(nested: Path) -> None:
    rows = torch.arange(24).view(2, 12)
    theirs = LlamaForCausalLM.from_pretrained(nested, device_map={"": "cpu"})
    ours = load_pretrained(nested)
    with torch.no_grad():
        # `train` because in evaluation bitsandbytes multiplies in another order on some CPUs.
        expected, actual = theirs.train()(rows).logits, ours.train()(rows).logits
    # Both round the same weights to bfloat16; their sums differ by a few of its steps.
    assert (actual - expected).abs().max() <= 4 * 2**-8 * expected.abs().max()


def train(model: Any, out: Path, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 64, (12, 8), generator=generator)
    args = RoundPipeTrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=4,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    trainer = RoundPipeTrainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainer.model_wrapped.close()
    return losses, weights


@pytest.mark.parametrize(("pin_model", "devices"), [("off", 1), ("alloc", 3)])
def test_adapters_train_as_over_dense_weights(
    checkpoint: Path, tmp_path: Path, pin_model: Any, devices: int
) -> None:
    """Bitwise: the device makes the same dense weights."""
    settings: dict[str, Any] = {"devices": devices, "pin_model": pin_model}
    losses, weights = train(load_pretrained(checkpoint), tmp_path, **settings)
    expected, dense_weights = train(dequantized(load_pretrained(checkpoint)), tmp_path, **settings)
    assert losses == expected
    for name, weight in weights.items():
        assert torch.equal(weight, dense_weights[name]), name


def test_a_trainer_given_the_path(nf4: Path, tmp_path: Path) -> None:
    """`peft_config` is TRL's; plain Trainer wraps nothing, so all of it is frozen or trains."""
    args = RoundPipeTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = RoundPipeTrainer(str(nf4), args, train_dataset=[])
    kinds = {type(p).__name__ for p in trainer.model.parameters()}
    assert "QuantizedWeight" in kinds


def damaged(folder: Path, tmp_path: Path, change: Any) -> Path:
    out = tmp_path / "damaged"
    out.mkdir()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text((folder / "config.json").read_text())
    return out


Q = "model.layers.1.self_attn.q_proj.weight"


def test_damaged_checkpoints_are_named(fp8: Path, tmp_path: Path) -> None:
    path = damaged(fp8, tmp_path, lambda tensors: tensors.pop(Q))
    with pytest.raises(ConfigError, match=rf"{Q}: the checkpoint has .*_scale_inv but not {Q}"):
        load_pretrained(path)
    content = (fp8 / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        load_pretrained(path)


def test_parts_of_another_size(fp8: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}_scale_inv"] = torch.ones(3, 1)

    with pytest.raises(ConfigError, match=rf"{Q}: fp8: weight_scale_inv has 3 elements .* takes 1"):
        load_pretrained(damaged(fp8, tmp_path, change))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_codes_without_scales_are_no_values(fp8: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """One scale may be in a file of another checkpoint, or be of the whole weight: codes were cast,
    and taken for the weight."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        scale = tensors.pop(f"{Q}_scale_inv")
        tensors[f"{Q}_scale"] = scale.mean()
        tensors[Q] = tensors[Q].float().to(dtype)

    with pytest.raises(ConfigError, match=rf"{Q} is {dtype} and lacks what else a weight in fp8"):
        load_pretrained(damaged(fp8, tmp_path, change))


@pytest.mark.parametrize(
    "state",
    ["{", "[]", "{}", '{"blocksize": 64, "shape": [64, 64], "dtype": "float7"}'],
)
def test_what_a_weight_is_has_to_be_said(nf4: Path, tmp_path: Path, state: str) -> None:
    key = f"{Q}.quant_state.bitsandbytes__nf4"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = torch.tensor(list(state.encode()), dtype=torch.uint8)

    with pytest.raises(ConfigError, match=rf"{key} does not say what the weight is"):
        load_pretrained(damaged(nf4, tmp_path, change))


def test_blocks_of_no_weights(nf4: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        state = '{"blocksize": 0, "shape": [64, 64], "dtype": "bfloat16"}'
        said = torch.tensor(list(state.encode()), dtype=torch.uint8)
        tensors[f"{Q}.quant_state.bitsandbytes__nf4"] = said

    with pytest.raises(ConfigError, match=rf"{Q}: nf4: blocks of 0"):
        load_pretrained(damaged(nf4, tmp_path, change))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [0, 0]},
            r"weight_block_size \[0, 0\] is not",
        ),
        ({"quant_method": "awq"}, "'awq' is not read"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "in 8 bits is not read"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'fp4' is not read"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "mxfp4"}, "none of .* tensors is quantized that way"),
    ],
)
def test_other_ways_are_refused(fp8: Path, tmp_path: Path, said: Any, message: str) -> None:
    path = damaged(fp8, tmp_path, lambda tensors: None)
    add_to_config(path, quantization_config=said)
    with pytest.raises(ConfigError, match=message):
        load_pretrained(path)


def test_one_quantization_over_another(fp8: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nf4': .* is quantized already, as fp8"):
        load_pretrained(fp8, quantization="nf4")


def test_weights_of_another_class(fp8: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for suffix in ("", "_scale_inv"):
            tensors[f"model.extra.weight{suffix}"] = tensors[f"{Q}{suffix}"].clone()

    with pytest.raises(
        ConfigError, match=r"LlamaForCausalLM has no quantized 'model.extra.weight'"
    ):
        load_pretrained(damaged(fp8, tmp_path, change))


@pytest.mark.parametrize("quantization", ["nf4", "fp8", "int8"])
def test_a_tensor_for_each_expert(tmp_path: Path, quantization: str) -> None:
    """The model has them in one stack, which is put together of quantized ones."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **CONFIG,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        head_dim=16,
    )
    plain = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    plain.save_pretrained(tmp_path / "source")
    model = load_pretrained(
        tmp_path / "source", quantization=quantization, quantized_dir=tmp_path / "out"
    )
    form = FORMATS[quantization]
    for block, original in zip(model.model.layers, plain.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight, dense = (getattr(b.mlp.experts, name) for b in (block, original))
            assert isinstance(weight, QuantizedWeight)
            assert not weight.requires_grad
            expected = form.dequantize(form.quantize(dense.detach()), dense.shape, dense.dtype)
            assert torch.equal(weight.dequantize(), expected)
    losses, weights = train(model, tmp_path, devices=3)
    model = load_pretrained(tmp_path / "out")
    expected_losses, dense_weights = train(dequantized(model), tmp_path, devices=3)
    assert losses == expected_losses
    for name, one in weights.items():
        assert torch.equal(one, dense_weights[name]), name


def test_experts_whose_blocks_would_not_stay_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers says so, in its report of the conversion."""
    config = Qwen3MoeConfig(
        **CONFIG, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2, head_dim=16
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        load_pretrained(tmp_path / "source", quantization="fp8", quantized_dir=tmp_path / "out")
    assert "fp8: weights of shape (4, 96, 64) cannot be put together" in caplog.text


def test_saved_dense_with_a_config_that_says_so(nf4: Path, tmp_path: Path) -> None:
    """What plain transformers loads of it are the dequantized weights."""
    model = load_pretrained(nf4)
    model.save_pretrained(tmp_path / "out")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    weights = dict(again.named_parameters())
    for name, weight in model.named_parameters():
        expected = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        assert torch.equal(weights[name], expected), name
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
