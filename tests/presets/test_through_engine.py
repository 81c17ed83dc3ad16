"""Through the engine a preset still is its model: loss, logits and gradients of the model's own
forward.

Bitwise where nothing is cut, to 1e-6 over microbatches; whatever the devices, plan, padding,
packing and adapters. With dropout on there is no such oracle (the masks are the engine's own): all
plans, grains and device counts agree instead.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, PhiConfig

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines
from tests.support.preset_models import (
    LANGUAGE_MODELS,
    ROWS,
    TINY,
    TOKENS,
    gradients_of,
    inputs_of,
    make_model,
    make_vit,
    model_of,
    own_forward,
    tiny_gpt2,
    tiny_gpt_oss,
    tiny_qwen3_moe,
)
from tests.support.tolerances import assert_same_sums

PRESETS = [*LANGUAGE_MODELS, "vit"]
# Blocks are recomputed, apart from each other and together. All models here have five layers.
MANY_STAGES = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 5), range(1, 4), range(1)]
)
FUSED = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(5)])


class Cut(NamedTuple):
    """How one call is cut up."""

    num_microbatch: int
    devices: DeviceSet
    plan: ModelExecutePlan | None = None

    def __str__(self) -> str:
        return f"{self.num_microbatch}on{self.devices}"


WHOLE, WHOLE_ON_THREE = Cut(1, ONE), Cut(1, THREE, MANY_STAGES)
IN_THREE, IN_THREE_ON_THREE = Cut(3, ONE, MANY_STAGES), Cut(3, THREE, MANY_STAGES)


def loss_of(output: Any, _: Any) -> Tensor:
    return output.loss


def call(
    engine: Any, kwargs: dict[str, Any], cut: Cut, **settings: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Output and gradients of one `forward_backward`."""
    config = RoundPipeRunConfig(
        num_microbatch=cut.num_microbatch, execute_plan=cut.plan, **settings
    )
    loss, output = engine.forward_backward(
        input_kwargs=kwargs, loss_fn=loss_of, return_outputs=True, run_config=config
    )
    engine.synchronize()
    assert_same_sums(loss, output.loss, terms=ROWS * TOKENS)
    gradients = gradients_of(engine.model)
    engine.zero_grad()
    return output, gradients


def assert_is_model(engines: Engines, model: Any, batches: list[dict[str, Any]], cut: Cut) -> None:
    expected = [own_forward(copy.deepcopy(model), kwargs) for kwargs in batches]
    engine = engines(model, cut.devices)
    for kwargs, (theirs, theirs_gradients) in zip(batches, expected, strict=True):
        ours, gradients = call(engine, kwargs, cut)
        assert type(ours) is type(theirs)
        if cut.num_microbatch == 1:
            assert torch.equal(ours.loss, theirs.loss)
            assert torch.equal(ours.logits, theirs.logits)
        assert_same_sums(ours.loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(ours.logits, theirs.logits, terms=TOKENS)
        assert_same_sums(gradients, theirs_gradients, terms=ROWS * TOKENS)


# --- adapters ---


def adapted(preset: str, kind: str) -> Any:
    """``init_lora_weights=False``: with B = 0 every gradient of A would be zero."""
    model = model_of(preset)
    if kind == "none":
        return model
    attention, saved = ["q_proj", "v_proj"], ["lm_head"]
    if preset == "gpt2":
        attention = ["c_attn"]
    elif preset == "vit":
        saved = ["classifier"]
    settings: dict[str, Any] = {"modules_to_save": saved} if kind == "modules_to_save" else {}
    torch.manual_seed(3)
    return get_peft_model(
        model,
        LoraConfig(
            r=2,
            target_modules=attention,
            use_dora=kind == "dora",
            init_lora_weights=False,
            **settings,
        ),
    )


def base_inputs(preset: str, *names: str) -> list[dict[str, Any]]:
    model = model_of(preset)
    return [inputs_of(model, name) for name in names]


@pytest.mark.parametrize("preset", PRESETS)
def test_padded_batches(engines: Engines, preset: str) -> None:
    assert_is_model(engines, model_of(preset), base_inputs(preset, "padded left"), WHOLE)
    assert_is_model(
        engines,
        model_of(preset),
        base_inputs(preset, "padded left", "padded right"),
        IN_THREE_ON_THREE,
    )


@pytest.mark.parametrize(
    ("preset", "kind"), [("gpt2", "lora"), ("qwen3-moe", "dora"), ("vit", "modules_to_save")]
)
def test_adapters(engines: Engines, preset: str, kind: str) -> None:
    assert_is_model(
        engines, adapted(preset, kind), base_inputs(preset, "labels"), IN_THREE_ON_THREE
    )


@pytest.mark.slow
@pytest.mark.parametrize("cut", [WHOLE, WHOLE_ON_THREE, IN_THREE, IN_THREE_ON_THREE], ids=str)
@pytest.mark.parametrize("kind", ["none", "lora", "dora", "modules_to_save"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_whole_grid(engines: Engines, preset: str, kind: str, cut: Cut) -> None:
    names = (
        ["labels", "padded left", "padded right", "packed (B, S)"]
        if preset != "vit"
        else ["labels"]
    )
    assert_is_model(engines, adapted(preset, kind), base_inputs(preset, *names), cut)


# --- dropout ---

WITH_DROPOUT: dict[str, Any] = {
    "llama": lambda: make_model(config=LlamaConfig(**TINY, attention_dropout=0.2)),
    "qwen3-moe": lambda: make_model(config=tiny_qwen3_moe(attention_dropout=0.2)),
    "gpt-oss": lambda: make_model("gpt-oss", config=tiny_gpt_oss(attention_dropout=0.2)),
    "gpt2": lambda: make_model(config=tiny_gpt2(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)),
    "vit": lambda: make_vit(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2),
    "generic": lambda: make_model(
        config=PhiConfig(**TINY, embd_pdrop=0.2, resid_pdrop=0.2, attention_dropout=0.2)
    ),
}


@pytest.mark.parametrize("preset", WITH_DROPOUT)
def test_dropout_does_not_depend_on_how_the_call_is_cut_up(engines: Engines, preset: str) -> None:
    """Bitwise: fused as one stage, recomputed stage by stage or layer by layer, on one device or
    three."""
    runs = []
    for devices, plan, grain in [
        (ONE, FUSED, "stage"),
        (ONE, MANY_STAGES, "layer"),
        (THREE, MANY_STAGES, "stage"),
    ]:
        model = WITH_DROPOUT[preset]()
        engine = engines(model, devices)
        torch.manual_seed(7)
        runs.append(
            call(
                engine,
                inputs_of(model, "padded left"),
                Cut(3, devices, plan),
                recompute_grain=grain,
            )
        )
    (first, first_gradients), *others = runs
    plain, _ = own_forward(
        WITH_DROPOUT[preset]().eval(), inputs_of(WITH_DROPOUT[preset](), "padded left")
    )
    assert not torch.allclose(first.logits, plain.logits)
    for output, gradients in others:
        assert torch.equal(output.loss, first.loss)
        assert torch.equal(output.logits, first.logits)
        assert [
            name for name in gradients if not torch.equal(gradients[name], first_gradients[name])
        ] == []
