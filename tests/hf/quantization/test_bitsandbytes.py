"""A model that transformers has loaded in four bits trains as it is, like plain QLoRA."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from torch import nn
from transformers import BitsAndBytesConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from roundpipe import load_checkpoint, save_checkpoint
from roundpipe.errors import ConfigError
from roundpipe.quantized import QuantizedWeight
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, merge_and_save
from roundpipe_hf.quantization.modules import adopt_bitsandbytes
from roundpipe_hf.trl import RoundPipeSFTConfig, RoundPipeSFTTrainer
from tests.hf.quantization.test_reading import llama

pytestmark = pytest.mark.bitsandbytes


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    llama().save_pretrained(folder)
    return folder


def load(path: Path, **how: Any) -> LlamaForCausalLM:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **how}
    return LlamaForCausalLM.from_pretrained(
        path, quantization_config=BitsAndBytesConfig(**settings), device_map={"": "cpu"}
    )


HOW = {
    "nested": {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16},
    "float32": {"bnb_4bit_compute_dtype": torch.float32},
}


def adapted(model: Any, *, prepared: bool) -> Any:
    torch.manual_seed(1)
    if prepared:
        # Norms and embeddings become float32, and so do activations between linear layers.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def trained(trainer_class: Any, args_class: Any, model: Any, out: Path, **settings: Any) -> Any:
    rows = torch.randint(0, 64, (24, 8), generator=torch.Generator().manual_seed(2))
    args = args_class(
        output_dir=str(out),
        per_device_train_batch_size=4,
        max_steps=5,
        logging_steps=1,
        learning_rate=1e-2,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = trainer_class(model, args, train_dataset=data)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("prepared", [False, True], ids=["as loaded", "prepared"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("how", HOW)
def test_losses_are_those_of_plain_qlora(
    dense: Path, tmp_path: Path, how: str, devices: int, prepared: bool
) -> None:
    model = adapted(load(dense, **HOW[how]), prepared=prepared)
    _, expected = trained(Trainer, TrainingArguments, model, tmp_path)
    model = adapted(load(dense, **HOW[how]), prepared=prepared)
    trainer, losses = trained(
        RoundPipeTrainer, RoundPipeTrainingArguments, model, tmp_path, devices=devices
    )
    trainer.model_wrapped.close()
    # bitsandbytes multiplies in its own order; each of a few dozen roundings to bfloat16 is 2^-9.
    assert losses == pytest.approx(expected, rel=1e-3)
    assert losses[-1] < losses[0]


def test_sft_over_four_bits(dense: Path, tmp_path: Path) -> None:
    """TRL wraps the model itself, as it does a plain one."""

    def sft(trainer_class: Any, args_class: Any) -> list[float]:
        rows = [{"input_ids": list(range(n, n + 8))} for n in range(8)]
        args = args_class(
            str(tmp_path),
            max_steps=2,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=4,
            disable_tqdm=True,
            save_strategy="no",
            gradient_checkpointing=False,
        )
        torch.manual_seed(1)
        trainer = trainer_class(
            load(dense, **HOW["nested"]),
            args,
            train_dataset=Dataset.from_list(rows),
            processing_class=_Tokenizer.make(),
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = sft(SFTTrainer, SFTConfig)
    assert sft(RoundPipeSFTTrainer, RoundPipeSFTConfig) == pytest.approx(expected, rel=1e-3)


class _Tokenizer:
    @staticmethod
    def make() -> Any:
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        words = {f"w{n}": n for n in range(62)} | {"<pad>": 62, "<eos>": 63}
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
            pad_token="<pad>",
            eos_token="<eos>",
        )


def test_the_bytes_stay_where_they_are(dense: Path) -> None:
    model = load(dense, **HOW["nested"])
    layer = model.model.layers[0].mlp.down_proj
    address = layer.weight.data_ptr()
    from bitsandbytes.functional import dequantize_4bit

    expected = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    adopt_bitsandbytes(model)
    assert model.model.layers[0].mlp.down_proj is layer
    assert isinstance(layer.weight, QuantizedWeight)
    assert layer.weight.data_ptr() == address
    assert torch.equal(layer.weight.dequantize(), expected)
    assert isinstance(layer, nn.Linear)


def test_fp4_is_refused_before_anything_changes(dense: Path, tmp_path: Path) -> None:
    model = adapted(load(dense, bnb_4bit_quant_type="fp4"), prepared=False)
    args = RoundPipeTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match=r"q_proj.* is quantized as 'fp4'"):
        RoundPipeTrainer(model, args, train_dataset=[])
    assert not any(isinstance(p, QuantizedWeight) for p in model.parameters())


def test_an_engines_checkpoint_can_be_loaded(dense: Path, tmp_path: Path) -> None:
    """Its weights were written packed, as a file of the model's has them, and then did not fit."""
    model = adapted(load(dense), prepared=False)
    trainer, _ = trained(RoundPipeTrainer, RoundPipeTrainingArguments, model, tmp_path)
    engine, optimizer = trainer.model_wrapped, trainer.optimizer.optimizer.inner
    expected = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    save_checkpoint(tmp_path / "all.safetensors", engine, optimizer)
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.zero_()
    engine.reload_parameters()
    load_checkpoint(tmp_path / "all.safetensors", engine, optimizer)
    engine.synchronize()
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("how", HOW)
def test_saved_as_it_was_loaded(dense: Path, tmp_path: Path, how: str) -> None:
    """The config says four bits, so the file has to hold them: it held dense weights."""
    load(dense, **HOW[how]).save_pretrained(tmp_path / "theirs")
    model = adapted(load(dense, **HOW[how]), prepared=False)
    trainer, _ = trained(RoundPipeTrainer, RoundPipeTrainingArguments, model, tmp_path)
    trainer.model_wrapped.close()
    model.unload().save_pretrained(tmp_path / "ours")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in saved)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours", device_map={"": "cpu"})
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "theirs", device_map={"": "cpu"})
    rows = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        assert torch.equal(again(input_ids=rows).logits, plain(input_ids=rows).logits)


MERGES = {
    "merge_and_unload": lambda model: model.merge_and_unload(),
    "merge_adapter": lambda model: model.merge_adapter(),
}


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
@pytest.mark.parametrize("merge", MERGES)
def test_a_merge_in_place_is_refused_whole(
    dense: Path, tmp_path: Path, merge: str, closed: bool
) -> None:
    """PEFT had taken out the trained embeddings when it met the first weight in four bits, so the
    adapter that the error said to save was without them."""
    model = load(dense, **HOW["nested"])
    torch.manual_seed(1)
    settings = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["embed_tokens"]}
    model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **settings))
    trainer, _ = trained(RoundPipeTrainer, RoundPipeTrainingArguments, model, tmp_path)
    if closed:
        trainer.model_wrapped.close()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ConfigError, match=r"q_proj are quantized.*merge_and_save"):
        MERGES[merge](model)
    assert [name for name, _ in model.named_parameters()] == names
    trainer.save_model(str(tmp_path / "adapter"))
    merge_and_save(tmp_path / "adapter", dense, tmp_path / "merged")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    plain = LlamaForCausalLM.from_pretrained(dense)
    expected: Any = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
    rows = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        assert torch.equal(merged(input_ids=rows).logits, expected(input_ids=rows).logits)


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_unloaded_it_is_the_base(dense: Path, tmp_path: Path, closed: bool) -> None:
    rows, logits = torch.arange(16).reshape(2, 8), []
    for trainer_class, args in (
        (Trainer, TrainingArguments),
        (RoundPipeTrainer, RoundPipeTrainingArguments),
    ):
        model = adapted(load(dense, **HOW["float32"]), prepared=False)
        trainer, _ = trained(trainer_class, args, model, tmp_path)
        if closed and trainer_class is RoundPipeTrainer:
            trainer.model_wrapped.close()
        with torch.no_grad():
            logits.append(model.unload()(input_ids=rows).logits)
    # bitsandbytes adds in its own order, in float32; activations are rounded to the model's dtype.
    torch.testing.assert_close(logits[1], logits[0], rtol=2**-7, atol=2**-7)
