"""Losses as scripts bring them: the plain Trainer's numbers on one device and on three, whatever a
loss makes of its batch. Guessing how a loss is normalised made some of them silently wrong."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, normalize
from transformers import TrainerCallback

from roundpipe import RoundPipe
from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments, loss_reduction
from roundpipe_hf.loss.reduction import reads_num_items
from tests.support.models import make_llama, make_lora_llama
from tests.support.trainers import (
    MODELS,
    assert_same,
    assert_same_weights,
    logged,
    make_both,
    make_trainer,
    run,
    token_rows,
    train_both,
)

IGNORED = -100
LENGTHS = (12, 12, 5, 3)


def uneven_rows(count: int = 16) -> list[dict[str, Any]]:
    """Rows of unlike lengths with an attention mask, whose labels count everywhere but in
    padding."""
    rows: list[dict[str, Any]] = []
    for index, row in enumerate(token_rows(count, kept=(12,), seed=3)):
        mask = torch.arange(12) < LENGTHS[index % 4]
        labels = row["input_ids"].masked_fill(~mask, IGNORED)
        reward = torch.tensor(float(index % 3) - 1.0)
        rows.append(row | {"attention_mask": mask.long(), "labels": labels, "reward": reward})
    return rows


ROWS = uneven_rows()


def nll_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Of each next token, masked or not."""
    return cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


class Loss:
    """Calls the model with what it takes of the batch."""

    state: Any
    model: Any

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = self.loss_of(model, inputs, outputs.logits, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        raise NotImplementedError


class AnotherMask(Loss):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        mask = inputs["attention_mask"][:, 1:].float()
        return (nll_of(logits, inputs["input_ids"]) * mask).sum() / mask.sum()


class MeanOfMeans(Loss):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        mask = inputs["attention_mask"][:, 1:].float()
        nll = nll_of(logits, inputs["input_ids"]) * mask
        return (nll.sum(dim=1) / mask.sum(dim=1)).mean()


class SumOverItems(Loss):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        nll = nll_of(logits, inputs["labels"].clamp(min=0))
        return (nll * inputs["labels"][:, 1:].ne(IGNORED)).sum() / num_items


class SumAndMean(SumOverItems):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        return super().loss_of(model, inputs, logits, num_items) + 0.1 * logits.square().mean()


class Zero(Loss):
    """Worth nothing, with a gradient: it was taken for a sum."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        score = -nll_of(logits, inputs["input_ids"]).mean(dim=1)
        return -((score - score.detach()) * inputs["reward"]).mean()


class ZeroAtFirst(Loss):
    """Rewards come with the third step."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        reward = inputs["reward"] * (self.state.global_step >= 2)
        return (nll_of(logits, inputs["input_ids"]).mean(dim=1) * reward).mean()


class WeighedTokens(Loss):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        weight = torch.linspace(0.5, 2.0, logits.shape[-1])
        flat = logits[:, :-1].flatten(0, 1)
        return cross_entropy(flat, inputs["labels"][:, 1:].flatten(), weight=weight)


class Focal(Loss):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        nll = nll_of(logits, inputs["input_ids"])
        return ((1 - (-nll).exp()) ** 2 * nll).mean()


class Contrastive(Loss):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        pooled = normalize(logits.mean(dim=1), dim=-1)
        return cross_entropy(pooled @ pooled.T / 0.1, torch.arange(len(pooled)))


class BatchNormalised(Loss):
    """As group-relative advantages are."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        reward = inputs["reward"]
        advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
        return (nll_of(logits, inputs["input_ids"]).mean(dim=1) * advantage).mean()


class Distils(Loss):
    """From a teacher of the user's own."""

    teacher: Any = None

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        if self.teacher is None:
            torch.manual_seed(5)
            self.teacher = nn.Embedding(64, 64)
        with torch.no_grad():
            target = log_softmax(self.teacher(inputs["input_ids"]), dim=-1)
        student = log_softmax(logits / 2.0, dim=-1)
        return kl_div(student, target, log_target=True, reduction="batchmean")


class TwoForwards(Loss):
    """Of the tokens, and of the same ones rolled by one."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        rolled = model(input_ids=inputs["input_ids"].roll(1, dims=0)).logits
        return (
            mse_loss(logits.mean(dim=1), rolled.mean(dim=1))
            + nll_of(rolled, inputs["input_ids"]).mean()
        )


class SecondWithoutGradient(Loss):
    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        with torch.no_grad():
            base = model(input_ids=inputs["input_ids"]).logits
        return nll_of(logits, inputs["input_ids"]).mean() + (logits - 0.5 * base).square().mean()


class Edits(Loss):
    """A tensor that is not in the batch, and a column that was changed before the call."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        inputs["input_ids"][:, 1] = 3
        return model(input_ids=inputs["input_ids"].clone(), labels=inputs["labels"]).loss


class EditsLater(Edits):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        if self.state.global_step >= 2:
            return super().compute_loss(model, inputs)
        return model(input_ids=inputs["input_ids"], labels=inputs["labels"]).loss


class ChangesItsCall(Loss):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        kept = 1 + self.state.global_step
        return model(inputs["input_ids"], logits_to_keep=kept).logits.square().mean()


class Pairs(Loss):
    """Row i and row i + B / 2."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        chosen, rejected = (-nll_of(logits, inputs["input_ids"]).sum(dim=1)).chunk(2)
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


class OwnLossAndMore:
    """Trainer's, and a mean beside it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
        loss, outputs = super().compute_loss(  # type: ignore[misc]  # of the trainer mixed with
            model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        loss = loss + 0.01 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class Penalises(Loss):
    """Towards where the weights began. The gradient of that is no business of the pipeline's, and
    was lost."""

    start: Any = None

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        if self.start is None:
            self.start = [weight.detach().clone() + 0.01 for weight in weights]
        pairs = zip(weights, self.start, strict=True)
        penalty = torch.stack([(weight - start).square().sum() for weight, start in pairs]).sum()
        return nll_of(logits, inputs["input_ids"]).mean() + 0.5 * penalty


class ComparesWithTheBase(Loss):
    """The adapter is off for one call."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            base = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        margin = nll_of(base.logits, inputs["input_ids"]) - nll_of(logits, inputs["input_ids"])
        return -torch.nn.functional.logsigmoid(margin.sum(dim=1)).mean()


class ComparesWithItsOwnBase(Loss):
    """The same by `self.model`: on several workers at once it switched the adapter under
    others."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            base = self.model(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
            )
        margin = nll_of(base.logits, inputs["input_ids"]) - nll_of(logits, inputs["input_ids"])
        return -torch.nn.functional.logsigmoid(margin.sum(dim=1)).mean()


class SwitchesAdapters(Loss):
    """Two calls, one with each of two adapters, of which one trains."""

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        given = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        model.set_adapter("other")
        with torch.no_grad():
            others = model(**given).logits
        model.set_adapter("default")
        margin = nll_of(others, inputs["input_ids"]) - nll_of(logits, inputs["input_ids"])
        return -torch.nn.functional.logsigmoid(margin.sum(dim=1)).mean()


class DistilsFromAModel(Loss):
    """From a language model of its own class, that is no business of the pipeline's."""

    teacher: Any = None

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        if self.teacher is None:
            self.teacher = make_llama(tied=True).eval()
        with torch.no_grad():
            target = self.teacher(input_ids=inputs["input_ids"]).logits
        student = log_softmax(logits / 2.0, dim=-1)
        return kl_div(
            student, log_softmax(-target / 2.0, dim=-1), log_target=True, reduction="batchmean"
        )


class HeavierAtTheEndOfAWindow(Loss):
    """By what accelerate says of the batch: each of a window was told that it is the last."""

    accelerator: Any

    def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
        weight = 2.0 if self.accelerator.sync_gradients else 1.0
        return weight * nll_of(logits, inputs["input_ids"]).mean()


LOSSES = [
    AnotherMask,
    MeanOfMeans,
    SumOverItems,
    SumAndMean,
    Zero,
    ZeroAtFirst,
    WeighedTokens,
    Focal,
    Contrastive,
    BatchNormalised,
    Distils,
    TwoForwards,
    SecondWithoutGradient,
    Edits,
    EditsLater,
    ChangesItsCall,
    Pairs,
    OwnLossAndMore,
    Penalises,
    DistilsFromAModel,
]
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "remove_unused_columns": False,
    "learning_rate": 0.02,
    "max_grad_norm": 0.0,
    "max_steps": 3,
}


def make_two_adapters() -> Any:
    model = make_lora_llama()
    model.add_adapter("other", model.peft_config["default"])
    return model


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_ones_own(loss: type, kind: str, devices: int) -> None:
    """Gradient norms, too, by which gradients are clipped."""
    pair = train_both(
        MODELS[kind], ROWS, loss, devices=devices, **SETTINGS | {"max_grad_norm": 1.0}
    )
    assert all("grad_norm" in entry for entry in logged(pair.ours)[:-1])
    assert_same(pair)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_loss_that_switches_adapters(devices: int) -> None:
    settings = SETTINGS | {"max_grad_norm": 1.0, "devices": devices}
    assert_same(train_both(make_two_adapters, ROWS, SwitchesAdapters, **settings))


@pytest.mark.parametrize(
    "loss",
    [
        AnotherMask,
        Zero,
        Contrastive,
        TwoForwards,
        Pairs,
        Penalises,
        ComparesWithTheBase,
        ComparesWithItsOwnBase,
        HeavierAtTheEndOfAWindow,
    ],
)
def test_with_adapters_accumulation_and_evaluation(loss: type) -> None:
    pair = train_both(
        MODELS["lora"],
        ROWS,
        loss,
        devices=3,
        gradient_accumulation_steps=2,
        eval_dataset=ROWS[:8],
        eval_strategy="epoch",
        per_device_eval_batch_size=4,
        **SETTINGS,
    )
    assert_same(pair)


def test_a_penalty_is_clipped_and_shown_with_the_rest() -> None:
    """Callbacks see what the step will use."""

    class Watches(TrainerCallback):  # type: ignore[misc]  # untyped base
        def __init__(self) -> None:
            self.seen: list[dict[str, Tensor]] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            self.seen.append({name: p.grad.clone() for name, p in model.named_parameters()})

    watches = Watches(), Watches()
    settings = SETTINGS | {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    pair = make_both(MODELS["full"], ROWS, Penalises, devices=2, **settings)
    for trainer, callback in zip(pair, watches, strict=True):
        trainer.add_callback(callback)
        run(trainer)
    assert_same(pair)
    for ours, plain in zip(*(callback.seen for callback in watches), strict=True):
        assert_same_weights(ours, plain)


def test_a_penalty_of_a_run_that_failed_does_not_count_in_the_next() -> None:
    """Its gradients waited for a step that never came."""

    class Fails(TrainerCallback):  # type: ignore[misc]  # untyped base
        fails = True

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if self.fails:
                self.fails = False
                raise KeyboardInterrupt

    pair = make_both(MODELS["full"], ROWS, Penalises, devices=2, **SETTINGS)
    for trainer in pair:
        trainer.add_callback(Fails())
        with pytest.raises(KeyboardInterrupt):
            run(trainer)
        run(trainer)
    assert_same(pair)


def test_a_declared_loss_cannot_penalise_weights() -> None:
    class Declared(Penalises):
        compute_loss = loss_reduction("rows")(Loss.compute_loss)

        def loss_of(self, model: Any, inputs: Any, logits: Tensor, num_items: Any) -> Tensor:
            weight = self.model.model.embed_tokens.weight
            return logits.square().mean() + weight.square().sum()

    trainer = make_both(MODELS["full"], ROWS, Declared, **SETTINGS).ours
    with pytest.raises(ConfigError, match="own parameter 'model.embed_tokens.weight'.*Leave"):
        trainer.train()


# --- declared ---


def row_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return outputs.logits.square().mean()


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def token_sum(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    nll = nll_of(outputs.logits, labels.clamp(min=0))
    return (nll * labels[:, 1:].ne(IGNORED)).sum() / num_items_in_batch


def sum_and_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return token_sum(outputs, labels, num_items_in_batch) + row_mean(outputs, labels)


PLAIN_ROWS = [{name: row[name] for name in ("input_ids", "labels")} for row in ROWS]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many microbatches each round was made whose loss ran fused."""
    counts: list[int] = []
    inner = RoundPipe.forward_backward

    def counted(self: RoundPipe, *args: Any, microbatches: Any, **kwargs: Any) -> Any:
        counts.append(len(microbatches))
        return inner(self, *args, microbatches=microbatches, **kwargs)

    monkeypatch.setattr(RoundPipe, "forward_backward", counted)
    return counts


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("loss", "reduction"), [(row_mean, "rows"), (token_mean, "tokens"), (token_sum, "sum")]
)
def test_a_declared_loss_runs_fused(
    loss: Any, reduction: Any, accumulation: int, fused: list[int]
) -> None:
    settings = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 4}
    pair = make_both(
        MODELS["full"],
        PLAIN_ROWS,
        compute_loss_func=loss,
        loss_reduction=reduction,
        devices=2,
        **settings,
    )
    assert_same(pair._replace(ours=run(pair.ours), plain=run(pair.plain)))
    microbatches = accumulation * -(-3 // accumulation)  # one more than devices, shared by batches
    assert fused == [microbatches] * (4 // accumulation)


def test_the_decorator_declares_as_well(fused: list[int]) -> None:
    decorated = loss_reduction("rows")(lambda *args, **kwargs: row_mean(*args, **kwargs))
    pair = make_both(MODELS["full"], PLAIN_ROWS, compute_loss_func=decorated, devices=2)
    assert_same(pair._replace(ours=run(pair.ours), plain=run(pair.plain)))
    assert max(fused) > 1
    fused.clear()

    class Declared(AnotherMask):
        compute_loss = loss_reduction("sum")(SumOverItems.compute_loss)
        loss_of = SumOverItems.loss_of

    pair = make_both(MODELS["full"], ROWS, Declared, devices=2, **SETTINGS)
    assert_same(pair._replace(ours=run(pair.ours), plain=run(pair.plain)))
    assert fused


def test_a_loss_function_that_divides_by_the_items_runs_fused(fused: list[int]) -> None:
    pair = make_both(MODELS["full"], PLAIN_ROWS, compute_loss_func=token_sum, devices=2)
    assert_same(pair._replace(ours=run(pair.ours), plain=run(pair.plain)))
    assert fused


@pytest.mark.parametrize("loss", [row_mean, token_mean, sum_and_mean])
def test_other_loss_functions_run_on_whole_batches(
    loss: Any, caplog: pytest.LogCaptureFixture, fused: list[int]
) -> None:
    """One that never looks at the number of items, and one that adds a mean to what it divides by
    it. The log says so once, and what would change it."""
    pair = make_both(MODELS["full"], PLAIN_ROWS, compute_loss_func=loss, devices=2)
    with caplog.at_level(logging.INFO, logger="roundpipe_hf"):
        run(pair.ours)
    assert_same(pair._replace(plain=run(pair.plain)))
    assert fused == []
    assert caplog.text.count("computed on whole batches") == 1
    assert "loss_reduction='sum'" in caplog.text


@pytest.mark.parametrize(
    ("loss", "reduction"), [(row_mean, "sum"), (token_mean, "rows"), (row_mean, "tokens")]
)
def test_a_declaration_that_does_not_fit(loss: Any, reduction: Any) -> None:
    """It is compared once with a loss of two rows, before any step."""
    trainer = make_trainer(
        RoundPipeTrainer,
        MODELS["full"](),
        PLAIN_ROWS[1:3] * 2 if reduction == "tokens" else PLAIN_ROWS,
        compute_loss_func=loss,
        loss_reduction=reduction,
        per_device_train_batch_size=4,
        train_sampling_strategy="sequential",
    )
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    with pytest.raises(ConfigError, match=f"loss_reduction='{reduction}' does not fit the loss"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def test_a_declaration_that_is_none(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="loss_reduction is 'mean'; use"):
        loss_reduction("mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss_reduction is 'mean'; use"):
        RoundPipeTrainingArguments(str(tmp_path), loss_reduction="mean")  # type: ignore[arg-type]


def test_tokens_are_counted_by_labels_of_whole_numbers() -> None:
    rows = [{"input_ids": row["input_ids"], "label": row["reward"]} for row in ROWS]
    trainer = make_trainer(
        RoundPipeTrainer,
        MODELS["full"](),
        rows,
        compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.mean(),
        loss_reduction="tokens",
    )
    with pytest.raises(ConfigError, match="'tokens' needs integer 'labels'.*input_ids, labels"):
        trainer.train()


def test_who_reads_the_number_of_items() -> None:
    class Callable:
        def __call__(self, outputs: Any, labels: Any, **kwargs: Any) -> Any:
            return outputs / kwargs["num_items_in_batch"]

    class Module(nn.Module):
        def forward(self, outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
            return outputs.sum() / num_items_in_batch

    assert reads_num_items(token_sum)
    assert reads_num_items(Callable())
    assert reads_num_items(Module())
    assert not reads_num_items(token_mean)
    assert not reads_num_items(nn.CrossEntropyLoss())
    assert not reads_num_items(max)


def test_whole_batches_do_not_ask_for_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """They walk all weights: once for an engine, however many batches it runs."""
    asked: list[RoundPipe] = []
    inner = RoundPipe.statistics

    def statistics(self: RoundPipe) -> dict[str, Any]:
        asked.append(self)
        return inner(self)

    monkeypatch.setattr(RoundPipe, "statistics", statistics)
    settings: dict[str, Any] = {"compute_loss_func": row_mean, "devices": 2, "max_steps": 4}
    trainer = run(make_trainer(RoundPipeTrainer, MODELS["full"](), PLAIN_ROWS, **settings))
    trainer.evaluate(PLAIN_ROWS[:4])
    assert len(asked) == 1
