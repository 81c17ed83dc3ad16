"""A wrapper hid the model's forward, so Trainer found no columns to keep and no labels to evaluate
with.

The story: `find_labels` reads the class, `_remove_unused_columns` the signature of the model's
forward; a wrapper with `*args, **kwargs` has neither, and the evaluation loss silently disappears.
Here: what the engine shows of a ViT, plain and with LoRA, and that an evaluation over batches of
two of five images is the plain model's.
"""

import copy
import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers.utils import can_return_loss, find_labels

from roundpipe import RoundPipeRunConfig
from tests.support.engines import Engines
from tests.support.preset_models import images, make_vit


def make(kind: str) -> Any:
    model = make_vit()
    if kind == "plain":
        return model
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["classifier"],
        init_lora_weights=False,
    )
    return get_peft_model(model, config)


def base_class(model: Any) -> type:
    return type(model.get_base_model() if hasattr(model, "get_base_model") else model)


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_the_model_is_found_behind_the_engine(engines: Engines, kind: str) -> None:
    """Trainer keeps `engine.model` as its model: the object the user made, its class and forward
    untouched."""
    model = make(kind)
    before = inspect.signature(model.forward)
    engine = engines(model)
    assert engine.model is model
    assert "forward" not in vars(model)
    assert inspect.signature(engine.model.forward) == before
    assert find_labels(base_class(engine.model)) == ["labels"]
    assert can_return_loss(base_class(engine.model)) is can_return_loss(base_class(make(kind)))


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_evaluation_in_batches_is_the_plain_models(engines: Engines, kind: str) -> None:
    """Each batch's loss is its own mean, of which Trainer takes the mean over samples: not what any
    pooling gives."""
    model, data = make(kind).eval(), images(5)
    batches = [{name: value[i : i + 2] for name, value in data.items()} for i in (0, 2, 4)]

    def evaluate(run: Any) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            outputs = [run(**batch) for batch in batches]
        weights = [len(batch["labels"]) for batch in batches]
        weighted = sum(
            output.loss * weight for output, weight in zip(outputs, weights, strict=True)
        ) / sum(weights)
        return weighted, torch.cat([output.logits for output in outputs])

    loss, logits = evaluate(copy.deepcopy(model))
    engine = engines(model, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    ours, our_logits = evaluate(engine)
    torch.testing.assert_close(ours, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(our_logits, logits, rtol=0, atol=1e-6)
