"""The same parity where the plain Trainer runs on a GPU and ours sends its stages to all there
are."""

from typing import Any

import pytest
import torch

from tests.support.device_sets import ACCELERATORS
from tests.support.trainers import MODELS, assert_same, token_rows, train_both, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ACCELERATORS, reason="no CUDA device"),
]
ON_GPU: dict[str, Any] = {"use_cpu": False, "devices": None}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_same_as_plain(kind: str, accumulation: int) -> None:
    rows = token_rows(20)
    pair = train_both(
        MODELS[kind],
        rows,
        eval_dataset=rows[:5],
        eval_strategy="epoch",
        gradient_accumulation_steps=accumulation,
        **ON_GPU,
    )
    assert_same(pair, atol=1e-3)
    assert all(parameter.device.type == "cpu" for parameter in pair.ours.model.parameters())


def test_autocast() -> None:
    assert_same(train_both(MODELS["full"], token_rows(20), bf16=True, **ON_GPU), atol=2e-2)


class WeighedClasses:
    """As in Trainer's documentation: whatever a loss needs goes to the model's device."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        weight = torch.linspace(0.5, 1.5, 64).to(model.device)
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, weight)
        return (loss, outputs) if return_outputs else loss


class WeighedByArguments:
    """On the device that Trainer moves batches and models to."""

    args: Any

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        logits, labels = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        weight = torch.linspace(0.5, 1.5, 64).to(self.args.device)
        loss = torch.nn.functional.cross_entropy(logits, labels, weight)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("loss", [WeighedClasses, WeighedByArguments])
def test_a_loss_with_tensors_of_its_own(loss: type) -> None:
    rows = token_rows(20)
    pair = train_both(
        MODELS["full"], rows, loss, eval_dataset=rows[:5], eval_strategy="epoch", **ON_GPU
    )
    assert_same(pair, atol=1e-3)


class StepOfItsOwn:
    def training_step(
        self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


def test_a_step_of_its_own() -> None:
    assert_same(train_both(MODELS["full"], token_rows(20), StepOfItsOwn, **ON_GPU), atol=1e-3)


def test_tf32() -> None:
    """A switch of the process: both have it."""
    assert_same(train_both(MODELS["full"], token_rows(20), tf32=True, **ON_GPU), atol=1e-2)


def test_bf16_weights_with_fp32_masters() -> None:
    """What the documentation recommends; the plain Trainer has no masters, so only the first loss
    is compared."""
    pair = train_both(
        lambda: MODELS["full"]().bfloat16(),
        token_rows(20),
        label_smoothing_factor=0.1,
        max_steps=3,
        **ON_GPU,
    )
    ours, plain = (trainer.state.log_history[0]["loss"] for trainer in pair)
    assert ours == pytest.approx(plain, abs=2e-2)
    assert all(bool(weight.isfinite().all()) for weight in weights(pair.ours).values())
