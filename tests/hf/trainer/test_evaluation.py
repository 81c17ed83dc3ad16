"""`evaluate` and `predict` give the plain Trainer's metrics, keys and arrays, and always see every
update."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import EvalPrediction

from roundpipe_hf import RoundPipeTrainer
from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same,
    logged,
    make_both,
    make_trainer,
    run,
    token_rows,
    train_both,
)

ROWS = token_rows(5)


def assert_same_metrics(pair: Pair, method: str = "evaluate", *args: Any) -> None:
    ours, plain = (getattr(trainer, method)(*args) for trainer in pair)
    clock = ("runtime", "per_second", "preparation_time")
    assert list(ours) == list(plain)
    for key, value in plain.items():
        if not key.endswith(clock):
            assert ours[key] == pytest.approx(value, abs=1e-5), key


@pytest.mark.parametrize("kind", ["full", pytest.param("tied", marks=pytest.mark.slow), "lora"])
def test_before_and_after_training(kind: str) -> None:
    """5 rows by 2; the mean of batch losses weighted by rows, not by tokens. No optimizer is
    needed."""
    pair = make_both(MODELS[kind], token_rows(9), eval_dataset=ROWS, per_device_eval_batch_size=2)
    assert_same_metrics(pair)
    assert pair.ours.optimizer is None
    for trainer in pair:
        run(trainer)
    assert_same_metrics(pair)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_with_label_smoothing(kind: str) -> None:
    assert_same_metrics(
        make_both(MODELS[kind], ROWS, eval_dataset=ROWS, label_smoothing_factor=0.1)
    )


def test_during_training_every_update_is_in() -> None:
    """Evaluation between steps, synchronous or not, sees the weights of the step just taken."""
    settings: dict[str, Any] = {"eval_dataset": ROWS, "eval_strategy": "steps", "eval_steps": 1}
    pair = train_both(MODELS["full"], token_rows(9), **settings)
    ours, plain = (
        [entry["eval_loss"] for entry in logged(t) if "eval_loss" in entry] for t in pair
    )
    assert ours == pytest.approx(plain, abs=1e-5)


class Averaged:
    """Evaluates the average of all weights so far in place of the model, as `torch_ema` does."""

    model: Any
    mean: Sequence[Tensor] | None = None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        parameters = list(self.model.parameters())
        own = [parameter.detach().clone() for parameter in parameters]
        before = own if self.mean is None else self.mean
        self.mean = [(old + new) / 2 for old, new in zip(before, own, strict=True)]
        _put(self.mean, parameters)
        try:
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)  # type: ignore[misc]
            return metrics
        finally:
            _put(own, parameters)


class ByHand:
    """Evaluates in a loop of its own."""

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.model.eval()
        losses = [
            self.prediction_step(self.model_wrapped, batch, True)[0]
            for batch in self.get_eval_dataloader()
        ]
        metrics = {"eval_loss": torch.stack(losses).mean().item()}
        self.log(metrics)
        return metrics


class AveragedByHand(Averaged, ByHand):
    pass


def _put(values: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)  # which torch does not count


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("how", [Averaged, AveragedByHand])
def test_weights_are_exchanged_for_an_evaluation_and_put_back(
    how: type, kind: str, devices: int
) -> None:
    """Layers with frozen weights stay on one device, where the next step would have trained from
    the average."""
    settings: dict[str, Any] = {"eval_dataset": ROWS, "eval_strategy": "steps", "eval_steps": 1}
    pair = make_both(MODELS[kind], token_rows(12), how, devices=devices, **settings)
    assert_same(Pair(*map(run, pair)))


@pytest.mark.parametrize("devices", [1, 3])
def test_merged_adapters_are_evaluated(devices: int) -> None:
    """PEFT adds them to frozen weights through ``.data``."""
    pair = Pair(*map(run, make_both(MODELS["lora"], token_rows(9), devices=devices)))
    pair.ours.synchronize()
    for change in ("merge_adapter", "unmerge_adapter"):
        for trainer in pair:
            getattr(trainer.model, change)()
        assert_same_metrics(pair, "evaluate", ROWS)


def test_the_mode_is_back_to_training_afterwards() -> None:
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), ROWS, eval_dataset=ROWS)
    trainer.evaluate()
    assert not trainer.model.training
    trainer.train()
    assert trainer.model.training
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    guessed = logits.argmax(-1) if logits.ndim == 3 else logits
    valid = labels[:, 1:] != -100
    return {"accuracy": float((guessed[:, :-1] == labels[:, 1:])[valid].mean())}


def test_metrics_are_computed_from_all_logits() -> None:
    assert_same_metrics(
        make_both(MODELS["full"], ROWS, eval_dataset=ROWS, compute_metrics=accuracy)
    )


def test_logits_are_reduced_batch_by_batch() -> None:
    pair = make_both(
        MODELS["full"],
        ROWS,
        eval_dataset=ROWS,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        eval_accumulation_steps=1,
    )
    assert_same_metrics(pair)


def test_predict_returns_the_plain_arrays() -> None:
    pair = make_both(MODELS["full"], ROWS, per_device_eval_batch_size=2)
    ours, plain = (trainer.predict(ROWS) for trainer in pair)
    np.testing.assert_allclose(ours.predictions, plain.predictions, atol=1e-5)
    np.testing.assert_array_equal(ours.label_ids, plain.label_ids)


def test_predict_without_labels() -> None:
    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    ours, plain = (trainer.predict(rows) for trainer in make_both(MODELS["full"], ROWS))
    np.testing.assert_allclose(ours.predictions, plain.predictions, atol=1e-5)
    assert ours.label_ids is plain.label_ids is None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compute_metrics": accuracy},
        {"batch_eval_metrics": True},
        {"accelerator_config": {"dispatch_batches": False}},
    ],
)
def test_a_data_set_without_a_length_counts_each_row_once(settings: dict[str, Any]) -> None:
    """Its last batch is short, 1 row of 2, and its loss weighed as much as that of the full ones:
    Accelerate does that only where it is told not to dispatch batches, as TRL tells it."""
    if "batch_eval_metrics" in settings:
        settings = settings | {"compute_metrics": lambda _, compute_result: {}}
    pair = make_both(
        MODELS["full"], ROWS, eval_dataset=Stream(), per_device_eval_batch_size=2, **settings
    )
    assert_same_metrics(pair)
    ours, plain = (trainer.predict(Stream()) for trainer in pair)
    np.testing.assert_allclose(ours.predictions, plain.predictions, atol=1e-5)


def test_several_evaluation_sets() -> None:
    assert_same_metrics(make_both(MODELS["full"], ROWS, eval_dataset={"a": ROWS, "b": ROWS[:2]}))


def test_columns_are_those_the_models_forward_takes() -> None:
    """The engine does not hide the signature; columns the model does not know are left out."""
    columns = {
        "input_ids": torch.stack([row["input_ids"] for row in ROWS]).tolist(),
        "labels": torch.stack([row["labels"] for row in ROWS]).tolist(),
        "attention_mask": [[1] * 12 for _ in ROWS],
        "extra": [0.5] * 5,
    }
    dataset = Dataset.from_dict(columns)
    pair = train_both(MODELS["lora"], dataset, eval_dataset=dataset)
    assert pair.ours.label_names == pair.plain.label_names == ["labels"]
    kept = [sorted(next(iter(trainer.get_train_dataloader()))) for trainer in pair]
    assert kept[0] == kept[1] == ["attention_mask", "input_ids", "labels"]
    assert_same_metrics(pair)


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        num_labels=3,
    )
    return ViTForImageClassification(config)


def make_lora_vit() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["classifier"],
        init_lora_weights=False,
    )
    return get_peft_model(make_vit(), config)


def image_rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    return [{"pixel_values": image, "labels": index % 3} for index, image in enumerate(images)]


@pytest.mark.parametrize("make", [make_vit, make_lora_vit])
def test_image_classification(make: Any) -> None:
    """Label names and eval_loss of a ViT, with and without adapters; best-model selection finds its
    metric."""
    pair = train_both(
        make,
        image_rows(8),
        eval_dataset=image_rows(5),
        per_device_eval_batch_size=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="eval_loss",
        load_best_model_at_end=True,
    )
    assert pair.ours.label_names == pair.plain.label_names == ["labels"]
    assert pair.ours.state.best_metric == pytest.approx(pair.plain.state.best_metric, abs=1e-5)
    assert_same_metrics(pair)


def test_autocast_in_evaluation_returns_fp32() -> None:
    ours, plain = (trainer.predict(ROWS) for trainer in make_both(MODELS["full"], ROWS, bf16=True))
    assert ours.predictions.dtype == plain.predictions.dtype == np.float32
    np.testing.assert_allclose(ours.predictions, plain.predictions, atol=2e-3)


def test_a_custom_loss_sees_the_whole_batch_in_evaluation() -> None:
    """Outputs come back merged, so a loss whose rows depend on each other is exact there."""

    def spread(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.mean(dim=1).std(dim=0).sum()

    assert_same_metrics(
        make_both(MODELS["full"], ROWS, eval_dataset=ROWS, compute_loss_func=spread)
    )


def test_the_engines_making_counts_in_one_evaluation_only() -> None:
    """It was subtracted from every later one's time, which became negative."""
    trainer = make_both(MODELS["full"], token_rows(6), eval_dataset=token_rows(4)).ours
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_model_preparation_time"] > 0.0
    assert second["eval_model_preparation_time"] == 0.0
    assert second["eval_runtime"] > 0.0
