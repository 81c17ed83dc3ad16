"""A GGUF file holds the model and its tokenizer: transformers reads both back."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from roundpipe.errors import ConfigError
from roundpipe_hf import export_gguf, folders, load_pretrained
from roundpipe_hf.export.vocabulary import _CUTS
from tests.support.byte_tokenizers import TEXT, tokenizer_of

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 2**-20,  # which float32 has, as GGUF files say it
}
MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"rope_theta": 1e6}),
    # transformers reads no size of heads of Qwen3, and takes its default.
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 128}),
}


def model_of(name: str, dtype: torch.dtype = torch.float16, **settings: Any) -> PreTrainedModel:
    model_class, config_class, own = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **own, **settings)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def saved(
    folder: Path, name: str, cut: str = "gpt-2", dtype: torch.dtype = torch.float16, **settings: Any
) -> PreTrainedModel:
    model = model_of(name, dtype, **settings)
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer_of(cut).save_pretrained(folder)
    return model.float()


def logits(model: PreTrainedModel) -> torch.Tensor:
    rows = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        return model.eval()(input_ids=rows).logits


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_read_back_as_it_was(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path / "model", name)
    export_gguf(tmp_path / "model", tmp_path / "out" / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    )
    weights = dict(read.named_parameters())
    for key, weight in model.named_parameters():
        assert torch.equal(weights[key], weight), key
    # Loaded, because what cast the model to float16 cast its frequencies too.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert torch.equal(logits(read), logits(model))
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.gguf"]


def test_biases_of_llama_are_in_the_order_of_their_rows(tmp_path: Path) -> None:
    """transformers reads no biases of Llama: row 2i + j of a head is row i of its half j."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(tmp_path / "model")
    tokenizer_of("gpt-2").save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    head_dim = 16
    for name, heads in (("q", 4), ("k", 2)):
        rows = [
            head * head_dim + j * head_dim // 2 + i
            for head in range(heads)
            for i in range(head_dim // 2)
            for j in range(2)
        ]
        projection = getattr(model.model.layers[1].self_attn, f"{name}_proj")
        bias = torch.from_numpy(tensors[f"blk.1.attn_{name}.bias"].data.copy())
        weight = torch.from_numpy(tensors[f"blk.1.attn_{name}.weight"].data.copy())
        assert torch.equal(bias, projection.bias[rows])
        assert torch.equal(weight, projection.weight[rows].half())
    assert "blk.1.attn_output.bias" in tensors


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_eight_bits_are_within_their_rounding(tmp_path: Path, name: str) -> None:
    model = saved(tmp_path / "model", name, dtype=torch.bfloat16)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="q8_0")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    weights = dict(read.named_parameters())
    for key, weight in model.named_parameters():
        if weight.dim() < 2:
            assert torch.equal(weights[key], weight), key
            continue
        largest = weight.reshape(-1, 32).abs().amax(1, keepdim=True)
        off = (weights[key] - weight).reshape(-1, 32).abs()
        # Half a step of 127 to the largest, and the scale's own rounding to float16.
        assert (off <= largest / 127 * (0.5 + 127 * 2**-11) + 1e-9).all(), key
    size = (tmp_path / "model.gguf").stat().st_size
    numbers = sum(weight.numel() for weight in model.parameters())
    assert size < 1.2 * numbers + 20_000


def test_rows_that_are_no_whole_blocks_stay_in_half_precision(tmp_path: Path) -> None:
    model = model_of("qwen2")
    config = Qwen2Config(**{**SIZES, "intermediate_size": 72})
    model = Qwen2ForCausalLM(config).to(torch.float16)
    model.save_pretrained(tmp_path / "model")
    tokenizer_of("qwen2").save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", dtype="q8_0")
    kinds = {
        one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors
    }
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"


def field(file: Path, key: str) -> Any:
    return gguf.GGUFReader(file).fields[key].contents()


@pytest.mark.parametrize("cut", _CUTS.values())
def test_the_tokenizer_comes_along(tmp_path: Path, cut: str) -> None:
    saved(tmp_path / "model", "qwen2" if cut == "qwen2" else "llama", cut)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    file = tmp_path / "model.gguf"
    assert field(file, "tokenizer.ggml.pre") == cut
    tokens = field(file, "tokenizer.ggml.tokens")
    assert len(tokens) == SIZES["vocab_size"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert tokens[-1] == f"[PAD{SIZES['vocab_size'] - 1}]"
    types = field(file, "tokenizer.ggml.token_type")
    assert types[:4] == [3, 3, 3, 1]
    assert types[-1] == 5
    assert field(file, "tokenizer.ggml.eos_token_id") == tokenizer.eos_token_id
    assert field(file, "tokenizer.ggml.add_bos_token") is False
    if cut in ("qwen2", "gpt-2"):
        read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        assert read(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
        assert read.decode(read(TEXT)["input_ids"]) == TEXT


@pytest.mark.parametrize("steps", [[], [normalizers.NFC()]], ids=len)
def test_a_tokenizer_whose_normal_form_is_a_list(tmp_path: Path, steps: list[Any]) -> None:
    """SmolLM2's has an empty one, read from its own GGUF file, and was refused."""
    saved(tmp_path / "model", "llama")
    own = tokenizer_of("gpt-2")._tokenizer
    own.normalizer = normalizers.Sequence(steps)
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert field(tmp_path / "model.gguf", "tokenizer.ggml.pre") == "gpt-2"
    own.normalizer = normalizers.Sequence([*steps, normalizers.Lowercase()])
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="Lowercase"):
        export_gguf(tmp_path / "model", tmp_path / "other.gguf")


def test_a_tokenizer_that_begins_every_text(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama")
    tokenizer = tokenizer_of("gpt-2")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert field(tmp_path / "model.gguf", "tokenizer.ggml.add_bos_token") is True
    assert field(tmp_path / "model.gguf", "tokenizer.chat_template") == "{{ messages }}"


def test_frequencies_of_llama_3(tmp_path: Path) -> None:
    """They are a tensor of their own; a frequency is divided by its factor."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = saved(tmp_path / "model", "llama", rope_parameters=rope)
    export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    tensors = {one.name: one for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    factors = torch.from_numpy(tensors["rope_freqs.weight"].data.copy())
    plain = LlamaForCausalLM(LlamaConfig(**SIZES)).model.rotary_emb.inv_freq
    torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq)
    assert factors[0] == 1
    assert factors[-1] == 8


def test_a_quantized_checkpoint_is_read_dequantized(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama")
    quantized = load_pretrained(
        tmp_path / "model", quantization="nf4", quantized_dir=tmp_path / "nf4"
    )
    export_gguf(tmp_path / "nf4", tmp_path / "model.gguf")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32
    )
    weights = dict(read.named_parameters())
    for key, weight in quantized.named_parameters():
        assert torch.equal(weights[key], weight.float()), key


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not exported"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='linear' is not exported",
        ),
        ({"vocab_size": 256}, r"has \d+ tokens, the model 256"),
    ],
)
def test_settings_that_are_not_exported(
    tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings}))
    model.save_pretrained(tmp_path / "model")
    tokenizer_of("gpt-2").save_pretrained(tmp_path / "model")
    refused(tmp_path, match)


def refused(tmp_path: Path, match: str, **how: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", **how)
    assert {file.name for file in tmp_path.iterdir()} == {"model"}


def test_other_models_and_tokenizers(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=64, n_layer=1, n_head=4)).save_pretrained(
        tmp_path / "model"
    )
    refused(tmp_path, "GPT2LMHeadModel is not exported to GGUF; LlamaForCausalLM")
    saved(tmp_path / "model", "llama")
    refused(tmp_path, "dtype is 'q4_0'; 'f16', 'q8_0' can be written", dtype="q4_0")
    own = Tokenizer(models.BPE(byte_fallback=True))
    own.pre_tokenizer = pre_tokenizers.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path / "model")
    refused(tmp_path, "no tokenizer of byte pairs over bytes .as sentencepiece's")
    own = tokenizer_of("gpt-2")._tokenizer
    spaces = pre_tokenizers.WhitespaceSplit()
    own.pre_tokenizer = pre_tokenizers.Sequence([spaces, own.pre_tokenizer])
    PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(tmp_path / "model")
    refused(tmp_path, "cuts words in a way that has no name .*WhitespaceSplit")
    (tmp_path / "model" / "tokenizer.json").unlink()
    refused(tmp_path, "has no tokenizer.json")


def test_a_value_that_is_too_large(tmp_path: Path) -> None:
    model = model_of("llama", torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 1e6
    model.save_pretrained(tmp_path / "model")
    tokenizer_of("gpt-2").save_pretrained(tmp_path / "model")
    refused(tmp_path, "lm_head.weight has values that are too large for float16")


def test_a_file_that_is_there(tmp_path: Path) -> None:
    saved(tmp_path / "model", "llama")
    (tmp_path / "model.gguf").write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "mine"


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "model", "llama")
    monkeypatch.setattr(folders, "_SPARED_BYTES", 2**60)
    refused(tmp_path, r"about 0\.\d GB are to be written and [\d.]+ GB are free")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "model", "llama")

    def fails(self: Any, content: Any) -> None:
        raise OSError("4096 requested and 1024 written")  # as NumPy says it

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fails)
    with pytest.raises(OSError, match=rf"disk of {tmp_path} .* takes about \d+ bytes, and \d+"):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf")
    assert {file.name for file in tmp_path.iterdir()} == {"model"}


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "model", "llama")
    found = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    refused(tmp_path, r"pip install roundpipe-hf\[gguf\]")
