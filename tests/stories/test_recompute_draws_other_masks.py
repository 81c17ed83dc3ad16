"""Recompute drew new dropout masks: the loss looked fine and the gradients belonged to another
sample.

A small GPT-2 with dropout everywhere and an MLP with dropout in every stage, recomputed by several
plans: their gradients must be, to the bit, those of the plan that recomputes nothing. A probe
compares the masks themselves.

Source: allenai/OLMo-core#828, unslothai/unsloth-zoo#1218.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, RoundPipe
from tests.support.adversaries import Adversaries
from tests.support.device_sets import ONE, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, Batch, mlp_batch
from tests.support.reference import Tensors

WIDTH, HEADS, LENGTH, VOCABULARY, ROWS = 16, 2, 6, 23, 8
NUM_LAYERS = 6
NO_RECOMPUTE = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(NUM_LAYERS)])
PLANS = {
    "same cuts": ModelExecutePlan(
        fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 6), range(2, 4), range(2)]
    ),
    "a backward stage across a forward border": ModelExecutePlan(
        fwd_plan=[range(2), range(2, 5)], bwd_plan=[range(5, 6), range(1, 5), range(1)]
    ),
    "all but the last layer at once": ModelExecutePlan(
        fwd_plan=[range(1), range(1, 2), range(2, 5)], bwd_plan=[range(5, 6), range(5)]
    ),
}


class Embedding(nn.Module):
    """Tokens and positions, then dropout, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) + self.positions.weight)


class Block(nn.Module):
    """GPT-2's: dropout in attention and before each residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        heads = self.qkv(self.before_attention(hidden)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropped = 0.1 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropped, is_causal=True
        )
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH)))
        return hidden + self.dropout(self.mlp(self.before_mlp(hidden)))


def make_gpt2() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Embedding(), *(Block() for _ in range(NUM_LAYERS - 2)), nn.Linear(WIDTH, VOCABULARY)
    )


def gpt2_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH), generator=generator)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (ROWS * LENGTH)

    return Batch((tokens,), {}, labels, loss_fn)


def make_dropout_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Tanh(), nn.Dropout(0.5))
        for _ in range(NUM_LAYERS)
    ]
    return nn.Sequential(*stages)


MODELS: dict[str, tuple[Callable[[], nn.Sequential], Batch]] = {
    "gpt2": (make_gpt2, gpt2_batch()),
    "mlp": (make_dropout_mlp, mlp_batch(rows=ROWS)),
}


class Trained:
    """Losses and gradients of some calls between which the main thread draws, and the generator's
    state after each."""

    def __init__(self, engine: RoundPipe, batch: Batch, num_microbatch: int, **run: object) -> None:
        torch.manual_seed(7)
        self.values: Tensors = {}
        for number in range(3):
            self.values[f"loss {number}"] = run_batch(engine, batch, num_microbatch, **run)
            self.values[f"generator {number}"] = torch.get_rng_state()
            self.values[f"drawn {number}"] = torch.rand(3)
        self.values |= engine_gradients(engine)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("num_microbatch", [1, 4])
def test_gradients_with_recompute_are_those_without(
    num_microbatch: int, grain: str, model: str, devices: DeviceSet, engines: Engines
) -> None:
    make, batch = MODELS[model]
    plain = Trained(engines(make(), devices), batch, num_microbatch, execute_plan=NO_RECOMPUTE)
    for plan in PLANS.values():
        again = Trained(
            engines(make(), devices),
            batch,
            num_microbatch,
            execute_plan=plan,
            recompute_grain=grain,
        )
        devices.check(again.values, plain.values)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_same_where_copies_are_late(count: int, model: str, engines: Engines) -> None:
    make, batch = MODELS[model]
    plain = Trained(engines(make(), ONE), batch, 4, execute_plan=NO_RECOMPUTE)
    devices = Adversaries(count, seed=count)
    for plan in PLANS.values():
        again = Trained(engines(make(), devices), batch, 4, execute_plan=plan)  # type: ignore[arg-type]
        ONE.check(again.values, plain.values)
    assert devices.faults == []


class MaskProbe(nn.Module):
    """Dropout on ones, whose masks are noted by the input they were drawn for.

    Another mask in an earlier layer of the recompute would show as another input. The log is
    global, because modules may be copied.
    """

    log: ClassVar[defaultdict[int, defaultdict[bytes, list[Tensor]]]] = defaultdict(
        lambda: defaultdict(list)
    )

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(hidden), 0.5)
        MaskProbe.log[self.layer][hidden.detach().cpu().numpy().tobytes()].append(
            mask.detach().cpu()
        )
        return self.linear(hidden) * mask


def probed_masks(
    engines: Engines, devices: DeviceSet, plan: str, num_microbatch: int, **run: object
) -> list[list[list[Tensor]]]:
    """Per layer and input, the masks that were drawn."""
    MaskProbe.log.clear()
    torch.manual_seed(0)
    engine = engines(nn.Sequential(*(MaskProbe(layer) for layer in range(NUM_LAYERS))), devices)
    run_batch(engine, mlp_batch(rows=ROWS), num_microbatch, execute_plan=PLANS[plan], **run)
    engine.synchronize()
    assert sorted(MaskProbe.log) == list(range(NUM_LAYERS))
    return [list(MaskProbe.log[layer].values()) for layer in range(NUM_LAYERS)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("num_microbatch", [1, 4])
def test_the_mask_of_the_recompute_is_the_mask_of_the_forward(
    num_microbatch: int, plan: str, devices: DeviceSet, engines: Engines
) -> None:
    fused = PLANS[plan].bwd_plan[0]
    for layer, by_input in enumerate(probed_masks(engines, devices, plan, num_microbatch)):
        assert len(by_input) == num_microbatch, f"layer {layer}"
        for masks in by_input:
            assert len(masks) == (1 if layer in fused else 2), f"layer {layer}"
            assert all(torch.equal(mask, masks[0]) for mask in masks), f"layer {layer}"


def test_the_probe_would_see_other_masks(engines: Engines) -> None:
    """With the streams switched off every run of a layer draws anew, and both tests above would
    fail."""
    masks = probed_masks(engines, ONE, "same cuts", 4, preserve_rng_state=False)
    assert len(masks[0]) == 4
    assert not any(torch.equal(forward, recompute) for forward, recompute in masks[0])
    assert len(masks[1]) == 8
    make, batch = MODELS["mlp"]
    plain, again = (
        Trained(engines(make(), ONE), batch, 4, execute_plan=plan, preserve_rng_state=False)
        for plan in (NO_RECOMPUTE, PLANS["same cuts"])
    )
    assert not torch.equal(plain.values["0.0.weight"], again.values["0.0.weight"])
