"""Encoders with a decoder that the generic preset knows nothing of are their own forward as one
sequence: outputs, loss and gradients; or they are refused with what differs.

Bitwise where nothing is cut, but for the gradients of what several layers share, whose parts are
summed in another order. docs/models.md lists what is tried here.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import (
    BartForConditionalGeneration,
    BigBirdPegasusConfig,
    BigBirdPegasusForConditionalGeneration,
    LEDConfig,
    LEDForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from roundpipe import AutoRoundPipe, ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe import wrap_model_to_roundpipe as wrap
from roundpipe.errors import ConfigError
from roundpipe.presets import loss as preset_loss
from roundpipe.presets import preset
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.encoder_decoder_models import (
    BINS,
    CONFIGS,
    LAYERS,
    ROWS,
    SIZES,
    SOUNDS,
    SOURCE,
    TARGET,
    WIDTH,
    labelled,
    labels,
    make,
    sources,
    started,
)
from tests.support.engines import Engines
from tests.support.preset_models import gradients_of, own_forward
from tests.support.tolerances import assert_same_sums

# To a weight of the encoder's: over source tokens, the gradients of each over target tokens.
SUMMED = ROWS * max(SOURCE, SOUNDS) * TARGET
# Blocks of both stacks are recomputed, apart and together.
MANY_STAGES = ModelExecutePlan(
    [range(2), range(2, LAYERS - 2)],
    [range(LAYERS - 2, LAYERS), range(1, LAYERS - 2), range(1)],
)
CUTS = [(1, ONE), (1, THREE), (3, ONE), (4, THREE)]
OFTEN = ("bart", "whisper")


def adapted(name: str) -> Any:
    """With B = 0 every gradient of A would be zero."""
    made = make(name)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc1"], init_lora_weights=False)
    return get_peft_model(made, config)


def call(
    engine: Any, kwargs: dict[str, Any], num_microbatch: int, devices: DeviceSet, **settings: Any
) -> tuple[Any, dict[str, Tensor]]:
    """Output and gradients of one `forward_backward`."""
    config = RoundPipeRunConfig(
        num_microbatch=num_microbatch,
        **{"execute_plan": MANY_STAGES if devices is THREE else None, **settings},
    )
    loss, output = engine.forward_backward(
        input_kwargs=kwargs,
        loss_fn=lambda output, _: output.loss,
        return_outputs=True,
        run_config=config,
    )
    engine.synchronize()
    assert_same_sums(loss, output.loss, terms=ROWS * TARGET)
    return output, gradients_of(engine.model)


@pytest.mark.parametrize(("num_microbatch", "devices"), CUTS)
@pytest.mark.parametrize("inputs", [labelled, started])
@pytest.mark.parametrize("build", [make, adapted])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in CONFIGS],
)
def test_is_the_model(
    engines: Engines,
    name: str,
    build: Callable[[str], Any],
    inputs: Callable[[str], dict[str, Any]],
    num_microbatch: int,
    devices: DeviceSet,
) -> None:
    model, kwargs = build(name), inputs(name)
    theirs, gradients = own_forward(copy.deepcopy(model), kwargs)
    engine = engines(model, devices)
    assert isinstance(engine, RoundPipe)
    assert engine.statistics()["layers"] == LAYERS
    ours, found = call(engine, kwargs, num_microbatch, devices)
    assert type(ours) is type(theirs)
    assert_same_sums(ours.loss, theirs.loss, terms=ROWS * TARGET)
    assert_same_sums(found, gradients, terms=SUMMED)
    for each in ("loss", "logits", "encoder_last_hidden_state"):
        assert_same_sums(ours[each], theirs[each], terms=max(SOURCE, SOUNDS))
        assert num_microbatch > 1 or torch.equal(ours[each], theirs[each])


@pytest.mark.parametrize("name", ["bart", "m2m100", "whisper"])
def test_only_the_loss(engines: Engines, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Logits that go to the loss as the head has made them are never made; a number to divide by
    changes nothing, as in the model. BART adds a bias to its logits."""
    chunked: list[int] = []
    real = preset_loss.linear_cross_entropy

    def noting(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        chunked.append(len(hidden))
        return real(hidden, *args, **kwargs)

    model = make(name)
    theirs, gradients = own_forward(copy.deepcopy(model), labelled(name))
    engine = engines(model, THREE)
    monkeypatch.setattr(preset_loss, "linear_cross_entropy", noting)
    loss = engine.forward_backward(
        input_kwargs={**labelled(name), "num_items_in_batch": torch.tensor(5)},
        run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=MANY_STAGES),
    )
    engine.synchronize()
    assert_same_sums(loss, theirs.loss, terms=ROWS * TARGET)
    assert_same_sums(gradients_of(model), gradients, terms=SUMMED)
    assert bool(chunked) == (name != "bart")


def test_embeddings_in_place_of_tokens(engines: Engines) -> None:
    """They travel no further than to the first block, and have gradients."""
    generator = torch.Generator().manual_seed(3)
    embeds, of_decoder = (
        torch.randn(ROWS, length, WIDTH, generator=generator) for length in (SOURCE, TARGET)
    )
    kwargs = {
        "inputs_embeds": embeds,
        "attention_mask": sources("mbart")["attention_mask"],
        "decoder_inputs_embeds": of_decoder,
        "labels": labels(),
    }
    model = make("mbart")
    theirs, gradients = own_forward(copy.deepcopy(model), kwargs)
    ours, found = call(engines(model, THREE), kwargs, 2, THREE)
    assert_same_sums(ours.logits, theirs.logits, terms=SOURCE)
    assert_same_sums(found, gradients, terms=SUMMED)


def test_without_labels(engines: Engines) -> None:
    model, kwargs = make("pegasus").eval(), started("pegasus")
    del kwargs["labels"]
    config = RoundPipeRunConfig(num_microbatch=3)
    with torch.no_grad():
        theirs = model(**kwargs)
        ours = engines(model, THREE)(**kwargs, roundpipe_run_config=config)
    assert ours.loss is ours.past_key_values is None
    assert_same_sums(ours.logits, theirs.logits, terms=SOURCE)


def test_a_frozen_encoder(engines: Engines) -> None:
    """As speech models are tuned for another language."""
    model = make("whisper")
    model.freeze_encoder()
    _, gradients = own_forward(copy.deepcopy(model), labelled("whisper"))
    _, found = call(engines(model, THREE), labelled("whisper"), 2, THREE)
    assert_same_sums(found, gradients, terms=SUMMED)


@pytest.mark.parametrize("name", OFTEN)
def test_in_bfloat16(engines: Engines, name: str) -> None:
    """Sounds are then given in it, too."""
    model, kwargs = make(name).bfloat16(), labelled(name)
    if name == "whisper":
        kwargs["input_features"] = kwargs["input_features"].bfloat16()
    theirs, _ = own_forward(copy.deepcopy(model), kwargs)
    ours, _ = call(engines(model, THREE), kwargs, 1, THREE)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.logits, theirs.logits)


def test_dropout_does_not_depend_on_how_the_call_is_cut_up(engines: Engines) -> None:
    """The loss is the same to the bit fused as one stage, recomputed layer by layer, on one device
    or three; and is not that without dropout."""
    rates = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.2)
    fused = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(LAYERS)])
    runs = []
    for devices, plan, grain in [
        (ONE, fused, "stage"),
        (ONE, MANY_STAGES, "layer"),
        (THREE, MANY_STAGES, "stage"),
    ]:
        engine = engines(make("bart", **rates), devices)
        torch.manual_seed(7)
        settings = {"execute_plan": plan, "recompute_grain": grain}
        runs.append(call(engine, labelled("bart"), 2, devices, **settings))
    (first, first_gradients), *others = runs
    plain, _ = own_forward(make("bart"), labelled("bart"))
    assert not torch.allclose(first.logits, plain.logits)
    for output, gradients in others:
        assert torch.equal(output.loss, first.loss)
        assert_same_sums(gradients, first_gradients, terms=SUMMED)


def test_what_the_encoder_has_made_travels_once() -> None:
    """And sounds do not travel at all: each would be copied from device to device."""
    made = preset.cut(make("whisper"))
    assert made is not None
    began = made.sequential[0](**labelled("whisper"))
    decoded = made.sequential[1:-1](began)
    for state in (began, decoded):
        shapes = [leaf.shape for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
        assert shapes.count((ROWS, SOUNDS, WIDTH)) == 1
        assert (ROWS, BINS, 2 * SOUNDS) not in shapes


# --- what is refused ---


def refused(model: Any, caplog: pytest.LogCaptureFixture) -> str:
    """The one line of the log."""
    caplog.clear()
    assert preset.cut(model) is None
    (record,) = [record for record in caplog.records if record.name.startswith("roundpipe")]
    return record.getMessage()


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_layer_drop(caplog: pytest.LogCaptureFixture, stack: str) -> None:
    model = make("m2m100", **{f"{stack}_layerdrop": 0.05})
    assert "may skip blocks (layer drop)" in refused(model, caplog)


@pytest.mark.parametrize("name", ["mask_time_prob", "mask_feature_prob"])
def test_masks_on_sounds(caplog: pytest.LogCaptureFixture, name: str) -> None:
    """SpecAugment's are drawn by NumPy, for a whole batch."""
    settings = {"mask_time_prob": 0.0, "mask_feature_prob": 0.0, name: 0.05}
    model = make("whisper", apply_spec_augment=True, **settings)
    assert "SpecAugment (apply_spec_augment)" in refused(model, caplog)
    still = make("whisper", apply_spec_augment=True, mask_time_prob=0.0, mask_feature_prob=0.0)
    assert preset.cut(still) is not None


def test_a_refused_model_runs_by_parts() -> None:
    """With layer drop the model's own forward decides, once for the batch."""
    engine = wrap(make("bart", encoder_layerdrop=0.5), devices=2, lower_threshold=1)
    assert isinstance(engine, AutoRoundPipe)
    engine(**labelled("bart")).loss.backward()
    engine.close()


def test_switched_on_after_wrapping(engines: Engines) -> None:
    drops, masks = make("bart"), make("whisper", mask_time_prob=0.05)
    engine, other = engines(drops), engines(masks)
    drops.model.decoder.layerdrop = 1.0
    masks.config.apply_spec_augment = True
    with pytest.raises(ConfigError, match=r"called 0 of its 2 blocks.*layer drop"):
        engine(**labelled("bart"))
    with pytest.raises(ConfigError, match="apply_spec_augment was switched on"):
        other(**labelled("whisper"))


class LeavesPaddingOut(BartForConditionalGeneration):
    """Its loss does not count labels that are padding, whatever -100 says."""

    def forward(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, labels=labels, **kwargs)
        if labels is not None:
            kept = labels.masked_fill(labels == self.config.pad_token_id, -100)
            output.loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), kept.flatten())
        return output


class DividesByItems(BartForConditionalGeneration):
    """It heeds what Trainer counts."""

    def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if num_items_in_batch is not None:
            output.loss = output.loss * kwargs["labels"].ne(-100).sum() / num_items_in_batch
        return output


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (LeavesPaddingOut, "the losses of two microbatches add up to that of their batch, but for"),
        (DividesByItems, "its loss differ from its own forward's by up to"),
    ],
)
def test_other_losses(caplog: pytest.LogCaptureFixture, kind: type[Any], reason: str) -> None:
    """No weight of a microbatch is guessed: it is the share of labels, or nothing."""
    torch.manual_seed(0)
    assert reason in refused(kind(make("bart").config), caplog)


def make_umt5() -> Any:
    torch.manual_seed(0)
    return UMT5ForConditionalGeneration(
        UMT5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
            decoder_start_token_id=0,
        )
    ).eval()  # fmt: skip


def test_a_decoder_that_sees_what_comes_later(caplog: pytest.LogCaptureFixture) -> None:
    """UMT5's did where no row has padding, so that rows depended on each other."""
    model = make_umt5()
    for block in model.decoder.block:
        block.layer[0].SelfAttention.is_causal = False
    assert "two microbatches" in refused(model, caplog)


def test_umt5_is_refused_by_releases_whose_decoder_sees_what_comes_later() -> None:
    """Later ones mended it."""
    model = make_umt5()
    with torch.no_grad():
        first, second = (
            model(input_ids=torch.tensor([[3, 4]]), decoder_input_ids=torch.tensor([[0, later]]))
            for later in (5, 6)
        )
    sees = not torch.equal(first.logits[:, 0], second.logits[:, 0])
    assert (preset.cut(model) is None) == sees


def test_a_model_that_its_first_batch_changes(caplog: pytest.LogCaptureFixture) -> None:
    """It has not been tried, for a short batch would have changed it for good."""
    model = BigBirdPegasusForConditionalGeneration(BigBirdPegasusConfig(**SIZES))
    assert "decides how it attends" in refused(model, caplog)
    assert model.model.encoder.attention_type == "block_sparse"


@pytest.mark.slow
def test_a_model_that_pads_its_rows(engines: Engines) -> None:
    """LED's windows are as long as its rows are padded; some tokens are seen from everywhere."""
    settings = {"max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32}
    torch.manual_seed(0)
    model = LEDForConditionalGeneration(LEDConfig(**SIZES | settings, attention_window=4)).train()
    kwargs = labelled("led")
    kwargs["global_attention_mask"] = torch.zeros(ROWS, SOURCE, dtype=torch.long)
    kwargs["global_attention_mask"][:, 0] = 1
    kwargs["attention_mask"] = torch.ones(ROWS, SOURCE, dtype=torch.long)
    theirs, gradients = own_forward(copy.deepcopy(model), kwargs)
    ours, found = call(engines(model, THREE), kwargs, 2, THREE)
    assert_same_sums(ours.logits, theirs.logits, terms=SOURCE)
    assert_same_sums(found, gradients, terms=SUMMED)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"encoder_outputs": (torch.zeros(ROWS, SOURCE, WIDTH),)}, "encoder_outputs: .*itself"),
        ({"use_cache": True}, "key-value cache"),
        ({"output_hidden_states": True}, "output_hidden_states=True"),
        ({"output_router_logits": True}, "output_router_logits: there is no preset"),
        ({"lable": labels()}, "lable=.*nothing in it reads"),
    ],
)
def test_calls(engines: Engines, more: dict[str, Any], said: str) -> None:
    engine = engines(make("bart"), ONE)
    with pytest.raises(ConfigError, match=said):
        engine(**labelled("bart"), **more)


def test_trying_leaves_no_trace() -> None:
    """Modes, random numbers, hooks, gradients and the config are as before."""
    model = make("whisper")
    model.model.encoder.layers[1].eval()
    modes = [module.training for module in model.modules()]
    config, random = model.config.to_dict(), torch.get_rng_state()
    assert preset.cut(model) is not None
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
