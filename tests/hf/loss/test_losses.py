"""The user's loss is used, whatever form it has, and batches cut into microbatches give the loss of
the whole batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import TrainingArguments

from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from roundpipe_hf.loss.model_call import EngineStandIn, ModelAnswer, Replay
from tests.support.preset_models import images, make_vit
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
    trained,
)

ROWS = token_rows(14)


# --- losses of users ---


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return token_loss(outputs, labels)


def unshifted_mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def row_mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs.logits.square().mean()


def loss_of_both_kinds(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return token_loss(outputs, labels, num_items_in_batch) + 0.1 * row_mean_loss(outputs, labels)


def contrastive_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    pooled = outputs.logits.mean(dim=1)
    return cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "loss",
    [
        token_loss,
        mean_loss,
        unshifted_mean_loss,
        row_mean_loss,
        loss_of_both_kinds,
        contrastive_loss,
    ],
)
def test_compute_loss_func(loss: Any, accumulation: int) -> None:
    """Every form that a loss has."""
    assert_same(
        train_both(
            MODELS["full"],
            ROWS,
            compute_loss_func=loss,
            gradient_accumulation_steps=accumulation,
            max_grad_norm=0,
            # With a larger one the contrastive loss makes a thousand times of a rounding error.
            learning_rate=1e-2,
        )
    )


WEIGHTS = torch.tensor([1.0, 10.0, 1.0, *[3.0] * 61])


class ByClass:
    """A mean that weighs classes, as in the documentation of `Trainer`."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**{name: value for name, value in inputs.items() if name != "weights"})
        loss = self.loss_of(outputs.logits, inputs)
        return (loss, outputs) if return_outputs else loss

    def loss_of(self, logits: Tensor, inputs: Any) -> Tensor:
        return cross_entropy(logits, inputs["labels"], weight=WEIGHTS[: logits.shape[-1]])


class ByToken(ByClass):
    def loss_of(self, logits: Tensor, inputs: Any) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), weight=WEIGHTS)


class ByColumn(ByClass):
    def loss_of(self, logits: Tensor, inputs: Any) -> Tensor:
        losses = cross_entropy(logits, inputs["labels"], reduction="none")
        return (losses * inputs["weights"]).sum() / inputs["weights"].sum()


def image_rows(labels: Sequence[int], **column: Sequence[float]) -> list[dict[str, Any]]:
    columns = {"pixel_values": images(len(labels))["pixel_values"], "labels": torch.tensor(labels)}
    columns |= {name: torch.tensor(values) for name, values in column.items()}
    return [{name: values[row] for name, values in columns.items()} for row in range(len(labels))]


def token_rows_of_few_classes() -> list[dict[str, Any]]:
    rows = token_rows(12, kept=(12,))
    for index, row in enumerate(rows):
        row["labels"] = torch.zeros_like(row["labels"])
        row["labels"][10] = index % 3
    return rows


ALIKE: dict[str, tuple[type, Any, list[dict[str, Any]]]] = {
    "class at the end": (ByClass, make_vit, image_rows([0, 0, 0, 1] * 3)),
    "class in another batch": (
        ByClass,
        make_vit,
        image_rows([0, 2, 0, 2, 0, 0, 0, 2, 0, 0, 1, 2, 0, 1, 0, 0]),
    ),
    "column": (ByColumn, make_vit, image_rows([0] * 12, weights=[1.0, 1.0, 1.0, 5.0] * 3)),
    "token": (ByToken, MODELS["full"], token_rows_of_few_classes()),
}


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("case", ALIKE)
def test_a_mean_with_weights_is_none_over_rows(case: str, devices: int) -> None:
    """The first rows have equal weights, and look like a plain mean."""
    mixin, make, rows = ALIKE[case]
    pair = train_both(
        make,
        rows,
        mixin,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        learning_rate=0.01,
        eval_dataset=rows[:4],
        eval_strategy="epoch",
        devices=devices,
    )
    assert_same(pair)


class Writes:
    """Labels become those of the next class, each time that it is called."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        labels.copy_(torch.where(labels < 0, -100, (labels + 1) % 64))
        outputs = model(input_ids=inputs["input_ids"])
        loss = loss_of_both_kinds(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_writes_to_its_batch(accumulation: int) -> None:
    """It is called several times for the same rows, which were then written to several times."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
    }
    assert_same(train_both(MODELS["full"], ROWS, Writes, **settings))


def test_a_loss_finds_its_microbatch_where_the_model_is_said_to_be() -> None:
    """``weight.to(model.device)`` went to the host, where the model is, and no loss could be made
    of it."""
    there = {"logits": torch.empty(2, 3, device="meta")}
    replay = Replay(MODELS["full"](), ModelAnswer(), there, {}, batch=0)
    assert replay.device.type == "meta"
    assert Replay(MODELS["full"](), ModelAnswer(), {}, {}, batch=0).device.type == "cpu"
    whole = EngineStandIn(MODELS["full"](), lambda **_: there, torch.device("meta"))
    assert whole.device.type == "meta"
    assert EngineStandIn(MODELS["full"](), lambda **_: there).device.type == "cpu"


@pytest.mark.parametrize("is_own_step", [False, True])
def test_and_where_trainers_device_is_said_to_be(
    is_own_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``weight.to(self.args.device)`` went to the first GPU, also for a microbatch on another one
    or on the host."""
    takes_for_the_models = torch.device("cpu", 7)  # equals the device of no tensor
    inherited = TrainingArguments.device.fget
    monkeypatch.setattr(
        TrainingArguments, "device", property(lambda args: inherited(args) and takes_for_the_models)
    )
    in_loss, outside = set(), set()

    class Weighed(RoundPipeTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            outputs = model(**inputs)
            in_loss.add(self.args.device)
            loss = mean_loss(outputs, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

        def log(self, *args: Any, **kwargs: Any) -> None:
            outside.add(self.args.device)
            super().log(*args, **kwargs)

        def _get_num_items_in_batch(self, batch_samples: Any, device: torch.device) -> Any:
            outside.add(device)  # where several processes gather what they have counted
            return super()._get_num_items_in_batch(batch_samples, device)

    class OwnStep(Weighed):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            return loss.detach()

    cls = OwnStep if is_own_step else Weighed
    trainer = trained(
        cls, MODELS["full"](), ROWS, eval_dataset=ROWS[:5], eval_strategy="epoch", devices=2
    )
    trainer.compute_metrics = (
        lambda _: {}
    )  # which wants logits, so that Trainer computes the loss itself
    trainer.evaluate()
    assert in_loss == {torch.device("cpu")}
    assert outside == {takes_for_the_models}
    assert len(trainer.model_wrapped.devices) == 2


class NewSignature:
    """A marker in the loss has to show up in the log."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss + 100.0 * len(inputs["input_ids"]) / 3
        return (loss, outputs) if return_outputs else loss


class OldSignature:
    """As older releases called it: a mean that knows nothing of the window."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OldSignatureForPlain:
    """What `OldSignature` means to a plain Trainer of today, told the way its documentation asks
    for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return OldSignature.compute_loss(self, model, inputs, return_outputs)  # type: ignore[arg-type]


class ExtraColumn:
    """Logits and a column that the model does not take."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels, importance = inputs.pop("labels"), inputs.pop("importance")
        outputs = model(**inputs)
        losses = cross_entropy(
            outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
        )
        loss = (losses * importance[:, None]).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("accumulation", [1, 4])
def test_compute_loss_with_the_new_signature(accumulation: int) -> None:
    rows = token_rows(12)
    pair = train_both(
        MODELS["full"],
        rows,
        NewSignature,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0,
        eval_dataset=rows[:4],
    )
    assert_same(pair, atol=1e-4)  # losses of several hundred
    assert all(entry["loss"] >= 100.0 for entry in logged(pair.ours)[:-1])
    assert pair.ours.evaluate()["eval_loss"] == pytest.approx(pair.plain.evaluate()["eval_loss"])


@pytest.mark.parametrize("accumulation", [1, 4])
def test_compute_loss_with_the_old_signature(accumulation: int) -> None:
    settings = {
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": 0.0,
        "eval_dataset": ROWS[:4],
    }
    pair = train_both(MODELS["full"], ROWS, OldSignatureForPlain, **settings)
    assert_same(pair)
    old = trained(
        type("Old", (OldSignature, RoundPipeTrainer), {}),
        MODELS["full"](),
        ROWS,
        devices=3,
        **settings,
    )
    assert_same(pair._replace(ours=old))
    assert old.evaluate()["eval_loss"] == pytest.approx(pair.plain.evaluate()["eval_loss"])


def test_compute_loss_with_a_column_of_its_own() -> None:
    rows = [row | {"importance": torch.tensor(1.0 + index % 3)} for index, row in enumerate(ROWS)]
    assert_same(
        train_both(
            MODELS["full"],
            rows,
            ExtraColumn,
            remove_unused_columns=False,
            gradient_accumulation_steps=2,
        )
    )


@pytest.mark.parametrize("has_func", [False, True])
def test_a_model_that_does_not_take_num_items(has_func: bool) -> None:
    """Its losses are means over each batch's tokens, rows without any included, and divide by the
    batches."""

    def deaf() -> nn.Module:
        model = MODELS["full"]()
        model.accepts_loss_kwargs = False
        return model

    rows = token_rows(12, (12, 0, 7, 3))
    more = {"compute_loss_func": mean_loss} if has_func else {}
    assert_same(
        train_both(deaf, rows, per_device_train_batch_size=4, gradient_accumulation_steps=2, **more)
    )


class Regression(nn.Module):
    """A plain module without config that accepts loss arguments and ignores them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor | None = None, **_: Any) -> dict[str, Tensor]:
        predicted = self.layers(x).squeeze(-1)
        return (
            {"logits": predicted}
            if labels is None
            else {"loss": mse_loss(predicted, labels), "logits": predicted}
        )


@pytest.mark.parametrize("accumulation", [1, 3])
def test_regression_is_a_mean_over_rows(accumulation: int) -> None:
    """Adding up the means of microbatches would train with a multiple of the loss."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        {"x": torch.randn(4, generator=generator), "labels": torch.randn((), generator=generator)}
        for _ in range(11)
    ]
    pair = train_both(
        Regression,
        rows,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        eval_dataset=rows[:5],
    )
    assert_same(pair)
    assert pair.ours.evaluate()["eval_loss"] == pytest.approx(pair.plain.evaluate()["eval_loss"])


@pytest.mark.parametrize("reduction", ["rows", "sum"])
def test_a_models_own_loss_is_what_it_is_declared_to_be(reduction: Any) -> None:
    """A declaration of the model's own loss is tried like one of the user's: this one divides by
    the number of items, and taken for a mean over rows it trained with a part of its gradient."""
    rows = [
        dict(zip(("pixel_values", "labels"), row, strict=True))
        for row in zip(*images(8).values(), strict=True)
    ]
    pair = make_both(make_vit, rows, loss_reduction=reduction, per_device_train_batch_size=4)
    if reduction == "rows":
        with pytest.raises(ConfigError, match="loss_reduction='rows' does not fit the loss"):
            run(pair.ours)
    else:
        assert_same(Pair(*map(run, pair)))


# --- what cannot run ---


def test_a_dataset_without_labels_is_named_as_the_reason() -> None:
    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    trainer = make_trainer(RoundPipeTrainer, MODELS["full"](), rows)
    with pytest.raises(
        ValueError, match="did not return a loss.*the inputs it received are input_ids"
    ):
        trainer.train()
