"""A plain Accelerate loop over an engine trains as the same loop over the plain model does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader

from roundpipe import AutoRoundPipe, RoundPipe
from roundpipe.engine.wrap import wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe_hf.accelerate import RoundPipeAccelerator
from tests.support.device_sets import TWO
from tests.support.engines import Engines
from tests.support.models import LLAMA_VOCABULARY, make_llama, make_lora_llama
from tests.support.reference import weights_of


@pytest.fixture(autouse=True)
def own_state() -> None:
    """Accelerate keeps its state for the process."""
    AcceleratorState._reset_state()
    PartialState._reset_state()


def make_batches(rows: int = 15) -> DataLoader[Any]:
    """Five batches: with two to a step, the last one is a step of its own."""
    ids = torch.randint(0, LLAMA_VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=3)  # type: ignore[arg-type]


class Loop:
    """Ten lines of everybody's script, and what they leave."""

    def __init__(
        self, accelerator: Accelerator, model: Any, parameters: Any, max_norm: float | None = 0.5
    ) -> None:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        self.accelerator, self.max_norm = accelerator, max_norm
        self.model, self.optimizer, self.batches, self.scheduler = accelerator.prepare(
            model, optimizer, make_batches(), scheduler
        )
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rates: list[float] = []

    def run(self, epochs: int = 1) -> "Loop":
        for _ in range(epochs):
            for batch in self.batches:
                norm = None
                with self.accelerator.accumulate(self.model):
                    loss = self.model(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients and self.max_norm is not None:
                        norm = self.accelerator.clip_grad_norm_(
                            self.model.parameters(), self.max_norm
                        )
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.rates.append(self.scheduler.get_last_lr()[0])
                self.norms += [] if norm is None else [norm.item()]
        return self


def make_ours(engines: Engines, model: nn.Module, **how: Any) -> Loop:
    engine: RoundPipe = engines(model, TWO, optim_dtype=torch.float32)
    return Loop(
        RoundPipeAccelerator(cpu=True, gradient_accumulation_steps=2),
        engine,
        engine.optim_parameters(),
        **how,
    )


def make_plain(model: nn.Module, **how: Any) -> Loop:
    own_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Loop(Accelerator(cpu=True, gradient_accumulation_steps=2), model, own_parameters, **how)


@pytest.mark.parametrize(
    ("make", "max_norm"),
    [(lambda: make_llama(tied=True), 0.5), (make_lora_llama, None)],
    ids=["tied, clipped", "lora"],
)
def test_the_same_losses_norms_rates_and_weights(
    make: Any, max_norm: float | None, engines: Engines
) -> None:
    ours = make_ours(engines, make(), max_norm=max_norm).run(epochs=2)
    plain = make_plain(make(), max_norm=max_norm).run(epochs=2)
    assert ours.losses == pytest.approx(plain.losses, abs=1e-5)
    assert ours.norms == pytest.approx(plain.norms, abs=1e-5)
    assert ours.rates == plain.rates
    ours.model.synchronize()
    same_weights(weights_of(ours.model.model), weights_of(plain.model))


def same_weights(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert list(weights) == list(others)
    for name, value in others.items():
        # AdamW divides by the root of squares, which lifts rounding where gradients are tiny.
        difference = float((weights[name] - value).abs().max())
        assert difference < 1e-4, f"{name}: {difference}"


@pytest.mark.slow
def test_a_model_that_runs_in_parts_trains_alike() -> None:
    engine = wrap_model_to_roundpipe(
        make_llama(tied=False), use_sequential_preset=False, devices=2, optim_dtype=torch.float32
    )
    with engine:
        assert isinstance(engine, AutoRoundPipe)
        accelerator = RoundPipeAccelerator(cpu=True, gradient_accumulation_steps=2)
        ours = Loop(accelerator, engine, engine.optim_parameters()).run(epochs=2)
    plain = make_plain(make_llama(tied=False)).run(epochs=2)
    assert ours.losses == pytest.approx(plain.losses, abs=1e-5)
    assert ours.norms == pytest.approx(plain.norms, abs=1e-5)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["float32", "bfloat16"],
)
def test_a_saved_state_goes_on_where_it_was(
    dtype: torch.dtype, tmp_path: Path, engines: Engines
) -> None:
    """Bitwise, also where the optimizer's copies hold what 16-bit weights do not: in another
    engine, and in one that has gone elsewhere meanwhile."""
    first = make_ours(engines, make_llama(tied=False).to(dtype)).run()
    first.accelerator.save_state(str(tmp_path))
    weights = weights_of(first.model.model)
    expected = first.run().losses[5:]

    first.accelerator.load_state(str(tmp_path))
    assert all(
        torch.equal(value, weights[name]) for name, value in weights_of(first.model.model).items()
    )
    assert first.run().losses[10:] == expected

    second = make_ours(engines, make_llama(tied=False).to(dtype))
    second.accelerator.load_state(str(tmp_path))
    assert second.run().losses == expected


def test_what_cannot_work_is_said(engines: Engines) -> None:
    engine = engines(make_llama(tied=False), TWO)
    with pytest.raises(ConfigError, match="mixed_precision='bf16': .* within torch.autocast"):
        RoundPipeAccelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state()
    accelerator = RoundPipeAccelerator(cpu=True)
    with pytest.raises(ConfigError, match="make it over engine.optim_parameters()"):
        accelerator.prepare(engine, torch.optim.SGD(engine.model.parameters(), lr=0.1))
    accelerator.prepare(engine, torch.optim.SGD(engine.optim_parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="pass engine.parameters()"):
        accelerator.clip_grad_norm_(list(engine.parameters())[:2], 1.0)
    with pytest.raises(ConfigError, match="only be clipped by their norm"):
        accelerator.clip_grad_value_(engine.parameters(), 1.0)


def test_the_plain_accelerator_says_what_to_use_instead(engines: Engines) -> None:
    engine = engines(make_llama(tied=False), TWO)
    with pytest.raises(ConfigError, match="roundpipe_hf.accelerate.RoundPipeAccelerator"):
        Accelerator(cpu=True).prepare(engine)
