"""Runs the plain `Trainer` and `RoundPipeTrainer` on the same seed and compares what they did. The
plain one is the oracle, run inside the test; nothing here knows how the pipeline works."""

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from roundpipe import RoundPipe
from roundpipe_hf import PipelineArguments, RoundPipeTrainer, RoundPipeTrainingArguments
from roundpipe_hf.compat import use_one_gpu
from tests.support.models import llama_batch, make_llama, make_lora_llama

Row = dict[str, Any]
MakeModel = Callable[[], nn.Module]

MODELS: dict[str, MakeModel] = {
    "full": lambda: make_llama(tied=False),
    "tied": lambda: make_llama(tied=True),
    "lora": make_lora_llama,
}
QUIET_SGD: dict[str, Any] = {
    "learning_rate": 0.1,
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 7,
}
_PIPELINE = frozenset(PipelineArguments.__dataclass_fields__)
_OF_TRAINER = frozenset(inspect.signature(Trainer.__init__).parameters) - {
    "self",
    "model",
    "args",
    "train_dataset",
}
_FROM_THE_CLOCK = ("runtime", "per_second", "preparation_time", "step_time")
# Two steps of fp32: rows are summed in another order.
ROUNDING = 2.5e-7
_made: weakref.WeakSet[Any] = weakref.WeakSet()


class Pair(NamedTuple):
    ours: Any
    plain: Any


def token_rows(count: int, kept: Sequence[int] = (2, 5, 9, 11, 12), seed: int = 0) -> list[Row]:
    """Rows of 12 random ids; the entries of ``kept`` say in turn how many labels a row keeps."""
    batch = llama_batch([kept[row % len(kept)] for row in range(count)], seed)
    return [
        {"input_ids": batch.kwargs["input_ids"][row], "labels": batch.label[row]}
        for row in range(count)
    ]


def make_trainer(cls: type[Trainer], model: nn.Module, rows: Any, **settings: Any) -> Any:
    """A quiet trainer with SGD that logs every step, into the test's own folder. ``settings`` are
    arguments of the trainer, of its training arguments or of the pipeline; the plain Trainer does
    not get the latter."""
    is_ours = issubclass(cls, RoundPipeTrainer)
    of_trainer = {name: value for name, value in settings.items() if name in _OF_TRAINER}
    of_arguments = {
        "output_dir": "out-ours" if is_ours else "out-plain",
        "per_device_train_batch_size": 3,
        "num_train_epochs": 1,
        **QUIET_SGD,
    } | {
        name: value
        for name, value in settings.items()
        if name not in of_trainer and (is_ours or name not in _PIPELINE)
    }
    args: Any = (RoundPipeTrainingArguments if is_ours else TrainingArguments)(**of_arguments)
    if not is_ours:
        use_one_gpu(args)  # because the plain Trainer would take several as a larger batch
    trainer = cls(model, args, train_dataset=rows, **of_trainer)
    _made.add(trainer)
    return trainer


def run(trainer: Any, **how: Any) -> Any:
    """Trains from the same random state, which the order of the rows is drawn from."""
    torch.manual_seed(0)
    trainer.train(**how)
    return trainer


def trained(cls: type[Trainer], model: nn.Module, rows: Any, **settings: Any) -> Any:
    return run(make_trainer(cls, model, rows, **settings))


def make_both(make_model: MakeModel, rows: Any, mixin: type | None = None, **settings: Any) -> Pair:
    """The same trainer twice. ``mixin`` is put before either class, as a user's subclass would
    override it."""
    classes = [
        cls if mixin is None else type("Mixed", (mixin, cls), {})
        for cls in (RoundPipeTrainer, Trainer)
    ]
    return Pair(
        *(make_trainer(cls, make_model(), rows, **{"devices": 3} | settings) for cls in classes)
    )


def train_both(
    make_model: MakeModel, rows: Any, mixin: type | None = None, **settings: Any
) -> Pair:
    return Pair(*map(run, make_both(make_model, rows, mixin, **settings)))


def weights(trainer: Any) -> dict[str, Tensor]:
    """What the user's model holds, tied weights once."""
    return {
        name: parameter.detach().cpu().clone()
        for name, parameter in trainer.model.named_parameters()
    }


def logged(trainer: Any) -> list[dict[str, float]]:
    """The log without what the clock decides."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(_FROM_THE_CLOCK)}
        for entry in trainer.state.log_history
    ]


def assert_same(pair: Pair, *, atol: float = 1e-5) -> None:
    """The same keys and numbers in the log (losses ten times closer, rates exactly), and the same
    weights."""
    assert_same_logs(logged(pair.ours), logged(pair.plain), atol=atol)
    assert_same_weights(weights(pair.ours), weights(pair.plain), atol=atol)


def assert_same_logs(
    ours: list[dict[str, float]], plain: list[dict[str, float]], *, atol: float = 1e-5
) -> None:
    assert [sorted(entry) for entry in ours] == [sorted(entry) for entry in plain]
    for mine, other in zip(ours, plain, strict=True):
        for key, value in other.items():
            torch.testing.assert_close(
                torch.tensor(mine[key], dtype=torch.float64),
                torch.tensor(value, dtype=torch.float64),
                atol=0.0 if key == "learning_rate" else atol / 10 if key.endswith("loss") else atol,
                # A norm is off by as much of itself as the gradients are that it is made of.
                rtol=ROUNDING if key.endswith("loss") else atol if key == "grad_norm" else 0.0,
                equal_nan=True,
                msg=lambda text, key=key, other=other: f"{key} at step {other['step']}: {text}",
            )


def assert_same_weights(
    ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], *, atol: float = 1e-5
) -> None:
    assert list(ours) == list(plain)
    for name, value in plain.items():
        torch.testing.assert_close(
            ours[name],
            value,
            atol=atol,
            rtol=0.0,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def differ(ours: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that are not bitwise the same."""
    return [name for name, value in other.items() if not torch.equal(ours[name], value)]


def close_all() -> None:
    """Closes every engine that trainers of this module have built."""
    for trainer in list(_made):
        if isinstance(trainer.model_wrapped, RoundPipe):
            trainer.model_wrapped.close()
    _made.clear()
