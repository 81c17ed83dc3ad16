"""Random plans, models and ways to train, on adversarial devices: always the bits that one plain
device gives.

The oracle of a drawn case is an engine with one virtual device and everything in one stage; where
there is neither dropout nor a tied weight (whose uses autograd adds in another order), plain
PyTorch too.
"""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE
from tests.support.engines import engine_gradients, engine_weights, run_batch
from tests.support.models import Batch
from tests.support.reference import Reference, Tensors

ROWS, LENGTH, WIDTH, VOCABULARY = 12, 2, 8, 11
NUM_LAYERS = 7  # embedding, blocks, head
LEARNING_RATE = 0.05
DEFAULT_EXAMPLES, LONG_EXAMPLES = 40, 220


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the grid."""

    num_devices: int
    num_microbatches: int
    plan: ModelExecutePlan
    grain: Literal["stage", "layer"]
    dropout: float
    is_tied: bool
    frozen: frozenset[int]
    calls_per_step: int
    is_async: bool
    by_forward: bool
    seed: int


class Block(nn.Module):
    """A residual block of two parameters and a buffer, with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(hidden))) * self.scale


def make_model(case: Case) -> nn.Sequential:
    torch.manual_seed(case.seed)
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    if case.is_tied:
        head.weight = embedding.weight
    model = nn.Sequential(embedding, *(Block(case.dropout) for _ in range(NUM_LAYERS - 2)), head)
    for layer in case.frozen:
        model[layer].requires_grad_(False)
    return model


def make_batch(number: int) -> Batch:
    generator = torch.Generator().manual_seed(number)
    tokens, labels = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    return Batch((tokens,), {}, labels, loss_of)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (
        ROWS * LENGTH
    )


class Trained:
    """What training left behind."""

    def __init__(
        self, losses: list[Tensor], gradients: Tensors, weights: Tensors, generator: Tensor
    ) -> None:
        self.values = {f"loss {n}": loss for n, loss in enumerate(losses)}
        self.values |= {f"gradient {name}": value for name, value in gradients.items()}
        self.values |= {f"weight {name}": value for name, value in weights.items()}
        self.values["generator"] = generator


def train(case: Case, devices: Any, **run: Any) -> Trained:
    """Two steps, and calls whose gradients stay."""
    with RoundPipe(make_model(case), devices=devices) as engine:
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=LEARNING_RATE)
        losses = []
        for number in range(3 * case.calls_per_step):
            losses.append(call(engine, case, make_batch(number), run))
            if (number + 1) % case.calls_per_step == 0 and number < 2 * case.calls_per_step:
                engine.step(optimizer.step, is_async=case.is_async)
        # Before the weights, because closing the engine or reading it draws nothing.
        generator = torch.get_rng_state()
        return Trained(losses, engine_gradients(engine), engine_weights(engine), generator)


def call(engine: RoundPipe, case: Case, batch: Batch, run: dict[str, Any]) -> Tensor:
    if not case.by_forward:
        return run_batch(engine, batch, case.num_microbatches, **run)
    config = RoundPipeRunConfig(num_microbatch=case.num_microbatches, **run)
    loss = loss_of(engine(*batch.args, roundpipe_run_config=config), batch.label)
    loss.backward()
    return loss.detach()


def train_plainly(case: Case) -> Tensors:
    reference = Reference(
        make_model(case),
        lambda params: torch.optim.SGD(params, lr=LEARNING_RATE),
        staleness=int(case.is_async),
    )
    losses = []
    for number in range(3 * case.calls_per_step):
        batch = make_batch(number)
        losses.append(reference.forward_backward(batch.split(case.num_microbatches), batch.loss_fn))
        if (number + 1) % case.calls_per_step == 0 and number < 2 * case.calls_per_step:
            reference.step()
    return Trained(losses, reference.gradients, reference.weights, torch.get_rng_state()).values


WHOLE = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(NUM_LAYERS)])


def check(case: Case) -> None:
    devices = Adversaries(case.num_devices, case.seed)
    actual = train(
        case, devices.argument, execute_plan=case.plan, recompute_grain=case.grain
    ).values
    assert devices.faults == []
    expected = train(case, 1, execute_plan=WHOLE).values
    ONE.check(actual, expected)
    if not case.dropout and not case.is_tied and not case.by_forward:
        plain = train_plainly(case)
        ONE.check({name: actual[name] for name in plain}, plain)


@st.composite
def cuts(draw: st.DrawFn, end: int) -> list[range]:
    """Ascending stages that cover layers 0 to ``end``."""
    borders = sorted(draw(st.sets(st.integers(1, end - 1)))) if end > 1 else []
    edges = [0, *borders, end]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)] if end else []


@st.composite
def plans(draw: st.DrawFn) -> ModelExecutePlan:
    """Any valid plan: forward and backward cut independently, up to the fused stage."""
    fused = draw(st.integers(0, NUM_LAYERS - 1))
    forward, backward = draw(cuts(fused)), draw(cuts(fused))
    return ModelExecutePlan(
        fwd_plan=forward, bwd_plan=[range(fused, NUM_LAYERS), *reversed(backward)]
    )


CASES = st.builds(
    Case,
    num_devices=st.integers(1, 3),
    num_microbatches=st.sampled_from([1, 2, 3, 4]),
    plan=plans(),
    grain=st.sampled_from(["stage", "layer"]),
    dropout=st.sampled_from([0.0, 0.4]),
    is_tied=st.booleans(),
    # The head always trains; tied to it the embedding does too, whatever is drawn.
    frozen=st.frozensets(st.integers(0, NUM_LAYERS - 2), max_size=NUM_LAYERS - 2),
    calls_per_step=st.integers(1, 2),
    is_async=st.booleans(),
    by_forward=st.booleans(),
    seed=st.integers(0, 1000),
)


FIXED = settings(
    max_examples=DEFAULT_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.slow
@pytest.mark.timeout(180)
@FIXED
@given(case=CASES)
def test_a_drawn_plan_gives_the_bits_of_one_stage_on_one_device(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(FIXED, max_examples=LONG_EXAMPLES)
@given(case=CASES)
def test_two_hundred_drawn_plans_give_the_bits_of_one_stage_on_one_device(case: Case) -> None:
    check(case)
