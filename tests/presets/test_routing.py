"""Mixture of experts: a recompute sends tokens where the forward sent them, and the auxiliary loss
is the model's own.

On the CPU a recompute repeats the forward to the bit, so a router is made here whose second answer
differs from its first, as another kernel's rounding may make it.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Ernie4_5_MoeConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.olmoe import modeling_olmoe

from roundpipe import ConfigError, ModelExecutePlan, RoundPipeRunConfig
from roundpipe.presets import preset as presets
from roundpipe.presets.decoder import RoutedBlock
from tests.support import mixtures
from tests.support.device_sets import ONE, THREE
from tests.support.engines import Engines
from tests.support.preset_models import (
    INPUTS,
    ROWS,
    TINY,
    TOKENS,
    gradients_of,
    make_model,
    own_forward,
    tokens,
)
from tests.support.tolerances import assert_same_sums

EPSILON = torch.finfo(torch.float32).eps
RECOMPUTED = ModelExecutePlan(fwd_plan=[range(4)], bwd_plan=[range(4, 5), range(1, 4), range(1)])
ROUTERS = {"qwen3-moe": "gate", "mixtral": "gate", "gpt-oss": "router", "olmoe": "gate"}


def make_moe(name: str) -> Any:
    config = OlmoeConfig(**TINY, num_experts=4, num_experts_per_tok=2) if name == "olmoe" else None
    return make_model(name, config=config)


class MoodyRouter:
    """Negates a router's input at every other call, so that it prefers other experts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, _: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.num_calls += 1
        return args if self.num_calls % 2 else (-args[0],)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_recompute_chooses_the_experts_of_the_forward(
    engines: Engines, name: str, grain: str
) -> None:
    """Without the saved choice the second run would take others: the plain model, run twice,
    does."""
    model = make_moe(name)
    engine = engines(model)
    block = model.model.layers[2].mlp
    moody, chosen = MoodyRouter(), []
    getattr(block, ROUTERS[name]).register_forward_pre_hook(moody)
    block.experts.register_forward_pre_hook(lambda _, args: chosen.append(args[1].clone()))
    with torch.no_grad():
        model(input_ids=tokens())
        model(input_ids=tokens())
    assert not torch.equal(chosen[0], chosen[1])
    chosen.clear()
    moody.num_calls = 0
    engine.forward_backward(
        input_kwargs=INPUTS["labels"](),
        run_config=RoundPipeRunConfig(
            num_microbatch=1, execute_plan=RECOMPUTED, recompute_grain=grain
        ),
    )
    engine.synchronize()
    assert len(chosen) >= 2
    assert all(torch.equal(again, chosen[0]) for again in chosen[1:])


def test_routing_is_saved_for_each_microbatch(engines: Engines) -> None:
    model = make_moe("qwen3-moe")
    chosen: list[Tensor] = []
    model.model.layers[2].mlp.experts.register_forward_pre_hook(
        lambda _, args: chosen.append(args[1].clone())
    )
    engine = engines(model)
    engine.forward_backward(
        input_kwargs=INPUTS["labels"](),
        run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=RECOMPUTED),
    )
    engine.synchronize()
    # The first forward may run with and without a graph; the last two are the recomputes.
    forwards, recomputes = chosen[:2], chosen[-2:]
    assert not torch.equal(forwards[0], forwards[1])
    assert {tuple(c.flatten().tolist()) for c in forwards} == {
        tuple(c.flatten().tolist()) for c in recomputes
    }


@pytest.mark.parametrize("inputs", ["labels", "padded left"])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "gpt-oss"])
def test_the_auxiliary_loss_is_the_models_own(engines: Engines, name: str, inputs: str) -> None:
    """To the bit, its gradient through every router and the tokens it counts included."""
    model, kwargs = make_moe(name), {**INPUTS[inputs](), "output_router_logits": True}
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    without, _ = own_forward(copy.deepcopy(model), INPUTS[inputs]())
    assert not torch.equal(theirs.loss, without.loss)
    engine = engines(model, THREE)
    loss, ours = engine.forward_backward(
        input_kwargs=kwargs,
        loss_fn=lambda output, _: output.loss,
        return_outputs=True,
        run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=RECOMPUTED),
    )
    engine.synchronize()
    assert torch.equal(loss, theirs.loss)
    assert torch.equal(ours.aux_loss, theirs.aux_loss)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.router_logits, theirs.router_logits, strict=True)
    )
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)


def made_to_listen(name: str) -> Any:
    """With a coefficient that would show a mean over microbatches in place of the batch's."""
    made = make_model(name, config=MIXTURES[name]() if name in MIXTURES else None)
    made.router_aux_loss_coef = 0.5
    return made


MIXTURES = {
    "olmoe": lambda: OlmoeConfig(**TINY, num_experts=4, num_experts_per_tok=2),
    "qwen2-moe": lambda: Qwen2MoeConfig(
        **TINY,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "ernie": lambda: Ernie4_5_MoeConfig(
        **TINY, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1
    ),
}
LISTENED = ["qwen3-moe", "mixtral", "gpt-oss", *MIXTURES]


def assert_same_loss(ours: Tensor, theirs: Tensor) -> None:
    """Every token's part is rounded once more where it is added up in other groups."""
    assert ours.item() == pytest.approx(theirs.item(), rel=ROWS * TOKENS * EPSILON)


@pytest.mark.parametrize("devices", [ONE, THREE], ids=["one device", "three devices"])
@pytest.mark.parametrize("inputs", ["labels", "padded left"])
@pytest.mark.parametrize("name", LISTENED)
def test_the_auxiliary_loss_of_a_batch_that_is_cut(
    engines: Engines, name: str, inputs: str, devices: Any
) -> None:
    """It is a product of two means over all rows, which no sum over microbatches gives. Every
    microbatch had to be told the batch's; batches were not cut before, or the model refused."""
    model, kwargs = made_to_listen(name), {**INPUTS[inputs](), "output_router_logits": True}
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    engine = engines(model, devices)
    in_three = RoundPipeRunConfig(num_microbatch=3)
    loss = engine.forward_backward(input_kwargs=kwargs, run_config=in_three)
    engine.synchronize()
    assert_same_loss(loss, theirs.loss)
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)
    assert_same_loss(engine.forward_loss(input_kwargs=kwargs, run_config=in_three), theirs.loss)
    ours = engine(**kwargs, roundpipe_run_config=in_three)
    assert list(ours) == list(theirs)
    assert_same_loss(ours.aux_loss, theirs.aux_loss)
    engine.zero_grad()
    assert [link.shape for link in ours.router_logits] == [t.shape for t in theirs.router_logits]
    ours.loss.backward()
    engine.synchronize()
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)


@pytest.mark.parametrize("count", [1, 3])
def test_the_coefficient_is_the_one_of_the_call(engines: Engines, count: int) -> None:
    """As for one that is annealed. The engine kept what it was when the model was wrapped."""
    model, kwargs = make_moe("qwen3-moe"), {**INPUTS["labels"](), "output_router_logits": True}
    engine = engines(model, ONE)
    for coefficient in (0.0, 0.5):
        model.router_aux_loss_coef = coefficient
        loss = engine.forward_loss(
            input_kwargs=kwargs, run_config=RoundPipeRunConfig(num_microbatch=count)
        )
        assert_same_loss(loss, model(**kwargs).loss)


@pytest.mark.parametrize("count", [1, 3])
def test_the_number_of_chosen_experts_is_the_one_of_the_call(engines: Engines, count: int) -> None:
    """The auxiliary loss counted as many choices as there were when the model was wrapped."""
    model = made_to_listen("qwen3-moe")
    kwargs = {**INPUTS["labels"](), "output_router_logits": True}
    engine = engines(model, ONE)
    for num_chosen in (2, 1, 3):
        model.num_experts_per_tok = num_chosen
        for index in (0, 2):
            model.model.layers[index].mlp.gate.top_k = num_chosen
        loss = engine.forward_loss(
            input_kwargs=kwargs, run_config=RoundPipeRunConfig(num_microbatch=count)
        )
        assert_same_loss(loss, model(**kwargs).loss)


@pytest.mark.parametrize("name", ["qwen3-moe", "olmoe"])
def test_a_microbatch_of_padding_counts_no_token(engines: Engines, name: str) -> None:
    """The model's own function would divide by no tokens there."""
    model, kwargs = made_to_listen(name), {**INPUTS["padded left"](), "output_router_logits": True}
    kwargs["attention_mask"][0] = 0
    kwargs["labels"][0] = -100
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    engine = engines(model, THREE)
    loss = engine.forward_backward(
        input_kwargs=kwargs, run_config=RoundPipeRunConfig(num_microbatch=ROWS)
    )
    engine.synchronize()
    assert_same_loss(loss, theirs.loss)
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)


@pytest.mark.parametrize("name", ["qwen3-moe", "olmoe"])
def test_outputs_and_asynchronous_steps_with_the_auxiliary_loss(
    engines: Engines, name: str
) -> None:
    """Such a batch is run as a forward and a backward, and looks like any other from outside."""
    model, kwargs = made_to_listen(name), {**INPUTS["labels"](), "output_router_logits": True}
    plain = copy.deepcopy(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = engines(model, THREE)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    weights = [copy.deepcopy(plain.state_dict())]
    for step in range(3):
        plain.load_state_dict(weights[max(step - 1, 0)])  # an asynchronous step is one behind
        theirs, gradients = own_forward(plain, kwargs)
        plain.load_state_dict(weights[-1])
        loss, ours = engine.forward_backward(
            input_kwargs=kwargs,
            return_outputs=True,
            run_config=RoundPipeRunConfig(num_microbatch=3),
        )
        assert not any(value.requires_grad for value in (loss, ours.loss, ours.aux_loss))
        assert_same_sums(loss, theirs.loss.detach(), terms=ROWS * TOKENS)
        assert_same_sums(ours.logits, theirs.logits.detach(), terms=ROWS * TOKENS)
        with pytest.raises(RuntimeError, match="already run"):
            loss.backward()
        engine.step(optimizer.step)
        for parameter_name, parameter in plain.named_parameters():
            parameter.grad = gradients[parameter_name]
        reference.step()
        plain.zero_grad()
        weights.append(copy.deepcopy(plain.state_dict()))
    engine.synchronize()
    for parameter_name, parameter in engine.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[-1][parameter_name])


def test_a_loss_fn_sees_all_rows_of_the_auxiliary_loss(engines: Engines) -> None:
    """A microbatch has none of its own. The config may ask for it."""
    model = made_to_listen("qwen3-moe")
    model.config.output_router_logits = True
    theirs, _ = own_forward(copy.deepcopy(model), INPUTS["padded left"]())
    engine = engines(model, ONE)
    for call in (engine.forward_backward, engine.forward_loss):
        with pytest.warns(UserWarning, match="loss_fn sees one microbatch"):
            loss = call(
                input_kwargs=INPUTS["padded left"](),
                loss_fn=lambda output, _: output.aux_loss,
                run_config=RoundPipeRunConfig(num_microbatch=3),
            )
        assert torch.equal(loss, theirs.aux_loss)


def test_a_failed_microbatch_leaves_nothing_of_the_sums(engines: Engines) -> None:
    """They belong to its output, so the call after it starts anew."""
    model, kwargs = made_to_listen("olmoe"), {**INPUTS["labels"](), "output_router_logits": True}
    theirs, expected = own_forward(copy.deepcopy(model), kwargs)
    engine = engines(model, THREE)
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("once")

    in_three = RoundPipeRunConfig(num_microbatch=3)
    with model.model.layers[2].mlp.register_forward_pre_hook(fail):
        with pytest.raises(ValueError, match="once"):
            engine.forward_backward(input_kwargs=kwargs, run_config=in_three)
        loss = engine.forward_backward(input_kwargs=kwargs, run_config=in_three)
    engine.synchronize()
    assert_same_loss(loss, theirs.loss)
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)


def test_a_subclass_of_the_users_own_has_the_auxiliary_loss_of_its_architecture() -> None:
    """Its function was looked for in the module of the subclass, where it is not."""

    class Mine(Qwen3MoeForCausalLM):
        pass

    made = presets.cut(Mine(make_moe("qwen3-moe").config))
    assert made is not None


def test_experts_stay_stacked(engines: Engines) -> None:
    """One parameter per matrix of all experts, as transformers keeps them, with the names of the
    model."""
    engine = engines(make_moe("qwen3-moe"))
    masters = dict(engine.optim_named_parameters())
    assert masters["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 32)
    assert masters["model.layers.0.mlp.experts.down_proj"].shape == (4, 32, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("function", "the losses of two microbatches add up to that of their batch, but for"),
        ("name", "has no attribute 'num_experts_per_tok'"),
        ("two routers", "block 1 has 2 routers, where one is needed"),
    ],
)
def test_routers_that_are_not_understood(
    change: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The generic preset tries out whether the loss of a batch can be made of sums; it is refused
    where not, where what it is made of has other names, and where a block has more than one."""
    model = made_to_listen("olmoe")
    if change == "name":
        del model.num_experts_per_tok
        model.config.router_aux_loss_coef = 0.0
    elif change == "two routers":
        mlp = model.model.layers[1].mlp
        mlp.other = mlp.gate
        mlp.gate = copy.deepcopy(mlp.other)
        mlp.register_forward_pre_hook(lambda module, args: module.other(args[0]) and None)
    else:
        monkeypatch.setattr(
            modeling_olmoe, "load_balancing_loss_func", lambda said, *_: said[0].max()
        )
    made = presets.cut(model)
    assert made is not None
    with pytest.raises(ConfigError, match="output_router_logits: what routers of Olmoe.* say is"):
        made.sequential[0](input_ids=tokens(), output_router_logits=True)
    model.config.output_router_logits = True
    assert presets.cut(model) is None
    assert reason in caplog.text


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_mixtures_that_record_no_routers_keep_their_choice(engines: Engines, name: str) -> None:
    """Only blocks with a recorded router kept it: these have no auxiliary loss."""
    model = make_model(config=mixtures.CONFIGS[name](TINY))
    theirs, expected = own_forward(copy.deepcopy(model), INPUTS["padded left"]())
    engine = engines(model, THREE)
    assert any(isinstance(layer, RoutedBlock) for layer in engine._sequence)
    loss = engine.forward_backward(
        input_kwargs=INPUTS["padded left"](), run_config=RoundPipeRunConfig(num_microbatch=3)
    )
    engine.synchronize()
    assert_same_loss(loss, theirs.loss)
    assert_same_sums(gradients_of(engine.model), expected, terms=ROWS * TOKENS)
