"""Models that see run as a sequence: loss, logits and gradients are those of their own forward,
whatever images are in which rows."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    PixtralVisionConfig,
)

from roundpipe import (
    AutoRoundPipe,
    ModelExecutePlan,
    RoundPipeRunConfig,
    wrap_model_to_roundpipe,
)
from roundpipe.errors import ConfigError
from roundpipe.presets import trial
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines
from tests.support.preset_models import ROWS, TINY, TOKENS, gradients_of, own_forward
from tests.support.tolerances import assert_same_sums
from tests.support.vision_models import (
    IMAGE,
    NO_IMAGES,
    NUM_IMAGES,
    SEEING,
    TOWER,
    filmed_batch,
    make_seeing,
    seen_batch,
)

CUTS = [(1, ONE), (ROWS, ONE), (2, THREE), (ROWS, THREE)]


def loss_of(output: Any, _: Any) -> torch.Tensor:
    return output.loss


def assert_is_model(
    engines: Engines,
    model: Any,
    batches: list[dict[str, Any]],
    count: int,
    devices: DeviceSet,
    **settings: Any,
) -> None:
    expected = [own_forward(copy.deepcopy(model), batch) for batch in batches]
    engine = engines(model, devices)
    config = RoundPipeRunConfig(num_microbatch=count, **settings)
    for batch, (theirs, their_gradients) in zip(batches, expected, strict=True):
        loss, ours = engine.forward_backward(
            input_kwargs=batch, loss_fn=loss_of, return_outputs=True, run_config=config
        )
        engine.synchronize()
        if count == 1:
            assert torch.equal(ours.loss, theirs.loss)
            assert torch.equal(ours.logits, theirs.logits)
        assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(ours.logits, theirs.logits, terms=TOKENS)
        assert_same_sums(gradients_of(engine.model), their_gradients, terms=ROWS * TOKENS)
        engine.zero_grad()
        # Without logits, and for evaluation.
        loss = engine.forward_backward(input_kwargs=batch, run_config=config)
        engine.synchronize()
        assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(gradients_of(engine.model), their_gradients, terms=ROWS * TOKENS)
        engine.zero_grad()
        with torch.no_grad():
            ours = engine(**batch, roundpipe_run_config=config)
        assert_same_sums(ours.logits, theirs.logits, terms=TOKENS)


@pytest.mark.parametrize(("count", "devices"), CUTS, ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name == "qwen3.5" else name for name in SEEING],
)
def test_with_images_in_some_rows_and_none(
    engines: Engines, name: str, count: int, devices: DeviceSet
) -> None:
    model = make_seeing(name)
    batches = [seen_batch(model, images) for images in (NUM_IMAGES, NO_IMAGES, (0, 1, 0, 2))]
    assert_is_model(engines, model, batches, count, devices)


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_a_frozen_tower(engines: Engines, name: str, devices: DeviceSet) -> None:
    model = make_seeing(name)
    getattr(model.model, "visual" if "qwen" in name else "vision_tower").requires_grad_(False)
    batches = [seen_batch(model), seen_batch(model, NO_IMAGES)]
    assert_is_model(engines, model, batches, 2, devices)


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_adapters_of_the_language_model_alone(
    engines: Engines, name: str, devices: DeviceSet
) -> None:
    """Gradients stop at the tower, which has nothing to train."""
    targets = r".*language_model.*\.(q|v)_proj"
    config = LoraConfig(r=2, lora_alpha=2, target_modules=targets, init_lora_weights=False)
    model: Any = get_peft_model(make_seeing(name), config)
    base = model.base_model.model
    assert_is_model(engines, model, [seen_batch(base), seen_batch(base, NO_IMAGES)], 2, devices)


@pytest.mark.parametrize("name", ["llava-two-depths", "gemma3", "qwen2.5-vl", "qwen3-vl"])
def test_every_layer_is_a_stage(engines: Engines, name: str) -> None:
    """Everything that travels between layers goes from device to device, and each is recomputed."""
    model = make_seeing(name)
    towers = model.config.vision_config
    layers = 2 + getattr(towers, "depth", 3) + 1 + model.config.text_config.num_hidden_layers
    plan = ModelExecutePlan(
        fwd_plan=[range(i, i + 1) for i in range(layers - 1)],
        bwd_plan=[range(i, i + 1) for i in reversed(range(layers))],
    )
    batches = [seen_batch(model), seen_batch(model, (0, 1, 0, 2))]
    assert_is_model(engines, model, batches, 3, THREE, execute_plan=plan)


def test_positions_that_the_caller_makes(engines: Engines) -> None:
    """Three kinds of them, in as many rows as there are kinds: rows are the second dimension."""
    model = make_seeing("qwen2.5-vl")
    batch = seen_batch(model, (1, 0, 2))
    given = {name: batch[name] for name in ("input_ids", "image_grid_thw", "attention_mask")}
    positions, _ = model.model.get_rope_index(
        **given, mm_token_type_ids=batch.pop("mm_token_type_ids")
    )
    assert positions.shape == (3, 3, TOKENS)
    assert_is_model(engines, model, [batch | {"position_ids": positions + 1}], 3, ONE)


def test_a_generation_before_leaves_no_trace(engines: Engines) -> None:
    """What `generate` keeps of its own images' positions is not added to those of a batch."""
    model = make_seeing("qwen3-vl")
    model.model.rope_deltas = torch.tensor([[-2]])
    assert_is_model(engines, model, [seen_batch(model), seen_batch(model, NO_IMAGES)], 2, ONE)


def test_tower_and_language_model_keep_their_own_attention() -> None:
    """The trial runs both without a GPU's kernels, and gives each its own back."""
    own = {"": "flash_attention_2", "text_config": "flash_attention_2", "vision_config": "sdpa"}
    model = make_seeing("llava")
    config = model.config
    config._attn_implementation = own
    with trial.in_evaluation(model):
        assert config.text_config._attn_implementation == "eager"
    kept = (config, config.text_config, config.vision_config)
    assert [each._attn_implementation for each in kept] == list(own.values())


FILMED = [("iv", "", "v", "i"), ("", "v", "v", ""), ("", "", "", "iv")]


@pytest.mark.parametrize(("count", "devices"), [(ROWS, ONE), (2, THREE), (3, THREE)], ids=str)
@pytest.mark.parametrize(
    "name", ["qwen2.5-vl", "qwen3-vl", pytest.param("qwen3.5", marks=pytest.mark.slow)]
)
def test_with_videos_and_images(
    engines: Engines, name: str, count: int, devices: DeviceSet
) -> None:
    """Both in one row, in rows of one microbatch, and videos alone; whole images and videos go
    with their rows. Their positions count seconds (Qwen2.5-VL) or frames (the others)."""
    model = make_seeing(name)
    batches = [filmed_batch(model, rows) for rows in FILMED]
    assert_is_model(engines, model, batches, count, devices)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl"])
def test_videos_alone_are_seen_to_the_bit(engines: Engines, name: str) -> None:
    """Beside images, the tower has other numbers of patches than it would have of each."""
    model = make_seeing(name)
    assert_is_model(engines, model, [filmed_batch(model, FILMED[1])], 1, ONE)


def test_frames_change_what_is_learnt() -> None:
    """The oracle would not notice a batch whose videos nobody reads."""
    model = make_seeing("qwen2.5-vl")
    batch = filmed_batch(model, FILMED[1])
    loss = own_forward(copy.deepcopy(model), batch)[0].loss
    for name in ("pixel_values_videos", "second_per_grid_ts"):
        other = own_forward(copy.deepcopy(model), batch | {name: batch[name].flip(0)})[0].loss
        assert not torch.equal(other, loss)


def make_counting(module: Any) -> None:
    """Its forward writes to buffers of its own, in place and by assignment."""
    kind = type(module)

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.times.add_(1)
        self.largest = torch.maximum(self.largest, hidden_states.detach().abs().max())
        return kind.forward(self, hidden_states, *args, **kwargs)

    # transformers knows a block by the name of its class.
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    module.register_buffer("times", torch.zeros(()))
    module.register_buffer("largest", torch.zeros(()))


@pytest.mark.parametrize("num_images", [NUM_IMAGES, (0, 0, 2, 1)], ids=str)
@pytest.mark.parametrize("where", ["patch_embed", "blocks.1", "merger"])
def test_buffers_that_a_towers_forward_writes(
    engines: Engines, where: str, num_images: tuple[int, ...]
) -> None:
    """Once for each microbatch that has images, in order, as in a loop over microbatches, and not
    again in a recompute."""
    model = make_seeing("qwen3-vl")
    make_counting(model.model.visual.get_submodule(where))
    plain, batch = copy.deepcopy(model), seen_batch(model, num_images)
    engine = engines(model, THREE)
    for part in engine.split_rows(batch, 2):
        own_forward(plain, {**part, "use_cache": False})
    engine.forward_backward(input_kwargs=batch, run_config=RoundPipeRunConfig(num_microbatch=2))
    engine.synchronize()
    written, expected = (
        {
            name: buffer
            for name, buffer in one.named_buffers()
            if "times" in name or "largest" in name
        }
        for one in (engine.model, plain)
    )
    assert written.keys() == expected.keys()
    assert expected[f"model.visual.{where}.times"] == 1 + bool(sum(num_images[:2]))
    for name, buffer in expected.items():
        torch.testing.assert_close(written[name], buffer)


# --- bad input ---

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "too few images": (
        "llava", {"pixel_values": torch.zeros(3, 3, 8, 8)},
        "row 3 has 4 placeholders of images, but the 0 images from number 3 on.* make 0 tokens",
    ),
    "too many images": (
        "llava", {"pixel_values": torch.zeros(6, 3, 8, 8)},
        "there are 6 images, but all rows up to the last, 3, have placeholders of 4",
    ),
    "images of other sizes": (
        "llava", {"pixel_values": torch.zeros(4, 3, 12, 12)},
        "row 0 has 4 placeholders of images, but the 1 images from number 0 on.* make 9 tokens",
    ),
    "no images at all": (
        "gemma3", {"pixel_values": None},
        "row 0 has 4 placeholders of images, but the 0 images from number 0 on.* make 0 tokens",
    ),
    "no sizes": (
        "qwen2.5-vl", {"image_grid_thw": None},
        "pixel_values has 64 patches, but there is no image_grid_thw",
    ),
    "sizes of other images": (
        "qwen3-vl", {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 2, 4], [1, 6, 4]])},
        "pixel_values has 64 patches, but the 3 images of image_grid_thw have 48",
    ),
    "sizes that make no tokens": (
        "qwen3-vl", {"image_grid_thw": torch.tensor([[1, 4, 4], [1, 3, 4]])},
        "image 1 has 3 x 4 patches, of which squares of 2 x 2 make a token",
    ),
    "videos": (
        "llava", {"pixel_values_videos": torch.zeros(4, 96)},
        r"called with pixel_values_videos=\.\.\., which nothing in it reads",
    ),
    "videos without sizes": (
        "qwen3-vl", {"pixel_values_videos": torch.zeros(8, 96)},
        "pixel_values_videos has 8 patches, but there is no video_grid_thw, .* each video has",
    ),
    "sizes of other videos": (
        "qwen2.5-vl",
        {
            "pixel_values_videos": torch.zeros(8, 96),
            "video_grid_thw": torch.tensor([[2, 2, 4]]),
        },
        "pixel_values_videos has 8 patches, but the 1 videos of video_grid_thw have 16",
    ),
    "more videos than rows have": (
        "qwen3-vl",
        {
            "pixel_values_videos": torch.zeros(16, 96),
            "video_grid_thw": torch.tensor([[2, 2, 4]]),
        },
        "there are 1 videos, but all rows up to the last, 3, have placeholders of 0",
    ),
    "placeholders of no video": (
        "qwen3-vl", {"input_ids": torch.full((ROWS, TOKENS), IMAGE - 1), "pixel_values": None},
        "row 0 has 12 placeholders of videos, but the 0 videos from number 0 on.* make 0 tokens",
    ),
    "embeddings": (
        "llava", {"input_ids": None, "inputs_embeds": torch.zeros(ROWS, TOKENS, 32)},
        "4 images came with inputs_embeds, which do not say whose they are",
    ),
    "another depth": (
        "llava", {"vision_feature_layer": -1},
        "vision_feature_layer is -1 in this call and -2 in the config",
    ),
}  # fmt: skip


@pytest.mark.parametrize("are_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_is_refused_before_any_work(
    engines: Engines, wrong: str, *, are_cut: bool
) -> None:
    """Whether the engine cuts the batch or the caller has; nothing is left behind."""
    name, changes, message = WRONG[wrong]
    model = make_seeing(name)
    engine = engines(model)
    batch = {k: v for k, v in {**seen_batch(model), **changes}.items() if v is not None}
    given: Any = {"microbatches": [((), batch, None)]} if are_cut else {"input_kwargs": batch}
    with pytest.raises(ConfigError, match=message):
        engine.forward_backward(**given)
    assert not gradients_of(engine.model)


# --- models that no preset takes ---


def make_pixtral() -> Any:
    torch.manual_seed(0)
    tower = {"image_size": 8, "patch_size": 4, "rope_parameters": {"rope_theta": 1e4}}
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=PixtralVisionConfig(**TOWER | tower),
            text_config=LlamaConfig(**TINY),
            image_token_id=IMAGE,
            vision_feature_select_strategy="full",
            vision_feature_layer=-1,
        )
    ).train()


def make_llava_next() -> Any:
    torch.manual_seed(0)
    return LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config=CLIPVisionConfig(**TOWER),
            text_config=LlamaConfig(**TINY),
            image_token_id=IMAGE,
        )
    ).train()


@pytest.mark.parametrize("make", [make_pixtral, make_llava_next])
def test_others_run_part_by_part(make: Any) -> None:
    """A tower that the preset does not know, and a model that has none."""
    model = make()
    batch = seen_batch(model, NO_IMAGES)
    theirs, gradients = own_forward(copy.deepcopy(model), batch)
    with wrap_model_to_roundpipe(model, devices=2, lower_threshold=1) as engine:
        assert isinstance(engine, AutoRoundPipe)
        ours = engine(**batch)
        ours.loss.backward()
        engine.synchronize()
        assert_same_sums(ours.loss, theirs.loss, terms=ROWS * TOKENS)
        assert_same_sums(gradients_of(engine.model), gradients, terms=ROWS * TOKENS)
