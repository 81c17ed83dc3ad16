"""A loss that learns something itself: its parameters' gradients count once, also where a batch
runs again because a device ran out of memory. The oracle is the plain Trainer, which has enough of
it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback

from roundpipe.engine import device_memory as engine_model
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe_hf import RoundPipeTrainer
from tests.hf.engine.test_out_of_memory import SETTINGS, hooked_engine
from tests.support.injection import INJECTION, HookedBackward, reach_in
from tests.support.trainers import (
    MODELS,
    assert_same_logs,
    assert_same_weights,
    logged,
    make_trainer,
    run,
    token_rows,
    weights,
)

# 3 steps of 2 batches of 4 rows.
ROWS = token_rows(24)


@pytest.fixture(autouse=True)
def engines_give_up_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine_model, "_MADE_AGAIN", 0)
    yield
    INJECTION.disarm()


class Tempered(nn.Module):
    """Cross-entropy at temperatures that are learnt, one by token."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = (outputs.logits * self.scale)[:, :-1].flatten(0, 1)
        return cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class Together(Tempered):
    """Rows depend on each other, so that a batch cannot be cut."""

    def forward(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        pooled = (outputs.logits * self.scale).mean(dim=1)
        return cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


class Steps(TrainerCallback):
    """The loss's own optimizer. Memory runs out in the second step at the ``at``-th time that
    ``site`` is reached."""

    def __init__(self, loss: Tempered, site: str = "", at: int = 1) -> None:
        self._optimizer = torch.optim.SGD(loss.parameters(), lr=0.5)
        self._short = site, at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._optimizer.step()
        # Gradients stay where they are, as of somebody who looks at them.
        self._optimizer.zero_grad(set_to_none=False)
        if state.global_step == 1 and self._short[0]:
            INJECTION.arm(self._short[0], out_of_memory, at=self._short[1])


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def trained_scale(
    cls: type[Trainer], model: Any, loss: Tempered, *short: Any, **settings: Any
) -> tuple[Any, Tensor]:
    steps = Steps(loss, *short)
    trainer = run(
        make_trainer(cls, model, ROWS, compute_loss_func=loss, callbacks=[steps], **settings)
    )
    return trainer, loss.scale.detach()


def in_parts() -> Any:
    model: Any = MODELS["full"]()
    reach_in(model)
    return wrap_model_to_roundpipe(
        model, optim_dtype=torch.float32, devices=2, use_sequential_preset=False
    )


WAYS: dict[str, Any] = {"sequence": hooked_engine, "parts": in_parts}


@pytest.mark.parametrize(
    ("way", "site", "at"),
    [
        ("sequence", "recompute", 1),
        ("sequence", "fused", 5),
        ("sequence", "", 1),
        ("parts", "backward", 2),
    ],
)
def test_gradients_count_once(way: str, site: str, at: int) -> None:
    with WAYS[way]() as engine:
        ours, scale = trained_scale(RoundPipeTrainer, engine, Tempered(), site, at, **SETTINGS)
        assert not INJECTION.is_armed, "memory never ran out"
    plain, expected = trained_scale(Trainer, MODELS["full"](), Tempered(), **SETTINGS)
    assert_same_logs(logged(ours), logged(plain))
    assert_same_weights(weights(ours), weights(plain))
    torch.testing.assert_close(scale, expected, rtol=0.0, atol=1e-6)


def test_gradients_of_a_batch_that_was_too_large_do_not_count() -> None:
    """`auto_find_batch_size` begins again with a smaller one."""

    class TooLarge(Together):
        """Memory runs out once the loss's own gradients are there."""

        def forward(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            if len(labels) > 3:
                INJECTION.arm("backward", out_of_memory, at=1)
                outputs.logits = HookedBackward.apply(outputs.logits, "backward")
            return super().forward(outputs, labels)

    settings: dict[str, Any] = {
        "auto_find_batch_size": True,
        "per_device_train_batch_size": 4,
        "devices": 2,
    }
    ours, scale = trained_scale(RoundPipeTrainer, MODELS["full"](), TooLarge(), **settings)
    assert ours.state.train_batch_size == 3
    plain, expected = trained_scale(Trainer, MODELS["full"](), Together())
    assert_same_logs(logged(ours)[:-1], logged(plain)[:-1])
    assert_same_weights(weights(ours), weights(plain))
    torch.testing.assert_close(scale, expected, rtol=0.0, atol=1e-6)
