"""What users rely on around training: their own optimizer, search, reports, the Hub, single
steps."""

import types
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback

from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe_hf import RoundPipeTrainer
from tests.support.models import make_llama
from tests.support.trainers import (
    MODELS,
    Pair,
    assert_same,
    assert_same_weights,
    differ,
    logged,
    make_both,
    make_trainer,
    run,
    token_rows,
    train_both,
    trained,
    weights,
)

ROWS = token_rows(12)


# --- steps without train() ---


def test_single_steps_without_any_optimizer() -> None:
    """`training_step` and `prediction_step`, called directly: losses and gradients are the plain
    Trainer's."""
    pair = make_both(MODELS["full"], ROWS)
    batch = next(iter(pair.plain.get_train_dataloader()))
    num_items = pair.plain._get_num_items_in_batch([batch], torch.device("cpu"))
    losses, evaluated = [], []
    for trainer in pair:
        model = trainer._wrap_model(trainer.model, training=False)
        losses += [trainer.training_step(model, dict(batch), num_items) for _ in range(2)]
        evaluated.append(trainer.prediction_step(model, dict(batch), prediction_loss_only=True)[0])
    pair.ours.synchronize()
    assert [float(loss) for loss in losses[:2]] == pytest.approx(
        [float(loss) for loss in losses[2:]], abs=1e-6
    )
    assert evaluated[0] == pytest.approx(float(evaluated[1]), abs=1e-6)
    assert pair.ours.optimizer is None
    gradients = [{n: p.grad for n, p in trainer.model.named_parameters()} for trainer in pair]
    assert_same_weights(*gradients)


# --- optimizers ---


def test_an_optimizer_and_a_scheduler_of_the_users() -> None:
    """Made over an engine's copies they are used as they are: two groups, each at its rate of that
    step, also after the optimizer's state was loaded."""
    plain_model = MODELS["full"]()
    with wrap_model_to_roundpipe(MODELS["full"](), optim_dtype=torch.float32, devices=2) as engine:
        trainers = []
        sides: Any = [
            (RoundPipeTrainer, engine, engine.optim_parameters()),
            (Trainer, plain_model, None),
        ]
        for cls, model, copies in sides:
            first, *rest = copies or plain_model.parameters()
            groups = [{"params": rest}, {"params": [first], "lr": 0.02}]
            optimizer = torch.optim.SGD(groups, lr=0.2, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
            trainers.append(trained(cls, model, ROWS, optimizers=(optimizer, scheduler)))
        pair = Pair(*trainers)
        assert [entry["learning_rate"] for entry in logged(pair.ours)[:-1]] == [
            0.2,
            0.1,
            0.05,
            0.025,
        ]
        assert_same(pair)
        for trainer in pair:
            trainer.optimizer.load_state_dict(trainer.optimizer.state_dict())
            run(trainer)
        assert_same(pair)


@pytest.mark.slow
def test_an_optimizer_is_made_again_with_the_model() -> None:
    """One that the trainer did not make is not silently replaced by its own."""
    trainer = make_trainer(RoundPipeTrainer, make_llama(tied=True), ROWS)
    trainer.optimizer = torch.optim.SGD(
        [master for _, master in trainer.optim_named_parameters()], lr=0.1
    )
    run(trainer)
    trainer.model.lm_head.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="its SGD was made.*optim_named_parameters"):
        run(trainer)


# --- callbacks ---


class Reads(TrainerCallback):
    """Remembers the weights at the beginning of each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.seen.append({name: p.detach().clone() for name, p in model.named_parameters()})


class Logs(RoundPipeTrainer):
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs | {"norm": float(self.model.model.norm.weight.norm())}, *args, **kwargs)


class PlainLogs(Trainer):
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log(logs | {"norm": float(self.model.model.norm.weight.norm())}, *args, **kwargs)


def test_whoever_looks_between_steps_sees_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks do; without any, nobody waits and the end is the same."""
    flushes = count_flushes(monkeypatch)
    alone = trained(RoundPipeTrainer, MODELS["full"](), ROWS, devices=2)
    assert flushes() <= 2, "every step waited for its weights although nobody could look at them"
    reads, plain_reads = Reads(), Reads()
    watched = trained(RoundPipeTrainer, MODELS["full"](), ROWS, devices=2, callbacks=[reads])
    assert flushes() > 4
    plain = trained(Trainer, MODELS["full"](), ROWS, callbacks=[plain_reads])
    for seen, expected in zip(reads.seen, plain_reads.seen, strict=True):
        assert_same_weights(seen, expected)
    assert differ(weights(alone), weights(watched)) == []
    assert_same_weights(weights(alone), weights(plain))


@pytest.mark.slow
def test_an_overridden_method_between_steps_sees_the_update() -> None:
    logs, plain_logs = (trained(cls, MODELS["full"](), ROWS) for cls in (Logs, PlainLogs))
    norms = [[entry["norm"] for entry in logged(trainer)] for trainer in (logs, plain_logs)]
    assert norms[0] == pytest.approx(norms[1], abs=1e-6)
    assert len(set(norms[0])) > 3


class OwnEmbeddings:
    """A loss that embeds the tokens itself, by the model's own weights, before it calls the
    model."""

    model: Any

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        embedded = self.model.get_input_embeddings()(inputs["input_ids"]).sin()
        return model(inputs_embeds=embedded, labels=inputs["labels"]).loss


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_a_loss_that_reads_weights_before_its_call_sees_the_update(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computed with weights that the update was just being written to."""
    flushes = count_flushes(monkeypatch)
    ours, plain = make_both(MODELS[kind], ROWS, OwnEmbeddings)
    run(ours)
    assert flushes() > 4, "a step did not wait for its weights, which the next loss reads"
    assert_same(Pair(ours, run(plain)))


class Averages:
    """Evaluates and saves averaged weights, put into the model meanwhile."""

    flushes: Callable[[], int]
    average: Any = None

    def swapped(self, call: Callable[[], Any]) -> Any:
        self.flushed = [*getattr(self, "flushed", []), self.flushes()]
        current = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.average = {
            name: value.lerp((self.average or current)[name], 0.5)
            for name, value in current.items()
        }
        self.model.load_state_dict(self.average)
        result = call()
        self.model.load_state_dict(current)
        self.flushes()
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return self.swapped(lambda: super(Averages, self).evaluate(*args, **kwargs))

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self.swapped(lambda: super(Averages, self).save_model(*args, **kwargs))


@pytest.mark.parametrize("what", ["eval", "save"])
def test_evaluating_and_saving_other_weights_meanwhile(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An override reads weights before evaluation or saving has begun."""
    settings: dict[str, Any] = {f"{what}_strategy": "steps", f"{what}_steps": 1}
    pair = make_both(MODELS["full"], ROWS, mixin=Averages, eval_dataset=ROWS[:4], **settings)
    for trainer in pair:
        trainer.flushes = count_flushes(monkeypatch)
        run(trainer)
    assert_same(pair)
    assert_same_weights(pair.ours.average, pair.plain.average)
    assert len(pair.ours.flushed) == len(pair.plain.flushed) == 4
    assert all(pair.ours.flushed), "weights may be an update behind"


class Prepares:
    """Makes batches with the model, for example."""

    flushes: Callable[[], int]

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.flushed = [*getattr(self, "flushed", []), self.flushes()]
        return super()._prepare_inputs(inputs)


def test_batches_made_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_both(MODELS["full"], ROWS, mixin=Prepares).ours
    trainer.flushes = count_flushes(monkeypatch)
    run(trainer)
    assert len(trainer.flushed) == 4
    assert all(trainer.flushed[1:]), "weights may be an update behind"


def count_flushes(monkeypatch: pytest.MonkeyPatch) -> Any:
    from roundpipe import RoundPipe

    count, synchronize = 0, RoundPipe.synchronize

    def counted(engine: RoundPipe) -> None:
        nonlocal count
        count += 1
        synchronize(engine)

    monkeypatch.setattr(RoundPipe, "synchronize", counted)

    def taken() -> int:
        nonlocal count
        seen, count = count, 0
        return seen

    return taken


# --- search ---


@pytest.mark.slow
def test_hyperparameter_search() -> None:
    """Each trial on an engine of its own, the one before closed; the trials and their losses are
    the plain ones."""
    from optuna.samplers import GridSampler

    grid = {"learning_rate": [0.05, 0.5]}
    found, engines = [], []

    class Remembers(RoundPipeTrainer):
        def _wrap_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            engines.append(super()._wrap_model(*args, **kwargs))
            return engines[-1]

    for cls in (Remembers, Trainer):
        trainer = make_trainer(
            cls,
            None,
            ROWS,
            model_init=MODELS["full"],
            eval_dataset=ROWS[:3],
            eval_strategy="epoch",  # type: ignore[arg-type]
        )
        found.append(
            trainer.hyperparameter_search(
                hp_space=lambda trial: {
                    "learning_rate": trial.suggest_categorical(
                        "learning_rate", grid["learning_rate"]
                    )
                },
                n_trials=2,
                backend="optuna",
                sampler=GridSampler(grid, seed=0),
            )
        )
    assert found[0].hyperparameters == found[1].hyperparameters
    assert found[0].objective == pytest.approx(found[1].objective, abs=1e-5)
    different = {id(engine): engine for engine in engines}
    assert len(different) == 2
    assert ["closed" in repr(engine) for engine in different.values()] == [True, False]


# --- reports ---


class Written:
    """A summary writer that keeps scalars."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.slow
def test_tensorboard_gets_the_same_scalars() -> None:
    written = []
    for cls in (RoundPipeTrainer, Trainer):
        written.append(Written())
        trained(
            cls,
            MODELS["full"](),
            ROWS,
            callbacks=[TensorBoardCallback(written[-1])],
            eval_dataset=ROWS[:2],
            eval_strategy="epoch",
            include_num_input_tokens_seen="non_padding",
        )
    ours, plain = (writer.scalars for writer in written)
    assert ours.keys() == plain.keys()
    assert {"train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"} <= {
        name for name, _ in plain
    }
    for name in ("train/loss", "train/grad_norm", "eval/loss"):
        mine, others = (
            [value for (key, _), value in scalars.items() if key == name]
            for scalars in (ours, plain)
        )
        assert mine == pytest.approx(others, abs=1e-5)


class Hub:
    """Takes uploads as the Hub does and keeps the weights of each."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, torch.Tensor]] = []

    def create_repo(self, *_: Any, **__: Any) -> Any:
        return types.SimpleNamespace(repo_id="me/model")

    def upload_folder(self, folder_path: str, **_: Any) -> Any:
        weights = load_file(Path(folder_path) / "model.safetensors")
        self.uploads.append(
            {name: weight.clone() for name, weight in weights.items()}
        )  # the file is written again
        done: Future[str] = Future()
        done.set_result("https://hub/commit")
        return done


def test_push_to_hub_sends_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in the folder when it is uploaded is the model of that step, at the end the trained
    one."""
    hub = Hub()
    monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    settings: dict[str, Any] = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 2}
    trainer = trained(RoundPipeTrainer, MODELS["full"](), ROWS, devices=2, **settings)
    at_step_2 = load_file("out-ours/checkpoint-2/model.safetensors")
    assert differ(hub.uploads[0], at_step_2) == []
    assert differ(hub.uploads[-1], weights(trainer)) == []
    assert len(differ(hub.uploads[0], hub.uploads[-1])) == len(at_step_2)


class Repository(Hub):
    """Keeps what was in a folder when its upload began, and what it was to become."""

    def __init__(self) -> None:
        self.commits: list[tuple[Any, list[str]]] = []

    def upload_folder(self, folder_path: str, path_in_repo: Any = None, **_: Any) -> Any:
        files = sorted(path.name for path in Path(folder_path).iterdir() if path.is_file())
        self.commits.append((path_in_repo, files))
        done: Future[str] = Future()
        done.set_result("https://hub/commit")
        return done


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_checkpoints_are_pushed_from_their_place(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, and under their own names, as the plain Trainer pushes them."""
    repositories = []
    for cls in (RoundPipeTrainer, Trainer):
        repositories.append(Repository())
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: repositories[-1])
        trained(
            cls,
            MODELS["full"](),
            ROWS,
            push_to_hub=True,
            hub_strategy=strategy,
            save_steps=2,
            save_strategy="steps",
        )
    ours, plain = (repository.commits for repository in repositories)
    assert ours == plain
    assert any("trainer_state.json" in files for _, files in ours)


# --- compiled blocks ---


@pytest.mark.slow
def test_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch_compile` compiles the repeated blocks in the engine, and nothing of accelerate's
    compiles again."""
    compiled, compile_ = [], torch.compile

    def traced_only(function: Any, **settings: Any) -> Any:
        compiled.append(function.__qualname__)
        return compile_(function, **{**settings, "backend": "aot_eager"})

    monkeypatch.setattr(torch, "compile", traced_only)
    settings: dict[str, Any] = {"devices": 1, "max_steps": 2, "eval_dataset": ROWS[:2]}
    ours = trained(RoundPipeTrainer, MODELS["full"](), ROWS, torch_compile=True, **settings)
    ours.evaluate()
    assert compiled == ["Block.forward"]
    monkeypatch.undo()
    plain = trained(Trainer, MODELS["full"](), ROWS, **settings)
    plain.evaluate()
    assert_same(Pair(ours, plain))


def scaled_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Bound to a module, as kernels are. Not quite what the module's own does, so that it shows who
    was called."""
    return (
        1.5
        * self.weight
        * x
        * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
    )


def patch_norms(model: Any, config: dict[str, bool]) -> None:
    assert config == {"fused_linear_cross_entropy": False}
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = types.MethodType(scaled_norm, module)


@pytest.mark.slow
def test_kernels_bound_to_modules_run_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_liger_kernel` without the library: what it binds to the model's modules computes with
    devices' copies."""
    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", patch_norms)
    given: dict[str, Any] = {
        "use_liger_kernel": True,
        "liger_kernel_config": {"fused_linear_cross_entropy": False},
    }
    pair = train_both(MODELS["full"], ROWS, eval_dataset=ROWS[:5], eval_strategy="epoch", **given)
    assert_same(pair)
    without = trained(RoundPipeTrainer, MODELS["full"](), ROWS)
    assert logged(pair.ours)[0]["loss"] != pytest.approx(logged(without)[0]["loss"], abs=1e-3)


# --- inputs ---


@pytest.mark.slow
def test_tokens_that_are_no_padding_are_counted() -> None:
    masks = [[1] * (12 - index % 4) + [0] * (index % 4) for index in range(6)]
    rows = Dataset.from_dict(
        {
            "input_ids": [row["input_ids"].tolist() for row in ROWS[:6]],
            "labels": [row["labels"].tolist() for row in ROWS[:6]],
            "attention_mask": masks,
        }
    )
    assert_same(
        train_both(
            MODELS["full"],
            rows,
            include_num_input_tokens_seen="non_padding",
            gradient_accumulation_steps=2,
        )
    )


class Tuples(nn.Module):
    """A module without config whose forward returns a tuple, loss first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(x)
        return (
            (nn.functional.cross_entropy(logits, labels), logits)
            if labels is not None
            else (logits,)
        )


@pytest.mark.slow
def test_a_plain_module_that_returns_tuples() -> None:
    """Trained, evaluated, predicted, saved and loaded again as the best model."""
    generator = torch.Generator().manual_seed(5)
    rows = [{"x": torch.randn(4, generator=generator), "labels": index % 3} for index in range(11)]
    pair = train_both(
        Tuples,
        rows,
        eval_dataset=rows[:5],
        per_device_eval_batch_size=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        num_train_epochs=2,
    )
    assert_same(pair)
    ours, plain = (trainer.predict(rows[:4]) for trainer in pair)
    assert ours.predictions == pytest.approx(plain.predictions, abs=1e-5)
    assert Path("out-ours/checkpoint-4/model.safetensors").is_file()


class Named(nn.Linear):
    """A layer whose argument is not called what that of `nn.Sequential` is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class OfASequence:
    """A sequence has no loss and takes its input by position."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(inputs["x"])
        loss = nn.functional.cross_entropy(logits, inputs["labels"])
        return (loss, {"loss": loss, "logits": logits}) if return_outputs else loss


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_sequence_called_by_position(is_nested: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        first = Named(4, 8)
        return nn.Sequential(
            nn.Sequential(first) if is_nested else first, nn.Tanh(), nn.Linear(8, 3)
        )

    generator = torch.Generator().manual_seed(5)
    rows = [{"x": torch.randn(4, generator=generator), "labels": index % 3} for index in range(11)]
    settings = {"remove_unused_columns": False, "label_names": ["labels"], "eval_strategy": "epoch"}
    pair = train_both(
        make, rows, OfASequence, eval_dataset=rows[:5], gradient_accumulation_steps=2, **settings
    )
    assert_same(pair)
    ours, plain = (trainer.predict(rows[:4]) for trainer in pair)
    assert ours.predictions == pytest.approx(plain.predictions, abs=1e-5)
