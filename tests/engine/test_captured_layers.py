"""Layers whose kernels are recorded and replayed: the numbers of layers that run, whatever comes
between. On virtual devices a recording is the layer's code, done again on the memory that the
recording owns; what only CUDA can do wrong is in tests/gpu."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import roundpipe
from roundpipe.memory.slots import SlotPool
from roundpipe.runtime.capture.layers import CapturedLayers
from tests.support.device_sets import ONE, DeviceSet
from tests.support.engines import Engines, engine_weights, reference_steps, train_steps
from tests.support.models import Batch
from tests.support.reference import Reference

WIDTH, ROWS, STEPS, MICROBATCHES = 16, 12, 14, 2
TWO = DeviceSet(kind="virtual", count=2)
SETTINGS = {"max_gpu_memory": "1GB", "optim_dtype": torch.float32}


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.drop(torch.tanh(self.up(hidden))))


class Head(nn.Linear):
    """The only one of its class."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)


def make(dropout: float = 0.0, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    inner = (Block(dropout) for _ in range(blocks))
    return nn.Sequential(nn.Linear(8, WIDTH), *inner, Head())


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="sum") / ROWS


def batches(count: int = STEPS, rows: int = ROWS) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            (torch.randn(rows, 8, generator=generator),),
            {},
            torch.randint(0, 3, (rows,), generator=generator),
            loss_fn,
        )
        for _ in range(count)
    ]


def trained(
    engines: Engines,
    model: nn.Module,
    on: DeviceSet,
    *,
    captures: bool,
    is_async: bool,
    between: Callable[[int, Any], None] = lambda step, engine: None,
    **settings: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(3)
    engine = engines(model, on, cuda_graphs=captures, **SETTINGS, **settings)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)
    losses = []
    for step, batch in enumerate(batches()):
        between(step, engine)
        losses += train_steps(engine, optimizer, [batch], MICROBATCHES, is_async=is_async)
    weights = engine_weights(engine)
    engine.close()
    return losses, weights


def check_same(engines: Engines, on: DeviceSet, dropout: float = 0.0, **how: Any) -> None:
    expected = trained(engines, make(dropout), on, captures=False, **how)
    actual = trained(engines, make(dropout), on, captures=True, **how)
    assert [loss.item() for loss in actual[0]] == [loss.item() for loss in expected[0]]
    on.check(actual[1], expected[1])


def test_captured_layers_train_like_plain_pytorch(engines: Engines, replays: list[int]) -> None:
    model = make()
    reference = Reference(make(), lambda own: torch.optim.SGD(own, lr=0.1))
    engine = engines(model, ONE, cuda_graphs=True, **SETTINGS)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
    losses = train_steps(engine, optimizer, batches(), MICROBATCHES, is_async=False)
    expected = reference_steps(reference, batches(), MICROBATCHES)
    assert replays
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))


@pytest.mark.parametrize("on", [ONE, TWO], ids=str)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dropout", [0.0, 0.2], ids=["plain", "dropout"])
def test_the_numbers_are_those_of_layers_that_run(
    engines: Engines, replays: list[int], on: DeviceSet, dropout: float, *, is_async: bool
) -> None:
    check_same(engines, on, dropout, is_async=is_async)
    if on == ONE:
        assert replays, "nothing was captured"


def test_what_changes_between_steps_is_seen(engines: Engines, replays: list[int]) -> None:
    """A module set to another mode, a hook, and an input of another form."""
    handles: list[Any] = []

    def between(step: int, engine: Any) -> None:
        block = engine.model[2]
        if step == 9:
            block.drop.p = 0.5
        if step == 11:
            handles.append(block.up.register_forward_hook(lambda *seen: 2 * seen[2]))
        if step == 13:
            handles.pop().remove()

    check_same(engines, ONE, is_async=False, between=between)
    assert replays


def test_a_layer_may_get_and_return_more_than_one_tensor(
    engines: Engines, replays: list[int]
) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, given: dict[str, Any]) -> dict[str, Any]:
            hidden = torch.tanh(self.inner(given["hidden"])) * given["scale"] * given["mask"]
            return {**given, "hidden": hidden, "count": (hidden > 0).sum()}

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            mask = (x[:, :1] > -1).expand(len(x), WIDTH)
            return {"hidden": self.inner(x), "mask": mask, "scale": 1.5, "count": x.sum() > 0}

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 3)

        def forward(self, given: dict[str, Any]) -> Tensor:
            return self.inner(given["hidden"]) + 0 * given["count"]

    def make_pairs() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(First(), *(Pair() for _ in range(3)), Last())

    expected = trained(engines, make_pairs(), ONE, captures=False, is_async=False)
    actual = trained(engines, make_pairs(), ONE, captures=True, is_async=False)
    assert replays
    assert [loss.item() for loss in actual[0]] == [loss.item() for loss in expected[0]]
    ONE.check(actual[1], expected[1])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_model_of_transformers(engines: Engines, replays: list[int], *, lora: bool) -> None:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )

    def run(*, captures: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        if lora:
            adapters = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
            model = get_peft_model(model, adapters)
        engine = engines(model.train(), ONE, cuda_graphs=captures, **SETTINGS)
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)
        generator, losses = torch.Generator().manual_seed(2), []
        for step in range(STEPS):
            ids = torch.randint(0, 64, (4, 10), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, 6 + step % 3 :] = 0
            inputs = {"input_ids": ids, "labels": ids, "attention_mask": mask}
            losses.append(engine.forward_backward(input_kwargs=inputs).item())
            engine.step(optimizer.step, is_async=True)
        weights = engine_weights(engine)
        engine.close()
        return losses, weights

    expected, actual = run(captures=False), run(captures=True)
    assert replays
    assert actual[0] == expected[0]
    ONE.check(actual[1], expected[1])


def test_layers_with_buffers_are_left_alone(engines: Engines, replays: list[int]) -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3))
    model = nn.Sequential(nn.Linear(8, WIDTH), *blocks, Head())
    trained(engines, model, ONE, captures=True, is_async=False)
    assert not replays


def test_a_failed_call_lets_go_of_what_was_recorded(engines: Engines, replays: list[int]) -> None:
    failing = [False]

    def loss_or_error(outputs: Tensor, labels: Tensor) -> Tensor:
        if failing[0]:
            raise ArithmeticError("as asked for")
        return loss_fn(outputs, labels)

    def run(*, captures: bool) -> dict[str, Tensor]:
        engine = engines(make(), ONE, cuda_graphs=captures, **SETTINGS)
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)
        for step, batch in enumerate(batches()):
            failing[0] = step == 10
            batch = batch._replace(loss_fn=loss_or_error)
            if failing[0]:
                with pytest.raises(ArithmeticError):
                    train_steps(engine, optimizer, [batch], MICROBATCHES, is_async=False)
                continue
            train_steps(engine, optimizer, [batch], MICROBATCHES, is_async=False)
        weights = engine_weights(engine)
        engine.close()
        return weights

    expected = run(captures=False)
    ONE.check(run(captures=True), expected)
    assert replays


def test_what_runs_out_of_memory_beside_recordings_keeps_its_plan(
    engines: Engines, replays: list[int]
) -> None:
    """The recordings go and the call is made again as it was planned; without them, it is the plan
    that was wrong."""
    full_at: list[int] = []
    replayed: list[int] = []

    def loss_or_full(outputs: Tensor, labels: Tensor) -> Tensor:
        if full_at and full_at[0] == len(losses):
            full_at.pop(0)
            raise torch.OutOfMemoryError("as asked for")
        return loss_fn(outputs, labels)

    reference = Reference(make(), lambda own: torch.optim.SGD(own, lr=0.1))
    expected = reference_steps(reference, batches(), MICROBATCHES)
    engine = engines(make(), ONE, cuda_graphs=True, **SETTINGS)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
    losses: list[Tensor] = []
    full_at += [10, 12]
    plans, shortages = [], []
    for batch in batches():
        one = [batch._replace(loss_fn=loss_or_full)]
        losses += train_steps(engine, optimizer, one, MICROBATCHES, is_async=False)
        plans.append(engine.execute_plan)
        shortages.append(engine.planner.shortages)
        replayed.append(len(replays))
    assert replayed[9] > 0, "nothing was recorded"
    assert plans[10] == plans[9]
    assert shortages[9:13] == [(0, 0), (0, 1), (0, 1), (1, 1)]
    assert replayed[13] == replayed[10], "recorded again"
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))


@pytest.mark.parametrize("is_wanted", [None, True, False])
def test_which_layers_may_be_captured(*, is_wanted: bool | None) -> None:
    """On a GPU, where nothing is said: those of libraries, experts too, but none that a user has
    written. Nothing runs here."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    device: Any = SimpleNamespace(torch_device=torch.device("cuda"))
    dense = LlamaForCausalLM(LlamaConfig(**sizes)).model.layers
    mixture = MixtralForCausalLM(MixtralConfig(**sizes)).model.layers
    own = [Tower(layer) for layer in dense]
    found = [
        len(CapturedLayers(device, list(layers), SlotPool(device), is_wanted)._layers)
        for layers in (dense, mixture, own)
    ]
    assert found == {None: [3, 3, 0], True: [3, 3, 3], False: [0, 0, 0]}[is_wanted]


class Tower(nn.Sequential):
    """A class of the user's own."""
