"""Trainers over a data set with images do what TRL's do: the same losses, weights and metrics."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from transformers import AutoTokenizer, LlavaProcessor, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next import LlavaNextConfig, LlavaNextForConditionalGeneration
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import (
    Qwen2_5_VLProcessor,
    Qwen2_5_VLProcessorKwargs,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from roundpipe.engine import generation
from roundpipe.errors import ConfigError
from roundpipe_hf.trl import (
    RoundPipeDPOConfig,
    RoundPipeDPOTrainer,
    RoundPipeGRPOConfig,
    RoundPipeGRPOTrainer,
    RoundPipeKTOConfig,
    RoundPipeKTOTrainer,
    RoundPipeRLOOConfig,
    RoundPipeRLOOTrainer,
)
from roundpipe_hf.trl.sft import RoundPipeSFTConfig, RoundPipeSFTTrainer
from tests.support.example_data import save_tokenizer, sentences
from tests.support.preset_models import TINY
from tests.support.trainers import QUIET_SGD, Pair, assert_same, logged, run
from tests.support.vision_models import (
    TOWER,
    collated,
    llava,
    make_seeing,
    qwen2_5_vl,
    seen_rows,
)

# Batches of three rows, all sorts of them: some, two and no images.
NUM_IMAGES = (1, 0, 2, 0, 0, 0, 1, 1, 0)


TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }} {% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE , {% else %}{{ c['text'] }} "
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def make_tokenizer(tmp_path_factory: pytest.TempPathFactory, image: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    tokenizer.add_special_tokens({"additional_special_tokens": [image]})
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", image)
    return tokenizer


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ProcessorMixin:
    tokenizer = make_tokenizer(tmp_path_factory, "<image>")
    side = {"height": 8, "width": 8}
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=side),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )


class OfPatches(ProcessorMixin):
    """Qwen's, without its part for videos, which needs more than is installed here."""

    valid_processor_kwargs = Qwen2_5_VLProcessorKwargs
    replace_image_token = Qwen2_5_VLProcessor.replace_image_token
    return_mm_token_type_ids = True  # as Qwen's, from transformers 5.24 on

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, **kwargs)


@pytest.fixture(scope="module")
def of_patches(tmp_path_factory: pytest.TempPathFactory) -> ProcessorMixin:
    tokenizer = make_tokenizer(tmp_path_factory, "<|image_pad|>")
    sizes = {"size": {"shortest_edge": 64, "longest_edge": 256}, "patch_size": 4, "merge_size": 2}
    images = Qwen2VLImageProcessorPil(temporal_patch_size=2, **sizes)
    return OfPatches(images, tokenizer, chat_template=tokenizer.chat_template)


def pictures(numbers: Sequence[int]) -> list[list[Any]]:
    from PIL import Image as Picture

    generator = torch.Generator().manual_seed(0)
    sizes = (10, 12, 3)
    return [
        [
            Picture.fromarray(
                torch.randint(256, sizes, generator=generator, dtype=torch.uint8).numpy()
            )
            for _ in range(number)
        ]
        for number in numbers
    ]


def rows() -> Dataset:
    texts = [
        "<image> " * number + text
        for number, text in zip(NUM_IMAGES, sentences(len(NUM_IMAGES)), strict=True)
    ]
    features = Features({"images": List(Image()), "text": Value("string")})
    return Dataset.from_dict({"images": pictures(NUM_IMAGES), "text": texts}, features=features)


def preferences(kind: str, image: str) -> Dataset:
    """Prompts of all sorts of rows, and what is made of them."""
    count = len(NUM_IMAGES)
    starts = [f"{image} , " * number for number in NUM_IMAGES]
    of_rows: dict[str, Any] = {
        "prompt": [a + b for a, b in zip(starts, sentences(count), strict=True)]
    }
    if kind == "dpo":
        of_rows |= {"chosen": sentences(count)[::-1], "rejected": sentences(count)}
    else:
        labels = [row % 3 > 0 for row in range(count)]
        of_rows |= {"completion": sentences(count)[::-1], "label": labels}
    kinds = {name: Value("bool" if name == "label" else "string") for name in of_rows}
    return Dataset.from_dict(
        {"images": pictures(NUM_IMAGES), **of_rows},
        features=Features({"images": List(Image()), **kinds}),
    )


def prompts() -> Dataset:
    """TRL's rollouts take rows with images alone, in conversations."""
    numbers = [1 + (row % 3 == 1) for row in range(8)]
    asked = [[{"role": "user", "content": text}] for text in sentences(8)]
    features = Features(
        {
            "images": List(Image()),
            "prompt": List({"role": Value("string"), "content": Value("string")}),
        }
    )
    return Dataset.from_dict({"images": pictures(numbers), "prompt": asked}, features=features)


def make(cls: type, processor: Any, model: Any = None, **settings: Any) -> Any:
    is_ours = issubclass(cls, RoundPipeSFTTrainer)
    given: dict[str, Any] = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "num_train_epochs": 1,
        **QUIET_SGD,
        "bf16": False,
        "max_length": None,
        "remove_unused_columns": False,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "epoch",
    }
    if is_ours:
        args: Any = RoundPipeSFTConfig(**given, devices=settings.pop("devices", 3))
    else:
        settings.pop("devices", None)
        args = SFTConfig(**given)
    if model is None:
        torch.manual_seed(0)
        image = processor.tokenizer.convert_tokens_to_ids("<image>")
        model = llava(image_token_id=image)
    torch.manual_seed(1)  # which adapters are drawn from
    data = settings.pop("data", None) or rows()
    return cls(
        model,
        args,
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        processing_class=processor,
        **settings,
    )


LORA = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
def test_same_as_trl(processor: ProcessorMixin, adapters: LoraConfig | None, devices: int) -> None:
    pair = Pair(
        *(
            make(cls, processor, peft_config=adapters, devices=devices)
            for cls in (RoundPipeSFTTrainer, SFTTrainer)
        )
    )
    for trainer in pair:
        run(trainer)
    assert_same(pair)
    pair.ours.model_wrapped.close()


GRID = [
    (name, adapters, devices)
    for name in ("gemma3", "qwen2.5-vl", "qwen3-vl", "qwen3.5")
    for adapters in (None, LORA)
    for devices in (1, 3)
]


@pytest.mark.parametrize(
    ("name", "adapters", "devices"),
    [
        pytest.param(*case, marks=[] if case == ("qwen3-vl", None, 3) else pytest.mark.slow)
        for case in GRID
    ],
)
def test_images_by_a_collator_of_the_users(
    processor: ProcessorMixin, name: str, adapters: LoraConfig | None, devices: int
) -> None:
    """It makes what the models' processors make, which need more than is installed here: images of
    different sizes in Qwen's."""
    seen = seen_rows(make_seeing(name), NUM_IMAGES)
    data = Dataset.from_dict({"images": [[]] * len(seen), "row": list(range(len(seen)))})
    pair = Pair(
        *(
            make(
                cls,
                processor,
                make_seeing(name),
                data=data,
                peft_config=adapters,
                devices=devices,
                data_collator=lambda rows: collated([seen[row["row"]] for row in rows]),
            )
            for cls in (RoundPipeSFTTrainer, SFTTrainer)
        )
    )
    for trainer in pair:
        run(trainer)
    assert_same(pair)
    pair.ours.model_wrapped.close()


METHODS: dict[str, tuple[tuple[type, type], tuple[type, type]]] = {
    "dpo": ((RoundPipeDPOTrainer, DPOTrainer), (RoundPipeDPOConfig, DPOConfig)),
    "kto": ((RoundPipeKTOTrainer, KTOTrainer), (RoundPipeKTOConfig, KTOConfig)),
    "grpo": ((RoundPipeGRPOTrainer, GRPOTrainer), (RoundPipeGRPOConfig, GRPOConfig)),
    "rloo": ((RoundPipeRLOOTrainer, RLOOTrainer), (RoundPipeRLOOConfig, RLOOConfig)),
}


def seeing_model(processor: Any) -> Any:
    torch.manual_seed(0)
    image = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    if processor.image_token == "<image>":
        return llava(image_token_id=image)
    # No token, because answers that are drawn may have any, and it would have to have a video.
    return qwen2_5_vl(image_token_id=image, video_token_id=-1)


def length_and_place(completions: list[Any], **_: Any) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [float(len(text) % 7 + place % 3) for place, text in enumerate(texts)]


def trainer_of(method: str, is_ours: bool, processor: Any, **settings: Any) -> Any:
    trainers, configs = METHODS[method]
    draws = method in ("grpo", "rloo")
    given: dict[str, Any] = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        **QUIET_SGD,
        "bf16": False,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    if draws:
        image = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        given |= {"num_generations": 2, "max_completion_length": 5}
        given["generation_kwargs"] = {"suppress_tokens": [image]}
    else:
        given |= {"max_length": None, "remove_unused_columns": False}
    devices = settings.pop("devices")
    args = configs[0](**given, devices=devices) if is_ours else configs[1](**given)
    model = settings.pop("model", None) or seeing_model(processor)
    if draws:
        settings["reward_funcs"] = length_and_place
        data = prompts()
    else:
        data = preferences(method, processor.image_token)
        # TRL would load one by its name.
        settings["ref_model"] = None if settings["peft_config"] else seeing_model(processor)
    torch.manual_seed(1)  # which adapters are drawn from
    return trainers[0 if is_ours else 1](
        model,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=processor,
        **settings,
    )


def assert_method_is_same(method: str, processor: Any, **settings: Any) -> None:
    pair = Pair(*(trainer_of(method, is_ours, processor, **settings) for is_ours in (True, False)))
    for trainer in pair:
        run(trainer)
    assert logged(pair.ours)[0]["grad_norm"] > 0
    assert_same(pair)
    pair.ours.model_wrapped.close()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("adapters", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_preferences_and_rewards(
    processor: ProcessorMixin, method: str, adapters: LoraConfig | None, devices: int
) -> None:
    """Evaluation, and a reference that sees as well, included. Rollouts of GRPO are drawn."""
    assert_method_is_same(method, processor, peft_config=adapters, devices=devices)


@pytest.mark.parametrize("method", ["kto", "rloo"])
def test_other_losses(processor: ProcessorMixin, method: str) -> None:
    assert_method_is_same(method, processor, peft_config=LORA, devices=3)


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_images_as_patches(of_patches: ProcessorMixin, method: str) -> None:
    """Position ids of three kinds go with rows and their completions."""
    assert_method_is_same(method, of_patches, peft_config=LORA, devices=3)


@pytest.mark.parametrize("share", [0.85, 0.0], ids=["resident", "streamed"])
@pytest.mark.parametrize("kind", ["processor", "of_patches"])
def test_rollouts_by_a_copy_that_sees(
    kind: str, share: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_copies_to", lambda device: True)
    monkeypatch.setattr(generation, "_OF_FREE", share)
    processor = request.getfixturevalue(kind)
    assert_method_is_same("grpo", processor, peft_config=LORA, devices=1)


@pytest.mark.parametrize("method", METHODS)
def test_other_trainers_refuse_a_model_that_no_preset_knows(
    processor: ProcessorMixin, method: str
) -> None:
    model = LlavaNextForConditionalGeneration(
        LlavaNextConfig(
            vision_config={"model_type": "clip_vision_model", **TOWER},
            text_config={"model_type": "llama", **TINY},
        )
    )
    with pytest.raises(ConfigError, match="LlavaNextForConditionalGeneration: it has no preset"):
        trainer_of(method, True, processor, model=model, peft_config=LORA, devices=1)


def test_a_model_that_no_preset_knows_is_refused(processor: ProcessorMixin) -> None:
    config = LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", **TOWER},
        text_config={"model_type": "llama", **TINY},
    )
    with pytest.raises(ConfigError, match="LlavaNextForConditionalGeneration: it has no preset"):
        make(RoundPipeSFTTrainer, processor, LlavaNextForConditionalGeneration(config))
