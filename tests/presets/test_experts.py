"""Stacked experts in groups of tokens: transformers' own numbers, for every layout that it has, and
nothing of the user's model is touched."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.presets.experts import product
from roundpipe.presets.experts.groups import group_experts
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_gradients
from tests.support.preset_models import INPUTS, ROWS, TINY, TOKENS, make_model, own_forward
from tests.support.tolerances import assert_same_sums

RECOMPUTED = ModelExecutePlan(fwd_plan=[range(4)], bwd_plan=[range(4, 5), range(1, 4), range(1)])
WIDTH, NUM_TOKENS, NUM_EXPERTS, NUM_CHOSEN = 16, 12, 5, 2


def qwen() -> nn.Module:
    return Qwen3MoeExperts(
        Qwen3MoeConfig(
            hidden_size=WIDTH,
            moe_intermediate_size=24,
            num_experts=NUM_EXPERTS,
            experts_implementation="grouped_mm",
        )
    )


def gpt_oss() -> nn.Module:
    """Its matrices lie the other way round, and it has biases and a gate of its own."""
    return GptOssExperts(
        GptOssConfig(
            hidden_size=WIDTH,
            intermediate_size=24,
            num_local_experts=NUM_EXPERTS,
            experts_implementation="grouped_mm",
        )
    )


def nemotron() -> nn.Module:
    """It has no gate."""
    return NemotronHExperts(
        NemotronHConfig(
            hidden_size=WIDTH,
            moe_intermediate_size=24,
            moe_latent_size=None,
            n_routed_experts=NUM_EXPERTS,
            experts_implementation="grouped_mm",
        )
    )


def routed(num_experts: int = NUM_EXPERTS) -> tuple[Tensor, Tensor, Tensor]:
    """Makes hidden states, and for each token who is chosen and their shares."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, requires_grad=True)
    shares, chosen = torch.randn(NUM_TOKENS, num_experts, generator=generator).topk(NUM_CHOSEN)
    return hidden, chosen, shares.softmax(-1).requires_grad_()


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("num_used", [NUM_EXPERTS, 3], ids=["all chosen", "some not chosen"])
@pytest.mark.parametrize("make", [qwen, gpt_oss, nemotron])
def test_they_are_transformers_own(make: Any, num_used: int, *, trains: bool) -> None:
    """The same products, so the same outputs. A token's gradients are added up in another order."""
    torch.manual_seed(0)
    theirs = make().requires_grad_(trains)
    for weight in theirs.parameters():
        nn.init.normal_(weight, std=0.3)
    ours = nn.Sequential(copy.deepcopy(theirs))
    group_experts(ours)
    results = []
    for experts in (theirs, ours[0]):
        hidden, chosen, shares = routed(num_used)
        output = experts(hidden, chosen, shares)
        output.square().sum().backward()
        weights = {name: weight.grad for name, weight in experts.named_parameters()}
        results.append((output, {"hidden": hidden.grad, "shares": shares.grad}, weights))
    (output, gradients, of_weights), (found, ours_by, by_weights) = results
    assert torch.equal(found, output)
    assert_same_sums(ours_by, gradients, terms=WIDTH * NUM_CHOSEN)
    if trains:
        assert_same_sums(by_weights, of_weights, terms=NUM_TOKENS)
    else:
        assert set(by_weights.values()) == {None}


@pytest.mark.parametrize("trains", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("rank", [None, 8])
def test_the_compiler_is_told_what_a_product_is(rank: int | None, *, trains: bool) -> None:
    """Shapes, memory and gradients of the operation are those that it says it has, by torch's own
    check."""
    ends = torch.tensor([3, 3, 10, 11, NUM_TOKENS], dtype=torch.int32)
    rows = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(NUM_EXPERTS, WIDTH, 24, requires_grad=trains)
    left, right = (
        None if rank is None else torch.randn(NUM_EXPERTS, *shape, requires_grad=True)
        for shape in ((WIDTH, rank), (rank, 24))
    )
    torch.library.opcheck(product._product, (rows, weight, left, right, ends, 0.5))


def test_another_way_of_computing_is_left_as_it_is() -> None:
    """A user may have chosen it or patched it in."""
    for change in ("chosen", "patched"):
        layer = nn.Sequential(qwen())
        if change == "chosen":
            layer[0].config._experts_implementation = "eager"
        else:
            layer[0].forward = lambda *_: "patched"
        plain = copy.deepcopy(layer[0])
        for weight, other in zip(layer.parameters(), plain.parameters(), strict=True):
            nn.init.normal_(weight, std=0.3)
            other.data.copy_(weight.data)
        group_experts(layer)
        with torch.no_grad():
            results = [experts(*routed()) for experts in (plain, layer[0])]
        assert results[0] == results[1] if change == "patched" else torch.equal(*results)


class Doubled(Qwen3MoeExperts):
    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)


@pytest.mark.parametrize("case", ["class", "registered", "patched"])
def test_experts_of_the_users_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class made of transformers' own, another function for ``"grouped_mm"``, and a class that is
    patched while a replica waits: none was asked."""
    if case == "registered":
        theirs = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
        monkeypatch.setitem(
            ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", lambda *args: 2 * theirs(*args)
        )
    plain = (Doubled if case == "class" else Qwen3MoeExperts)(qwen().config)
    for weight in plain.parameters():
        nn.init.normal_(weight, std=0.3)
    layer = nn.Sequential(copy.deepcopy(plain))
    group_experts(layer)
    if case == "patched":
        monkeypatch.setattr(Qwen3MoeExperts, "forward", lambda _, hidden, *__: 2 * hidden)
    with torch.no_grad():
        assert torch.equal(layer[0](*routed()), plain(*routed()))


def test_the_users_modules_stay_what_they_are(engines: Engines) -> None:
    model = make_model("qwen3-moe")
    kinds = [type(module) for module in model.modules()]
    engine = engines(model, ONE)
    engine.forward_backward(input_kwargs=INPUTS["labels"]())
    assert [type(module) for module in model.modules()] == kinds
    assert not any("forward" in vars(module) for module in model.modules())


def test_recorded_layers_of_experts_train_as_others(engines: Engines, replays: list[int]) -> None:
    """They have adapters, which sit in the place of weights while a layer runs."""
    from tests.presets.test_adapters import adapted

    def losses(*, captures: bool) -> list[float]:
        torch.manual_seed(0)
        engine = engines(
            adapted("qwen3-moe"),
            ONE,
            cuda_graphs=captures,
            max_gpu_memory="1GB",
            optim_dtype=torch.float32,
        )
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2)
        made = []
        for _ in range(8):
            made.append(engine.forward_backward(input_kwargs=INPUTS["labels"]()).item())
            engine.step(optimizer.step, is_async=False)
        engine.close()
        return made

    expected = losses(captures=False)
    assert not replays
    assert losses(captures=True) == expected
    assert replays


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Collects what torch's compiler has traced, which runs as it is."""
    found = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_(function, backend=backend))
    counters["graph_break"].clear()
    return found


@pytest.mark.parametrize("listens", [True, False], ids=["auxiliary loss", "no auxiliary loss"])
def test_blocks_of_every_engine_are_compiled(
    engines: Engines, graphs: list[torch.fx.GraphModule], *, listens: bool
) -> None:
    """They compile as one piece, with code of their own: the compiler makes eight variants of code
    that engines share, and leaves the blocks of all further ones as they are."""
    inputs = {**INPUTS["labels"](), "output_router_logits": listens}
    model = make_model("qwen3-moe")
    model.config._experts_implementation = "grouped_mm"
    expected = own_forward(copy.deepcopy(model), inputs)
    numbers = []
    for _ in range(4):
        engine = engines(copy.deepcopy(model), ONE, compile=True)
        before = len(graphs)
        for plan in (None, RECOMPUTED):
            engine.zero_grad()
            loss = engine.forward_backward(
                input_kwargs=inputs, run_config=RoundPipeRunConfig(execute_plan=plan)
            )
            assert_same_sums(loss, expected[0].loss, terms=ROWS * TOKENS)
            assert_same_sums(engine_gradients(engine), expected[1], terms=ROWS * TOKENS)
        numbers.append(len(graphs) - before)
        engine.close()
    assert not counters["graph_break"]
    assert len(set(numbers)) == 1
    assert numbers[0] >= 2


def test_a_deep_model_is_compiled_as_a_shallow_one(
    engines: Engines, graphs: list[torch.fx.GraphModule]
) -> None:
    """Each block sees the logits of its own router only. Had it seen those of the blocks before,
    it would have been compiled once for each depth, and from the ninth on not at all."""
    inputs, numbers = {**INPUTS["labels"](), "output_router_logits": True}, []
    for num_blocks in (3, 10):
        sizes = {**TINY, "num_hidden_layers": num_blocks}
        model = make_model(config=MixtralConfig(**sizes, num_local_experts=4))
        model.config._experts_implementation = "grouped_mm"
        loss, gradients = own_forward(copy.deepcopy(model), inputs)
        before = len(graphs)
        engine = engines(model, ONE, compile=True)
        assert_same_sums(
            engine.forward_backward(input_kwargs=inputs), loss.loss, terms=ROWS * TOKENS
        )
        assert_same_sums(engine_gradients(engine), gradients, terms=ROWS * TOKENS)
        numbers.append(len(graphs) - before)
    assert numbers[0] == numbers[1] < torch._dynamo.config.recompile_limit
    assert not counters["graph_break"]
