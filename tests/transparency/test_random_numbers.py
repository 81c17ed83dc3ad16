"""Each (layer, microbatch) draws from its own stream; recompute repeats it; the caller's generator
is left in order."""

import random
from collections import defaultdict
from collections.abc import Callable
from typing import ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import ConfigError, ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from tests.support.device_sets import ONE, THREE, TWO, DeviceSet
from tests.support.engines import Engines, engine_gradients, run_batch
from tests.support.models import MLP_WIDTH, mlp_batch

SINGLE_DRAWS: list[Callable[[], Tensor]] = [
    lambda: torch.rand(()),
    lambda: torch.randint(2**63 - 1, ()),
    lambda: torch.randint(2**31 - 1, ()),
    lambda: torch.empty((), dtype=torch.int64).random_(),
]
BATCH = mlp_batch(rows=8)


def make_dropout_mlp(num_dropouts: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(num_dropouts):
        layers += [nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Linear(MLP_WIDTH, MLP_WIDTH))


def losses_of(engine: RoundPipe, calls: int) -> list[float]:
    return [float(run_batch(engine, BATCH, 2)) for _ in range(calls)]


def states_after_one_draw(before: Tensor) -> list[Tensor]:
    """What the generator may look like after "one draw"; the contract leaves open of which kind."""
    states = []
    for draw in SINGLE_DRAWS:
        torch.set_rng_state(before)
        draw()
        states.append(torch.get_rng_state())
    return states


def test_the_callers_generator_advances_by_one_draw_per_call(
    devices: DeviceSet, engines: Engines
) -> None:
    """Whatever the number of layers that drew, microbatches and devices; backward takes no further
    draw."""
    for num_dropouts, num_microbatch in ((1, 1), (3, 1), (3, 4)):
        engine = engines(make_dropout_mlp(num_dropouts), devices)
        torch.manual_seed(9)
        before = torch.get_rng_state()
        run_batch(engine, BATCH, num_microbatch)
        after = torch.get_rng_state()
        engine.synchronize()
        assert torch.equal(torch.get_rng_state(), after), (
            "the late part of the call touched the generator"
        )
        assert any(torch.equal(after, state) for state in states_after_one_draw(before))
        engine.close()


def test_the_callers_generator_stays_where_no_layer_draws(
    devices: DeviceSet, engines: Engines
) -> None:
    for model in (make_dropout_mlp(0), make_dropout_mlp(2).eval()):
        engine = engines(model, devices)
        before = torch.get_rng_state()
        run_batch(engine, BATCH, 3)
        with torch.no_grad():
            engine(*BATCH.args)
        engine.synchronize()
        assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_masks_and_the_next_call_gives_others(
    devices: DeviceSet, engines: Engines
) -> None:
    engine = engines(make_dropout_mlp(), devices)
    torch.manual_seed(1)
    first, second = run_batch(engine, BATCH, 4), run_batch(engine, BATCH, 4)
    torch.manual_seed(1)
    devices.check(run_batch(engine, BATCH, 4), first)
    torch.manual_seed(2)
    other = run_batch(engine, BATCH, 4)
    assert len({float(loss) for loss in (first, second, other)}) == 3


def test_microbatches_and_layers_have_different_masks(devices: DeviceSet, engines: Engines) -> None:
    """Equal rows in every microbatch come out differently, and two dropouts in a row zero different
    elements."""
    engine = engines(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.5)), devices)
    _, outputs = engine.forward_backward(
        (torch.ones(4, 64),),
        loss_fn=lambda out, _: out.sum(),
        return_outputs=True,
        run_config=RoundPipeRunConfig(num_microbatch=4),
    )
    zeros = (outputs == 0).cpu()
    assert len({tuple(row.tolist()) for row in zeros}) == 4
    # One mask used twice would leave half of the elements, two independent ones leave a quarter.
    assert 0.6 < zeros.float().mean() < 0.9


class MaskProbe(nn.Module):
    """Dropout on ones that reports the mask for the input it was given. The log is global: modules
    may be copied."""

    log: ClassVar[defaultdict[tuple[str, bytes], list[Tensor]]] = defaultdict(list)

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def forward(self, hidden: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(hidden), 0.5)
        key = hidden.detach().cpu().contiguous().numpy().tobytes()
        MaskProbe.log[self.label, key].append(mask.detach().cpu())
        return hidden * mask


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("num_microbatch", [1, 4])
def test_recompute_draws_the_masks_of_the_forward(
    grain: str, num_microbatch: int, devices: DeviceSet, engines: Engines
) -> None:
    """The probe knows its input: were any earlier mask another one in recompute, a new input would
    show up here.

    Backward stages cross forward borders, where restoring a state once per stage goes wrong.
    """
    MaskProbe.log.clear()
    labels = ["a", "b", "c", "d"]
    torch.manual_seed(0)
    layers = [
        layer for name in labels for layer in (nn.Linear(MLP_WIDTH, MLP_WIDTH), MaskProbe(name))
    ]
    engine = engines(nn.Sequential(*layers), devices)
    plan = ModelExecutePlan(
        fwd_plan=[range(3), range(3, 6)], bwd_plan=[range(6, 8), range(1, 6), range(1)]
    )
    run_batch(engine, BATCH, num_microbatch, execute_plan=plan, recompute_grain=grain)
    engine.synchronize()
    assert len(MaskProbe.log) == len(labels) * num_microbatch
    for (label, _), masks in MaskProbe.log.items():
        assert len(masks) == 1 if label == "d" else len(masks) >= 2, (
            f"{label} ran {len(masks)} times"
        )
        assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert len(
        {mask.numpy().tobytes() for masks in MaskProbe.log.values() for mask in masks}
    ) == len(MaskProbe.log)


def test_draws_of_the_main_thread_between_calls_are_its_own(engines: Engines) -> None:
    """Late backward stage runs recompute dropout while the caller goes on drawing: neither sees the
    other's numbers."""
    plan = ModelExecutePlan(fwd_plan=[range(5)], bwd_plan=[range(5, 7), range(3, 5), range(3)])

    def train(devices: DeviceSet) -> tuple[Tensor, dict[str, Tensor]]:
        engine = engines(make_dropout_mlp(), devices)
        torch.manual_seed(4)
        drawn = []
        for _ in range(5):
            run_batch(engine, BATCH, 4, execute_plan=plan)
            drawn += [torch.rand(3) for _ in range(20)]
        return torch.stack(drawn), engine_gradients(engine)

    drawn, gradients = train(ONE)
    for devices in (ONE, TWO, THREE):
        again = train(devices)
        assert torch.equal(again[0], drawn)
        devices.check(again[1], gradients)


def test_preserving_can_be_switched_off(engines: Engines) -> None:
    """Then layers draw as they come, and the call still trains."""
    engine = engines(make_dropout_mlp(), ONE)
    loss = run_batch(engine, BATCH, 2, preserve_rng_state=False)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in engine_gradients(engine).values())


def test_restoring_the_usual_rng_state_restores_dropout(engines: Engines) -> None:
    engine = engines(make_dropout_mlp(), TWO)
    losses_of(engine, 2)
    state = torch.get_rng_state()
    expected = losses_of(engine, 3)
    torch.set_rng_state(state)
    assert losses_of(engine, 3) == expected


# What is drawn past torch's default generators, a recompute would draw anew.


class Drawing(nn.Module):
    """Scales by what it draws from ``source``, which it may tell its recompute."""

    def __init__(
        self, source: Callable[[], Tensor], *, saves: bool = False, **attributes: object
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(MLP_WIDTH, MLP_WIDTH)
        self.source = source
        self.saves = saves
        vars(self).update(attributes)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.saves and roundpipe.doing_recompute():
            (drawn,) = roundpipe.get_recompute_data()
        else:
            drawn = self.source()
            if self.saves:
                roundpipe.save_for_recompute(drawn)
        output: Tensor = self.linear(hidden) * drawn
        return output


def drawing(kind: str, *, saves: bool = False) -> Drawing:
    own, of_numpy, of_python = torch.Generator(), numpy.random.default_rng(0), random.Random(0)
    sources: dict[str, tuple[Callable[[], Tensor], dict[str, object]]] = {
        "its own": (lambda: torch.rand((), generator=own), {"dice": own}),
        "its own of NumPy's": (
            lambda: torch.tensor(of_numpy.random(), dtype=torch.float32),
            {"dice": of_numpy},
        ),
        "its own of Python's": (lambda: torch.tensor(of_python.random()), {"dice": of_python}),
        "Python's": (lambda: torch.tensor(random.random()), {}),
        "NumPy's": (lambda: torch.tensor(numpy.random.random(), dtype=torch.float32), {}),
    }
    source, attributes = sources[kind]
    return Drawing(source, saves=saves, **attributes)


TWO_STAGES = ModelExecutePlan(fwd_plan=[range(1)], bwd_plan=[range(1, 2), range(1)])


def call_it(layer: Drawing, plan: ModelExecutePlan | None, engines: Engines) -> None:
    model = nn.Sequential(layer, nn.Linear(MLP_WIDTH, MLP_WIDTH))
    run_batch(engines(model, ONE), mlp_batch(rows=4), 2, execute_plan=plan, recompute_grain="layer")


@pytest.mark.parametrize("kind", ["its own", "its own of NumPy's", "its own of Python's"])
def test_a_layer_with_a_generator_of_its_own_cannot_be_recomputed(
    kind: str, engines: Engines
) -> None:
    with pytest.raises(
        ConfigError, match=r"layer 0 draws random numbers from its dice, .*save_for_recompute"
    ):
        call_it(drawing(kind), TWO_STAGES, engines)


@pytest.mark.parametrize("kind", ["Python's", "NumPy's"])
def test_a_layer_that_draws_elsewhere_is_warned_about(kind: str, engines: Engines) -> None:
    with pytest.warns(UserWarning, match=rf"layer 0 draws random numbers from {kind}"):
        call_it(drawing(kind), TWO_STAGES, engines)


@pytest.mark.parametrize("kind", ["its own", "its own of NumPy's", "Python's", "NumPy's"])
@pytest.mark.parametrize("way", ["saved", "not recomputed"])
def test_what_is_saved_or_not_recomputed_is_as_good_as_any(
    way: str, kind: str, engines: Engines, recwarn: pytest.WarningsRecorder
) -> None:
    fused = ModelExecutePlan(fwd_plan=[], bwd_plan=[range(2)])
    call_it(drawing(kind, saves=way == "saved"), TWO_STAGES if way == "saved" else fused, engines)
    assert not [warning for warning in recwarn if "random numbers" in str(warning.message)]
