"""`RoundPipeSFTTrainer` over a data set with images does what TRL's does: the same losses, weights
and metrics."""

from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from transformers import AutoTokenizer, LlavaProcessor, ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next import LlavaNextConfig, LlavaNextForConditionalGeneration
from trl import SFTConfig, SFTTrainer

from roundpipe.errors import ConfigError
from roundpipe_hf.trl.sft import RoundPipeSFTConfig, RoundPipeSFTTrainer
from tests.support.example_data import save_tokenizer, sentences
from tests.support.preset_models import TINY
from tests.support.trainers import Pair, assert_same, run
from tests.support.vision_models import TOWER, collated, llava, make_seeing, seen_rows

# Batches of three rows, all sorts of them: some, two and no images.
NUM_IMAGES = (1, 0, 2, 0, 0, 0, 1, 1, 0)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ProcessorMixin:
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    side = {"height": 8, "width": 8}
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=side),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def rows() -> Dataset:
    from PIL import Image as Picture

    generator = torch.Generator().manual_seed(0)
    sizes = (3, 10, 12)
    pictures = [
        [
            Picture.fromarray(
                torch.randint(256, (*sizes[1:], 3), generator=generator, dtype=torch.uint8).numpy()
            )
            for _ in range(number)
        ]
        for number in NUM_IMAGES
    ]
    texts = [
        "<image> " * number + text
        for number, text in zip(NUM_IMAGES, sentences(len(NUM_IMAGES)), strict=True)
    ]
    features = Features({"images": List(Image()), "text": Value("string")})
    return Dataset.from_dict({"images": pictures, "text": texts}, features=features)


def make(cls: type, processor: Any, model: Any = None, **settings: Any) -> Any:
    is_ours = issubclass(cls, RoundPipeSFTTrainer)
    given: dict[str, Any] = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "num_train_epochs": 1,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "max_length": None,
        "remove_unused_columns": False,
        "seed": 7,
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


@pytest.mark.parametrize("name", [pytest.param("qwen2.5-vl", marks=pytest.mark.slow), "qwen3-vl"])
def test_images_of_different_sizes(processor: ProcessorMixin, name: str) -> None:
    """The user's collator makes what Qwen's processors make, which need more than is installed
    here."""
    seen = seen_rows(make_seeing(name), NUM_IMAGES)
    data = Dataset.from_dict({"images": [[]] * len(seen), "row": list(range(len(seen)))})
    pair = Pair(
        *(
            make(
                cls,
                processor,
                make_seeing(name),
                data=data,
                data_collator=lambda rows: collated([seen[row["row"]] for row in rows]),
            )
            for cls in (RoundPipeSFTTrainer, SFTTrainer)
        )
    )
    for trainer in pair:
        run(trainer)
    assert_same(pair)
    pair.ours.model_wrapped.close()


def test_a_model_that_no_preset_knows_is_refused(processor: ProcessorMixin) -> None:
    config = LlavaNextConfig(
        vision_config={"model_type": "clip_vision_model", **TOWER},
        text_config={"model_type": "llama", **TINY},
    )
    with pytest.raises(ConfigError, match="LlavaNextForConditionalGeneration: it has no preset"):
        make(RoundPipeSFTTrainer, processor, LlavaNextForConditionalGeneration(config))
