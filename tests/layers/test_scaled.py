"""`compute_dtype="fp8"`: linear layers of blocks multiply in fp8 while they run, and nothing else
changes.

The oracle is the plain loop over a copy whose linear layers are `ScaledLinear`, named one by one.
"""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager

from roundpipe import ConfigError, RoundPipe, virtual
from roundpipe.device.facts import refuse_without_fp8
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.layers.scaled import ScaledLinear
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import (
    Engines,
    engine_gradients,
    engine_weights,
    reference_steps,
    run_batch,
    train_steps,
)
from tests.support.models import Batch, llama_batch, mlp_batch
from tests.support.reference import Reference, plain_call

WIDTH = 512
EACH = [ONE, THREE]


class Block(nn.Module):
    """Beside what fp8 is for: a router, a size that is no multiple of 16, a subclass, a patch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 8)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.odd = nn.Linear(WIDTH, WIDTH + 8)
        self.other = nn.modules.linear.NonDynamicallyQuantizableLinear(WIDTH, WIDTH)
        self.patched = nn.Linear(WIDTH, WIDTH)
        self.patched.forward = self.other.forward  # type: ignore[method-assign]

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        made = self.down(nn.functional.silu(self.up(normed))) * self.router(normed).mean()
        return hidden + made + self.odd(normed)[..., :WIDTH] + self.patched(self.other(normed))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (Block() for _ in range(3))
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH))  # of a class that does not repeat
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, head)


def scaled(model: nn.Module, *names: str) -> nn.Module:
    """A copy of ``model`` in which every module of such a name is scaled."""
    made = copy.deepcopy(model)
    found = [module for path, module in made.named_modules() if path.endswith(names)]
    for module in found:
        assert type(module) is nn.Linear
        module.__class__ = ScaledLinear
    assert len(found) >= len(names)
    return made


BATCHES = [mlp_batch(6, seed, WIDTH) for seed in range(3)]


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("on", EACH, ids=str)
def test_blocks_multiply_in_fp8_and_nothing_else_does(
    on: DeviceSet, grain: Any, engines: Engines
) -> None:
    """Recomputed layers too, to the bit; the user's model is what it was before and after."""
    model, (batch, *_) = make_model(), BATCHES
    expected = plain_call(scaled(model, "up", "down"), batch.split(3), batch.loss_fn)
    plain = plain_call(model, batch.split(3), batch.loss_fn)
    kinds, keys = list(map(type, model.modules())), list(model.state_dict())
    engine = engines(model, on, compute_dtype="fp8")
    assert expected.loss != plain.loss
    on.check(run_batch(engine, batch, 3, recompute_grain=grain), expected.loss)
    on.check(engine_gradients(engine), expected.gradients)
    assert (list(map(type, model.modules())), list(model.state_dict())) == (kinds, keys)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("on", EACH, ids=str)
def test_training_in_fp8_is_that_of_the_plain_loop(
    on: DeviceSet, is_async: bool, engines: Engines
) -> None:
    model = make_model().bfloat16()
    batches = [
        Batch((batch.args[0].bfloat16(),), {}, batch.label, batch.loss_fn) for batch in BATCHES
    ]
    model[1].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    reference = Reference(
        scaled(model, "up", "down"),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
        staleness=int(is_async),
        grad_dtype=torch.bfloat16,
        optim_dtype=torch.float32,
    )
    losses = reference_steps(reference, batches, 3)
    engine = engines(model, on, compute_dtype="fp8", optim_dtype=torch.float32)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=1e-2)
    made = train_steps(engine, optimizer, batches, 3, is_async=is_async)
    for loss, wanted in zip(made, losses, strict=True):
        on.check(loss, wanted)
    weights = {name: weight.bfloat16() for name, weight in reference.weights.items()}
    on.check(engine_weights(engine), weights)


@pytest.mark.parametrize("on", EACH, ids=str)
def test_a_compiled_block_multiplies_in_fp8(
    on: DeviceSet, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []

    def compile_fx(graph: Any, inputs: Any, **_: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return aot_eager(graph, inputs)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    model, (batch, *_) = make_model(), BATCHES
    expected = plain_call(scaled(model, "up", "down"), batch.split(3), batch.loss_fn)
    engine = engines(model, on, compute_dtype="fp8", compile=True)
    on.check(run_batch(engine, batch, 3), expected.loss, bitwise=False)
    on.check(engine_gradients(engine), expected.gradients, bitwise=False)
    assert len(graphs) <= on.count * 2  # of a whole block each, with and without a graph
    assert all("float8_e4m3fn" in graph for graph in graphs)


@pytest.mark.parametrize("on", EACH, ids=str)
def test_the_base_of_an_adapter_multiplies_in_fp8_and_the_adapter_does_not(
    on: DeviceSet, engines: Engines
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=WIDTH, use_cache=False,
    )  # fmt: skip
    lora = peft.LoraConfig(r=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    batch = llama_batch([12, 5, 9])
    names = "base_layer", "o_proj", "gate_proj", "up_proj"  # k and v are too small
    expected = plain_call(scaled(model, *names), batch.split(3), batch.loss_fn)
    engine = engines(model, on, compute_dtype="fp8")
    on.check(run_batch(engine, batch, 3), expected.loss)
    on.check(engine_gradients(engine), expected.gradients)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), "2 Linear"),
        (Block(), "1 Block"),
        (nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(2))), "2 Sequential"),
    ],
    ids=["layers themselves", "one layer", "small"],
)
def test_a_model_without_a_layer_for_it_is_refused(model: nn.Module, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"at least 512 .* multiples of 16.*{named}\. Leave"):
        RoundPipe(model, devices=virtual(1), compute_dtype="fp8")


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="compute_dtype is 'int4'; use 'fp8'"):
        wrap_model_to_roundpipe(make_model(), devices=virtual(1), compute_dtype="int4")


@pytest.mark.parametrize(("capability", "is_refused"), [((8, 0), True), ((8, 9), False)])
def test_a_card_without_fp8_is_refused(
    capability: tuple[int, int], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = capability
    card = SimpleNamespace(name="Card 1", major=major, minor=minor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    device: Any = SimpleNamespace(name="cuda:3", torch_device=torch.device("cuda", 3))
    if is_refused:
        with pytest.raises(ConfigError, match=r"cuda:3 is a Card 1 .*8\.0.*from 8\.9 on"):
            refuse_without_fp8([device])
    else:
        refuse_without_fp8([device])
