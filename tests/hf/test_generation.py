"""A copy of a model generates on a device, with weights that stay there or pass through: the same
tokens as the model's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import GenerationConfig

from roundpipe_hf.generation import copy_on, generated
from tests.support.models import make_llama

DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda", 0),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
on_devices = pytest.mark.parametrize("device", DEVICES, ids=str)
GREEDY = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=3)


def full() -> Any:
    return make_llama(tied=True).eval()


def adapted() -> Any:
    torch.manual_seed(0)
    model = get_peft_model(
        make_llama(tied=False),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    return model.eval()


def prompts(rows: int = 3) -> dict[str, Tensor]:
    tokens = torch.randint(4, 60, (rows, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # padded on the left
    return {"input_ids": tokens, "attention_mask": mask}


def block_bytes(model: Any) -> int:
    return max(
        sum(p.nbytes for p in module.parameters())
        for name, module in model.named_modules()
        if name.endswith("layers.0")
    )


@on_devices
@pytest.mark.parametrize("make", [full, adapted])
@pytest.mark.parametrize("num_blocks", [0, 1, 3, 100], ids=lambda count: f"{count} resident")
def test_greedy_tokens(num_blocks: int, make: Callable[[], Any], device: torch.device) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rest = sum(p.nbytes for p in model.parameters())
    num_bytes = num_blocks * block_bytes(model) + (rest if num_blocks == 100 else 0)
    expected = model.generate(**prompts(), generation_config=GREEDY)
    made = generated(model, device, num_bytes, **prompts(), generation_config=GREEDY)
    assert torch.equal(made.cpu(), expected)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@on_devices
@pytest.mark.parametrize("num_streamed", [3, 4])
def test_every_forward_computes_with_weights_on_the_device(
    num_streamed: int, device: torch.device
) -> None:
    """Those that pass are brought again for each, and are the host's own in between."""
    model, seen = full(), set[int]()
    hosts = {parameter.data_ptr() for parameter in model.parameters()}
    inputs, blocks = prompts()["input_ids"].to(device), len(model.model.layers)
    outside = sum(p.nbytes for p in model.parameters()) - blocks * block_bytes(model)
    # The two buffers take the room of two blocks.
    room = outside + (blocks - num_streamed + 2) * block_bytes(model)
    with copy_on(model, device, room) as made:
        streamed = [p for block in made.model.layers for p in block.parameters()]
        assert sum(p.data_ptr() in hosts for p in streamed) == num_streamed * len(
            list(model.model.layers[0].parameters())
        )
        for block in made.model.layers:
            linear = block.mlp.down_proj
            linear.register_forward_pre_hook(lambda own, _: seen.add(own.weight.data_ptr()))
        logits = [made(inputs).logits for _ in range(3)]
    assert not seen & hosts
    expected = model(prompts()["input_ids"]).logits
    for each in logits:
        torch.testing.assert_close(each.cpu(), expected)


def test_fewer_rows_at_a_time_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = full()
    expected = model.generate(**prompts(5), generation_config=GREEDY)
    inner, seen = type(model).generate, []

    def generate(self: Any, **kwargs: Any) -> Tensor:
        seen.append(len(kwargs["input_ids"]))
        if seen[-1] > 2:
            raise torch.OutOfMemoryError("as asked for")
        return inner(self, **kwargs)

    monkeypatch.setattr(type(model), "generate", generate)
    made = generated(model, torch.device("cpu"), 1e9, **prompts(5), generation_config=GREEDY)
    assert torch.equal(made, expected)
    assert seen == [5, 2, 3, 1, 2]
