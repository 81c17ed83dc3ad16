"""Adapters of single parameters, as PEFT puts them on stacked experts: exact over microbatches and
devices."""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe import ConfigError, ModelExecutePlan, RoundPipeRunConfig
from roundpipe.presets import preset as presets
from roundpipe.presets.experts.groups import group_experts
from roundpipe.presets.experts.low_rank import AdaptedWeight, Factors, adapt_without_sums
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, engine_gradients
from tests.support.preset_models import (
    INPUTS,
    ROWS,
    TINY,
    TOKENS,
    make_model,
    own_forward,
    tokens,
)
from tests.support.tolerances import assert_same_sums

MANY_STAGES = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 5), range(1, 4), range(1)]
)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATIENCE_S = 30.0
# PEFT sums over tokens, then over a width of the weight for the adapter; here it is the other way.
REASSOCIATED = ROWS * TOKENS * TINY["hidden_size"]


def adapted(name: str, implementation: str = "grouped_mm", more: Sequence[str] = ()) -> Any:
    model = make_model(name)
    model.config._experts_implementation = implementation
    torch.manual_seed(3)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=[*EXPERTS, *more],
        init_lora_weights=False,
    )
    return get_peft_model(model, config)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[AdaptedWeight]:
    """The weights that have been added up with their adapters."""
    made: list[AdaptedWeight] = []
    summed = AdaptedWeight.summed

    def noting(self: AdaptedWeight) -> Tensor:
        made.append(self)
        return summed(self)

    monkeypatch.setattr(AdaptedWeight, "summed", noting)
    return made


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_adapters_of_experts(
    engines: Engines, name: str, implementation: str, sums: list[AdaptedWeight]
) -> None:
    """PEFT's own result, in every way that transformers multiplies, and never a weight with its
    adapter added, which PEFT makes."""
    model, kwargs = adapted(name, implementation), INPUTS["padded left"]()
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    assert any("experts" in parameter for parameter in expected)
    for devices, count in [(ONE, 1), (THREE, 3)]:
        engine = engines(model, devices)
        config = RoundPipeRunConfig(num_microbatch=count, execute_plan=MANY_STAGES)
        loss = engine.forward_backward(
            input_kwargs=kwargs, loss_fn=lambda output, _: output.loss, run_config=config
        )
        assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(engine_gradients(engine), expected, terms=REASSOCIATED)
        engine.close()
    assert not sums
    assert_same_sums(model(**kwargs).loss.detach(), theirs.loss.detach(), terms=1)


def test_adapters_with_a_routers_loss(engines: Engines) -> None:
    """The batch is cut, and the router below an adapter gets its part of the auxiliary loss."""
    model = adapted("qwen3-moe")
    model.get_base_model().router_aux_loss_coef = 0.5
    kwargs = {**INPUTS["padded left"](), "output_router_logits": True}
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    engine = engines(model, THREE)
    loss = engine.forward_backward(
        input_kwargs=kwargs, run_config=RoundPipeRunConfig(num_microbatch=3)
    )
    assert_same_sums(loss, theirs.loss.detach(), terms=ROWS * TOKENS)
    assert_same_sums(engine_gradients(engine), expected, terms=REASSOCIATED)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_adapters_of_routers(engines: Engines, name: str) -> None:
    """Beside those of the experts: the auxiliary loss reaches them through what the router says."""
    kwargs = {**INPUTS["padded left"](), "output_router_logits": True}
    router = "router" if name == "gpt-oss" else "gate"
    model = adapted(name, more=[f"mlp.{router}.weight"])
    model.get_base_model().router_aux_loss_coef = 0.5
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    assert any(router in parameter for parameter in expected)
    engine = engines(model, THREE)
    config = RoundPipeRunConfig(num_microbatch=3)
    loss = engine.forward_backward(input_kwargs=kwargs, run_config=config)
    assert_same_sums(loss, theirs.loss.detach(), terms=ROWS * TOKENS)
    assert_same_sums(engine_gradients(engine), expected, terms=REASSOCIATED)


@pytest.mark.parametrize("case", ["two at once", "a matrix", "off"])
def test_other_adapters_of_parameters(engines: Engines, case: str) -> None:
    """Two active adapters of the same experts, one of a plain matrix, and none that is active."""
    model, kwargs = adapted("qwen3-moe"), INPUTS["labels"]()
    if case == "a matrix":
        config = LoraConfig(
            r=2, target_parameters=["self_attn.q_proj.weight"], init_lora_weights=False
        )
        model = get_peft_model(make_model("qwen3-moe"), config)
    elif case == "two at once":
        model.add_adapter("other", model.peft_config["default"])
        model.base_model.set_adapter(["default", "other"])
    else:
        model.base_model.disable_adapter_layers()
    theirs, expected = (
        own_forward(copy.deepcopy(model), kwargs) if case != "off" else (model(**kwargs), {})
    )
    engine = engines(model, THREE)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=MANY_STAGES)
    if case == "off":
        loss = engine.forward_loss(input_kwargs=kwargs, run_config=config)
    else:
        loss = engine.forward_backward(input_kwargs=kwargs, run_config=config)
        assert_same_sums(engine_gradients(engine), expected, terms=REASSOCIATED)
    assert_same_sums(loss, theirs.loss.detach(), terms=ROWS * TOKENS)


@pytest.mark.parametrize("devices", [ONE, THREE], ids=["one device", "three devices"])
def test_merged_adapters_that_are_switched_off_are_refused(
    engines: Engines, devices: DeviceSet
) -> None:
    """PEFT's forward took them out of the device's copy of the weights alone, and noted for the
    user's that they were out: from then on their weights had the adapters twice."""
    model, kwargs = adapted("qwen3-moe"), INPUTS["labels"]()
    with torch.no_grad():
        expected = model(**kwargs).loss
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=MANY_STAGES)
    model.base_model.merge_adapter()
    merged = engine.forward_loss(input_kwargs=kwargs, run_config=config)
    with (
        model.disable_adapter(),
        pytest.raises(ConfigError, match=r"q_proj: .*\['default'\] are merged.*unmerge_adapter"),
    ):
        engine.forward_loss(input_kwargs=kwargs, run_config=config)
    again = engine.forward_loss(input_kwargs=kwargs, run_config=config)
    model.base_model.unmerge_adapter()
    unmerged = engine.forward_loss(input_kwargs=kwargs, run_config=config)
    for found in (merged, again, unmerged):
        assert_same_sums(found, expected, terms=REASSOCIATED)


def test_adapted_experts_run_on_several_devices_at_once(engines: Engines) -> None:
    """PEFT keeps the sum of a weight and its adapter in a cache of all threads, so one device had
    to wait for another. Here the first device's second microbatch waits inside for the second's
    first."""
    model, met = adapted("qwen3-moe"), threading.Event()
    lock, calls, inside = threading.Lock(), 0, 0

    def enter(*_: Any) -> None:
        nonlocal calls, inside
        with lock:
            calls, inside = calls + 1, inside + 1
            is_first = calls == 1
            if inside > 1:
                met.set()
        if not is_first:
            assert met.wait(PATIENCE_S)

    def leave(*_: Any) -> None:
        nonlocal inside
        with lock:
            inside -= 1

    for block in model.get_base_model().model.layers:
        if hasattr(block.mlp, "experts"):
            block.mlp.experts.base_layer.register_forward_pre_hook(enter)
            block.mlp.experts.base_layer.register_forward_hook(leave)
    # Where they may draw random numbers, layers on virtual devices wait for each other anyway.
    config = RoundPipeRunConfig(
        num_microbatch=3, execute_plan=MANY_STAGES, preserve_rng_state=False
    )
    engine = engines(model, THREE)
    engine.forward_backward(input_kwargs=INPUTS["labels"](), run_config=config)
    engine.synchronize()
    assert met.is_set()
    assert not parametrize._cache


def test_adapters_for_experts_of_another_layout() -> None:
    """GPT-OSS keeps its experts' matrices the other way round than Qwen3-MoE, and PEFT finds out in
    the first forward, by an error of torch's."""
    model = adapted("qwen3-moe")
    experts = model.get_base_model().model.layers[2].mlp.experts.get_base_layer()
    experts.gate_up_proj = nn.Parameter(torch.zeros(4, TINY["hidden_size"], 16))
    with pytest.raises(ConfigError, match=r"layer 3, .*gate_up_proj.*\(4, 32, 32\).*\(4, 32, 16\)"):
        presets.cut(model)


def test_a_weight_with_an_adapter_is_its_sum_for_all_else() -> None:
    """An experts module may do anything with it."""
    torch.manual_seed(0)
    weight, left, right = torch.randn(3, 4, 5), torch.randn(3, 4, 2), torch.randn(3, 2, 5)
    sum_ = weight + 0.5 * (left @ right)
    adapted_weight = AdaptedWeight(weight, [Factors(left, right, 0.5)])
    assert torch.equal(adapted_weight[1:], sum_[1:])
    assert torch.equal(adapted_weight.transpose(0, 1), sum_.transpose(0, 1))
    assert torch.equal(torch.cat([adapted_weight, weight]), torch.cat([sum_, weight]))
    assert torch.equal(adapted_weight.abs(), sum_.abs())
    assert adapted_weight.shape == weight.shape
    assert adapted_weight.dtype is weight.dtype
    x, bias = torch.randn(7, 5), torch.randn(4)
    torch.testing.assert_close(
        nn.functional.linear(x, adapted_weight[1], bias), nn.functional.linear(x, sum_[1], bias)
    )
    torch.testing.assert_close(x[:, :4] @ adapted_weight[1], x[:, :4] @ sum_[1])


OPERATORS: dict[str, Callable[[Any, Tensor], Any]] = {
    "times a number": lambda weight, _: weight * 0.5,
    "a number minus it": lambda weight, _: 1 - weight,
    "over a number": lambda weight, _: weight / 3.0,
    "negative": lambda weight, _: -weight,
    "compared": lambda weight, _: weight > 0,
    "equal to a number": lambda weight, _: weight == 0,
    "times itself": lambda weight, _: weight @ weight,
    "on the left": lambda weight, x: weight @ x,
    "by name": lambda weight, x: torch.matmul(x, other=weight),
    "into other memory": lambda weight, x: torch.matmul(x, weight, out=torch.empty(3, 4, 4)),
    "with one row for all": lambda weight, x: torch.matmul(x[0, 0], weight),
    "transposed by name": lambda weight, _: weight.transpose(dim0=1, dim1=2) + 0.0,
    "by a mask": lambda weight, x: weight[(x > 0)[:, :, 0]],
    "its length": lambda weight, _: torch.tensor(len(weight)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_a_weight_with_an_adapter(name: str) -> None:
    """Python looks for those in the class alone; and products come in other forms than one input
    after which the weight stands."""
    torch.manual_seed(0)
    weight, left, right = torch.randn(3, 4, 4), torch.randn(3, 4, 2), torch.randn(3, 2, 4)
    x, sum_ = torch.randn(3, 4, 4), weight + 0.5 * (left @ right)
    found = OPERATORS[name](AdaptedWeight(weight, [Factors(left, right, 0.5)]), x)
    torch.testing.assert_close(found, OPERATORS[name](sum_, x))


class Operations(TorchDispatchMode):
    """Counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("rank", "num_pads", "num_copies"), [(8, 0, 2), (2, 4, 0)])
def test_factors_are_copied_only_where_a_product_wants_it(
    rank: int, num_pads: int, num_copies: int
) -> None:
    """Every factor was padded with nothing, and copied once more, in each forward of each
    microbatch. PEFT's second factor has its experts last, so that one is laid out anew."""
    config = LoraConfig(r=rank, target_parameters=EXPERTS, init_lora_weights=False)
    model = get_peft_model(make_model("qwen3-moe"), config)
    made = presets.cut(model)
    assert made is not None
    state, block = made.sequential[0](input_ids=tokens()), made.sequential[1]
    for change in (adapt_without_sums, group_experts):
        change(block)
    with Operations() as adapted_run:
        block(state)
    model.base_model.disable_adapter_layers()
    with Operations() as plain:
        block(state)
    assert adapted_run.counts["constant_pad_nd"] == num_pads
    assert adapted_run.counts["clone"] - plain.counts["clone"] == num_copies


class Remembering(nn.Module):
    """Writes to a frozen parameter after another one was used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.latest = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        with torch.no_grad():
            self.latest.copy_(self.latest)
        return y


def test_parameters_of_a_layer_count_their_writes_apart(engines: Engines) -> None:
    """As in plain PyTorch. On a device they are views of one buffer, which would share a count."""
    model, x = nn.Sequential(Remembering(), Remembering()), torch.randn(4, 4)
    weights = {"0.weight": model[0].weight, "1.weight": model[1].weight}
    expected = torch.autograd.grad(model(x).square().sum(), [*weights.values()])
    engine = engines(model)
    engine.forward_backward((x,), loss_fn=lambda output, _: output.square().sum())
    wanted = dict(zip(weights, expected, strict=True))
    assert_same_sums(engine_gradients(engine), wanted, terms=len(x))


class Averaging(nn.Module):
    """Keeps a running average as a frozen parameter, as some quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x) - self.mean


def test_a_frozen_parameter_that_a_forward_changes_is_refused(engines: Engines) -> None:
    """It would go on changing in plain PyTorch, and silently stand still here."""
    model = nn.Sequential(Averaging(), nn.Linear(4, 1))
    engine = engines(model)
    with pytest.raises(
        ConfigError,
        match=r"Averaging.forward writes to its frozen parameter 'mean'.*register_buffer",
    ):
        engine.forward_backward((torch.ones(4, 4),), loss_fn=lambda output, _: output.sum())
    assert torch.equal(model[0].mean, torch.zeros(4))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("plan", [None, MANY_STAGES], ids=["fused", "recomputed"])
def test_adapters_of_experts_in_compiled_blocks(
    engines: Engines,
    caplog: pytest.LogCaptureFixture,
    plan: ModelExecutePlan | None,
    implementation: str,
) -> None:
    """With torch's own compiler, whose code of these products failed as it ran. In groups a block
    is one piece."""

    def run(*, compiles: bool) -> tuple[Tensor, dict[str, Tensor]]:
        engine = engines(adapted("qwen3-moe", implementation), ONE, compile=compiles)
        loss = engine.forward_backward(
            input_kwargs=INPUTS["padded left"](), run_config=RoundPipeRunConfig(execute_plan=plan)
        )
        return loss, engine_gradients(engine)

    from torch._dynamo.utils import counters

    counters["graph_break"].clear()
    (expected, gradients), (loss, found) = run(compiles=False), run(compiles=True)
    assert "without being compiled" not in caplog.text
    if implementation == "grouped_mm":
        assert not counters["graph_break"]
    assert found.keys() == gradients.keys()
    assert_same_sums(loss, expected, terms=ROWS * TOKENS)
    assert_same_sums(found, gradients, terms=REASSOCIATED)
