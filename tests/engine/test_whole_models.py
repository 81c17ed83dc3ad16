"""Models of transformers' that run whole, as one layer or as a part of another model.

A large ``upper_threshold`` ended in "cannot merge output[...]: DynamicCache", and LoRA on
``nn.MultiheadAttention`` in "is in no layer of the pipeline".
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    T5Config,
)

from roundpipe import ConfigError, virtual, wrap_model_to_roundpipe
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import engine_gradients
from tests.support.preset_models import ROWS, TINY, TOKENS, VOCABULARY, make_model

IDS = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % VOCABULARY
LABELS = IDS.clone()
LABELS[0, 3:] = LABELS[2, 6:] = -100  # so that the mean over tokens is not that over rows
T5 = T5Config(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
EVERYTHING = 1 << 40


class Holder(nn.Module):
    """A model around one of transformers', whose forward asks for no cache and gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = AutoModel.from_config(LlamaConfig(**TINY))
        self.head = nn.Linear(32, 3)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.inner(input_ids=ids).last_hidden_state)
        return outputs


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=LABELS).loss
    return loss


def classified(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=IDS, labels=torch.tensor([0, 1, 0, 1])).loss
    return loss


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor], Callable[[Any], int]]] = {
    "causal": (lambda: make_model("llama"), loss_of, lambda _: EVERYTHING),
    "seq2seq": (lambda: AutoModelForSeq2SeqLM.from_config(T5), loss_of, lambda _: EVERYTHING),
    "classifier": (
        lambda: AutoModelForSequenceClassification.from_config(LlamaConfig(**TINY)),
        classified,
        lambda _: EVERYTHING,
    ),
    "base": (
        lambda: AutoModel.from_config(LlamaConfig(**TINY)),
        lambda model: model(input_ids=IDS).last_hidden_state.square().mean(),
        lambda _: EVERYTHING,
    ),
    "held": (
        Holder,
        lambda model: model(IDS).square().mean(),
        lambda model: bytes_of(model.inner),
    ),
}


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_transformers_may_run_whole(name: str, devices: DeviceSet) -> None:
    make, call, upper_threshold = CASES[name]
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    expected = call(plain)
    expected.backward()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    with wrap_model_to_roundpipe(
        model,
        use_sequential_preset=False,
        upper_threshold=upper_threshold(model),
        devices=virtual(devices.count),
    ) as engine:
        loss = call(engine)
        devices.check(loss, expected, bitwise=False)
        loss.backward()
        devices.check(engine_gradients(engine), gradients, bitwise=False)
        if name == "causal":
            with pytest.raises(ConfigError, match="keep no key-value cache"):
                engine(input_ids=IDS, use_cache=True)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0])
        return outputs


def test_lora_on_torchs_attention_is_refused_by_name() -> None:
    """PEFT makes new parameters of its weights in every forward, so nobody can train the old."""
    model = get_peft_model(Attending(), LoraConfig(target_modules=["attention", "head"]))
    with pytest.raises(ConfigError, match="attention is a MultiheadAttention.*target_modules"):
        wrap_model_to_roundpipe(model, devices=1)
    model = get_peft_model(Attending(), LoraConfig(target_modules=["head"]))
    x = torch.randn(4, 5, 16)
    with wrap_model_to_roundpipe(model, devices=1) as engine:
        torch.testing.assert_close(engine(x), model(x))
