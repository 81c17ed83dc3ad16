"""A copy of a model generates on a device, with weights that stay there or pass through: the same
tokens as the model's own."""

import copy
import logging
import types
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.models.llama.modeling_llama import LlamaModel

from roundpipe.engine import generation
from roundpipe.engine.generation import copy_on, generated
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.plan.memory import readable
from roundpipe.quantized import INT8, QuantizedWeight
from roundpipe.transfer.turns import StreamedBlocks
from tests.support.branching import make_t5, t5_batch
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, train_steps
from tests.support.models import llama_batch, make_llama, make_lora_llama

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


def of_t5() -> Any:
    return make_t5().eval()


def source_rows() -> dict[str, Tensor]:
    batch = t5_batch().kwargs
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def block_bytes(model: Any) -> int:
    return max(
        sum(p.nbytes for p in module.parameters())
        for name, module in model.named_modules()
        if name.endswith("layers.0")
    )


def quantized() -> Any:
    model = adapted()
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            weight = QuantizedWeight.quantize(module.weight.detach(), INT8())
            module.weight = nn.Parameter(weight, requires_grad=False)
    assert any(isinstance(p, QuantizedWeight) for p in model.parameters())
    return model


@on_devices
@pytest.mark.parametrize("make", [full, adapted, quantized])
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


@on_devices
@pytest.mark.parametrize("num_bytes", [0, 2**40], ids=["streamed", "resident"])
def test_nothing_of_a_copy_is_left_though_it_is_a_part_of_a_circle(
    num_bytes: float, device: torch.device
) -> None:
    """A model whose ``generate`` was bound to it, as a trainer's is. A copy that stayed would have
    the next one's blocks streamed."""
    model = full()
    model.generate = types.MethodType(type(model).generate, model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with copy_on(model, device, num_bytes) as made:
        made(prompts()["input_ids"].to(device))
    assert made.generate.__self__ is made
    assert not sum(tensor.nbytes for tensor in (*made.parameters(), *made.buffers()))
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("num_kept", [*range(1, 6), 8])
def test_blocks_that_pass_are_spread_among_those_that_stay(num_kept: int) -> None:
    """The last ones passed, and only one of them was on its way while the others computed."""
    blocks = [[nn.Parameter(torch.zeros(5))] for _ in range(8)]
    nbytes = 5 * 4
    room = 8 * nbytes if num_kept == 8 else (num_kept + 2) * nbytes  # two buffers
    stays = list(generation._staying(blocks, room))
    assert sum(stays) == num_kept
    for before in range(9):  # of any first blocks as large a part stays as of all
        assert abs(sum(stays[:before]) - num_kept * before / 8) < 1


@on_devices
@pytest.mark.parametrize("make", [full, quantized])
def test_each_block_passes_once_for_each_token(
    make: Callable[[], Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, passed = make(), list[int]()
    fill = StreamedBlocks._fill
    monkeypatch.setattr(
        StreamedBlocks, "_fill", lambda own, index: (passed.append(index), fill(own, index))
    )
    caplog.set_level(logging.INFO, "roundpipe")
    generation._say_once.cache_clear()
    asked = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    generated(model, device, 0, **prompts(), **asked)
    layers = next(one for one in model.modules() if isinstance(one, LlamaModel)).layers
    blocks = len(layers)
    # The last block of the last token has sent for the first one again.
    assert passed == [*range(blocks)] * 7 + [0]
    weights = [
        weight.num_bytes if isinstance(weight, QuantizedWeight) else weight.nbytes
        for weight in layers.parameters()
    ]
    assert f"{blocks} of {blocks} blocks are streamed" in caplog.text
    assert f"{readable(sum(weights))} for each token of all rows" in caplog.text


@pytest.mark.parametrize("is_asked", [False, True], ids=["by the config alone", "asked"])
@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
def test_a_cache_is_kept_whatever_the_models_config_says(
    devices: DeviceSet, *, is_asked: bool, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    """A rollout never ended: configs say use_cache=False for training, and the generation config
    that is made from one says it too, so that each token took the work of all before it."""
    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    model, lengths = full(), list[int]()
    model.config.use_cache = False
    model.generation_config = GenerationConfig.from_model_config(model.config)
    expected = model.generate(**prompts(), generation_config=GREEDY)
    forward = LlamaModel.forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    config = copy.deepcopy(GREEDY)
    if is_asked:
        config.use_cache = False
    found = engines(model, devices).generate(**prompts(), generation_config=config)
    assert torch.equal(found, expected)
    prompt, tokens = prompts()["input_ids"].shape[1], len(lengths)
    assert lengths == [
        prompt,
        *(range(prompt + 1, prompt + tokens) if is_asked else [1] * (tokens - 1)),
    ]
    assert config.use_cache is (False if is_asked else None)
    assert model.generation_config.use_cache is False


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
def test_no_cache_is_asked_of_blocks_that_recompute(
    devices: DeviceSet, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    """While a model trains with gradient checkpointing its blocks keep no keys and values, whoever
    asks: each token was made of the one before it alone."""
    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    model = full()
    model.config.use_cache = False
    model.generation_config = GenerationConfig.from_model_config(model.config)
    for parameter in model.parameters():
        parameter.data.mul_(8)  # so that what came before a token decides what comes next
    model.gradient_checkpointing_enable()
    model.train()
    expected = model.generate(**prompts(), generation_config=GREEDY)
    found = engines(model, devices).generate(**prompts(), generation_config=GREEDY)
    assert torch.equal(found, expected)


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


@pytest.mark.parametrize(
    "more",
    [{"return_dict_in_generate": True}, {"pixel_values": torch.zeros(3, 3, 8, 8)}],
    ids=lambda more: next(iter(more)),
)
def test_what_is_not_row_by_row_is_not_made_in_halves(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many images as rows are not one for each: the halves would have got each other's."""
    model = full()

    def generate(self: Any, **_: Any) -> Tensor:
        raise torch.OutOfMemoryError("as asked for")

    monkeypatch.setattr(type(model), "generate", generate)
    with pytest.raises(torch.OutOfMemoryError, match="as asked for") as caught:
        generated(model, torch.device("cpu"), 1e9, **prompts(), **more)
    assert f"{next(iter(more))} is of all rows together" in str(caught.value.__notes__)


def test_nothing_is_said_of_arguments_that_nobody_gave(caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns of a configuration with arguments beside it. The user's is as it was."""
    config = copy.copy(GREEDY)
    generated(full(), torch.device("cpu"), 1e9, **prompts(), generation_config=config)
    assert "together with generation-related arguments" not in caplog.text
    assert config == GREEDY


WAYS: dict[str, dict[str, Any]] = {
    "by arguments": {"max_new_tokens": 9, "do_sample": False, "eos_token_id": 3, "pad_token_id": 0},
    "drawn": {"max_new_tokens": 9, "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9},
    "beams": {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 2, "eos_token_id": 3},
    "beams that are drawn": {"max_new_tokens": 6, "num_beams": 2, "do_sample": True},
    "several of each row": {"max_length": 12, "do_sample": True, "num_return_sequences": 3},
    "penalised": {"max_new_tokens": 9, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "no cache": {"max_new_tokens": 5, "use_cache": False},
}


@pytest.mark.parametrize("make", [full, adapted, of_t5])
@pytest.mark.parametrize("is_resident", [True, False], ids=["resident", "streamed"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_generating(way: str, is_resident: bool, make: Callable[[], Any]) -> None:
    """The same tokens, drawn from the same random state; rows are padded on the left."""
    model = make()
    rows = source_rows() if make is of_t5 else prompts()
    torch.manual_seed(5)
    expected = model.generate(**rows, **WAYS[way])
    torch.manual_seed(5)
    made = generated(model, torch.device("cpu"), 1e9 if is_resident else 0, **rows, **WAYS[way])
    assert torch.equal(made, expected)


@on_devices
@pytest.mark.parametrize("make", [full, adapted, of_t5])
@pytest.mark.parametrize("num_bytes", [1e9, 0], ids=["resident", "streamed"])
def test_log_probabilities(num_bytes: float, make: Callable[[], Any], device: torch.device) -> None:
    """Scores and logits of every token; those of tokens that were taken are the same that a
    forward of all tokens computes."""
    model = make()
    rows = source_rows() if make is of_t5 else prompts()
    asked: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected = model.generate(**rows, **asked)
    made = generated(model, device, num_bytes, **rows, **asked)
    assert torch.equal(made.sequences.cpu(), expected.sequences)
    for name in ("scores", "logits"):
        assert len(made[name]) == 6
        for ours, plain in zip(made[name], expected[name], strict=True):
            torch.testing.assert_close(ours.cpu(), plain, atol=1e-5, rtol=0)
    if make is not of_t5:
        taken = expected.sequences[:, 5:]
        mask = nn.functional.pad(rows["attention_mask"], (0, 6), value=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(expected.sequences, attention_mask=mask, position_ids=positions).logits[
                :, 4:-1
            ]
        whole = logits.log_softmax(-1).gather(-1, taken[..., None])[..., 0]
        ours = torch.stack([one.cpu().log_softmax(-1) for one in made.logits], dim=1)
        found = ours.gather(-1, taken[..., None])[..., 0]
        torch.testing.assert_close(found, whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_bytes", [1e9, 0], ids=["resident", "streamed"])
def test_blocks_that_share_weights(num_bytes: float) -> None:
    """A weight of two blocks that pass would be that of whichever was brought last."""
    model = full()
    layers = model.model.layers
    layers[2].mlp.down_proj.weight = layers[1].mlp.down_proj.weight
    layers[3].self_attn = layers[0].self_attn
    layers[3].self_attn.layer_idx = 3
    layers[0].self_attn = copy.copy(layers[0].self_attn)
    layers[0].self_attn.layer_idx = 0
    hosts = {parameter.data_ptr() for parameter in model.parameters()}
    with copy_on(model, torch.device("cpu"), num_bytes) as copied:
        assert copied.model.layers[1].mlp.down_proj.weight.data_ptr() not in hosts
        assert copied.model.layers[3].self_attn.q_proj.weight.data_ptr() not in hosts
        on_host = sum(one.data_ptr() in hosts for one in copied.parameters())
        assert (on_host > 0) == (num_bytes == 0)
    expected = model.generate(**prompts(), generation_config=GREEDY)
    made = generated(model, torch.device("cpu"), num_bytes, **prompts(), generation_config=GREEDY)
    assert torch.equal(made, expected)


def test_ends_are_padded_as_transformers_pads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the end itself where no padding is said, also where rows are made in halves and one of
    them ends early."""
    model = full()
    asked: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    free = model.generate(**prompts(5), **asked)
    asked["eos_token_id"] = [int(free[0, 6])]  # where the first row then ends
    expected = model.generate(**prompts(5), **asked)
    assert (expected[0, 7:] == asked["eos_token_id"][0]).all()
    inner = type(model).generate

    def generate(self: Any, **kwargs: Any) -> Tensor:
        if len(kwargs["input_ids"]) > 1:
            raise torch.OutOfMemoryError("as asked for")
        return inner(self, **kwargs)

    monkeypatch.setattr(type(model), "generate", generate)
    assert torch.equal(generated(model, torch.device("cpu"), 1e9, **prompts(5), **asked), expected)


# --- by an engine ---


@pytest.fixture(params=["copied", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A virtual device computes where the weights are; a copy there does what one on a GPU does."""
    if request.param == "copied":
        monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    return str(request.param)


@pytest.fixture
def engines() -> Any:
    with closing(Engines()) as made:
        yield made


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", [full, make_lora_llama])
def test_between_steps(
    make: Callable[[], Any], is_async: bool, devices: DeviceSet, way: str, engines: Engines
) -> None:
    """Every update is seen, and training goes on as if nobody had generated."""
    model, twin = make(), make()
    engine, other = engines(model, devices), engines(twin, devices)
    batches = [llama_batch([5, 7, 3], seed) for seed in range(3)]
    optimizers = [torch.optim.SGD(one.optim_parameters(), lr=0.5) for one in (engine, other)]
    for batch in batches:
        for one, optimizer in zip((engine, other), optimizers, strict=True):
            train_steps(one, optimizer, [batch], 3, is_async=is_async)
        found = engine.generate(**prompts(), generation_config=GREEDY)
        plain = make()
        other.synchronize()
        plain.load_state_dict(twin.state_dict())
        assert torch.equal(found, plain.generate(**prompts(), generation_config=GREEDY))
    engine.synchronize()
    for name, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_model_in_parts(way: str) -> None:
    """An encoder and its decoder, each a list of blocks."""
    with closing(wrap_model_to_roundpipe(of_t5(), devices=ONE.argument)) as engine:
        found = engine.generate(**source_rows(), max_new_tokens=6, do_sample=False)
    assert torch.equal(found, of_t5().generate(**source_rows(), max_new_tokens=6, do_sample=False))


def test_a_model_that_helps_is_refused(monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    """Its weights would be elsewhere than the tokens that it is given."""
    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    engine = engines(full())
    with pytest.raises(ConfigError, match=r"generate\(assistant_model=\)"):
        engine.generate(**prompts(), assistant_model=full())


def test_a_generate_that_is_not_transformers_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(nn.Sequential):
        def generate(self, x: Tensor) -> Tensor:
            return x + next(self.parameters()).sum()

    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    model = Own(nn.Linear(2, 2), nn.Tanh())
    with closing(wrap_model_to_roundpipe(model, devices=ONE.argument)) as engine:
        assert torch.equal(engine.generate(torch.ones(2)), model.generate(torch.ones(2)))
