"""Layers that a recording would compute something else for: they run as they are, or are recorded
so that it does not matter."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe.errors import ConfigError
from roundpipe.runtime.capture import layer as captured
from roundpipe.runtime.capture import layers
from tests.support.device_sets import ONE
from tests.support.engines import Engines, engine_weights

WIDTH, ROWS, STEPS = 8, 6, 9
_ALIKE = 8  # steps with rows of one length
State = dict[str, Any]


class Settings:
    """What modules share and look at, as a config is."""

    def __init__(self) -> None:
        self.scale = 1.0


class First(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> State:  # type: ignore[override]
        scale = x.detach().abs().mean(1, keepdim=True)
        hidden = super().forward(x)
        return {"hidden": hidden, "again": hidden, "scale": scale}


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, state: State) -> Tensor:  # type: ignore[override]
        made: Tensor = super().forward(state["hidden"]) * state["scale"]
        return made


class Block(nn.Module):
    def __init__(self, config: Settings) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.beside = nn.Linear(WIDTH, WIDTH)
        self.config = config

    def hidden(self, state: State) -> Tensor:
        return torch.tanh(self.inner(state["hidden"]) * self.config.scale)


class Fading(Block):
    """What carries no gradient is another tensor in each layer, and read in the backward."""

    def forward(self, state: State) -> State:
        return {**state, "hidden": self.hidden(state) * state["scale"], "scale": state["scale"] / 2}


class WritesHidden(Block):
    def forward(self, state: State) -> State:
        hidden = self.hidden({"hidden": state["hidden"].clone()})
        return {**state, "hidden": state["hidden"].mul_(2.0) + hidden}


class WritesScale(Block):
    def forward(self, state: State) -> State:
        hidden = self.hidden(state) * state["scale"].clone()
        return {**state, "hidden": hidden, "scale": state["scale"].mul_(0.5)}


class Saves(Block):
    def forward(self, state: State) -> State:
        hidden = self.hidden(state)
        roundpipe.save_for_recompute(hidden.detach() > 0)
        return {**state, "hidden": hidden * (1.0 + roundpipe.doing_recompute())}


class AsksWhetherTheSame(Block):
    """The first one is given the same tensor twice."""

    def forward(self, state: State) -> State:
        is_same = state["again"] is state["hidden"]
        hidden = self.hidden(state) * (2.0 if is_same else 1.0)
        return {**state, "hidden": hidden}


class HasMore(Block):
    """Nobody reads what ``beside`` makes, so that has no gradient, and AdamW leaves it alone."""

    def forward(self, state: State) -> State:
        hidden = self.hidden(state)
        return {**state, "hidden": hidden, "unread": self.beside(hidden)}


class Plain(Block):
    def forward(self, state: State) -> State:
        return {**state, "hidden": self.hidden(state)}


class KeepsActivations(Block):
    made: ClassVar[list[weakref.ref[Tensor]]] = []

    def forward(self, state: State) -> State:
        self.latest = self.hidden(state)
        self.made.append(weakref.ref(self.latest))
        return {**state, "hidden": 1 * self.latest}


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, labels)


def trained(
    engines: Engines,
    kind: type[Block],
    *,
    captures: bool | None,
    between: Callable[[int, Any], None] = lambda step, model: None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = loss_fn,
    rows: Callable[[int], int] = lambda step: ROWS,
    steps: int = STEPS,
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    config = Settings()
    model = nn.Sequential(First(), *(kind(config) for _ in range(3)), Last())
    engine = engines(
        model, ONE, cuda_graphs=captures, max_gpu_memory="1GB", optim_dtype=torch.float32
    )
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters(), lr=1e-2, weight_decay=0.1)
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        between(step, model)
        x = torch.randn(rows(step), WIDTH, generator=generator)
        run = roundpipe.RoundPipeRunConfig(num_microbatch=2)
        loss: Any = engine.forward_backward((x,), label=x, loss_fn=loss_fn, run_config=run)
        losses.append(loss.item())
        engine.step(optimizer.step, is_async=False)
    weights = engine_weights(engine)
    engine.close()
    return losses, weights


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it worked, of each attempt."""
    seen: list[bool] = []
    record = captured.CapturedLayer.record

    def counted(self: Any, device: Any) -> bool:
        seen.append(record(self, device))
        return seen[-1]

    monkeypatch.setattr(captured.CapturedLayer, "record", counted)
    return seen


@pytest.mark.parametrize("kind", [Fading, Saves, AsksWhetherTheSame])
def test_recorded_layers_compute_what_they_do(
    engines: Engines, recorded: list[bool], kind: type[Block]
) -> None:
    expected = trained(engines, kind, captures=False)
    actual = trained(engines, kind, captures=True)
    assert recorded
    assert all(recorded)
    assert actual[0] == expected[0]
    ONE.check(actual[1], expected[1])


@pytest.mark.parametrize("kind", [WritesHidden, WritesScale, HasMore])
def test_layers_that_a_recording_would_change_are_not_recorded(
    engines: Engines, recorded: list[bool], kind: type[Block]
) -> None:
    expected = trained(engines, kind, captures=False)
    actual = trained(engines, kind, captures=True)
    assert actual[0] == expected[0]
    ONE.check(actual[1], expected[1])
    assert not any(recorded)


def _scale(model: Any) -> None:
    model[1].config.scale = 2.0


def _without_flash(model: Any) -> None:
    torch.backends.cuda.enable_flash_sdp(False)


@pytest.mark.parametrize("change", [_scale, _without_flash])
def test_what_recordings_depend_on_is_seen_to_change(
    engines: Engines, recorded: list[bool], change: Callable[[Any], None]
) -> None:
    def between(step: int, model: Any) -> None:
        if step == STEPS - 1:
            change(model)
            assert len(recorded) == 3, "one for each block"
            forms.extend(replayed)
            replayed.clear()

    forms: list[Any] = []
    replayed: list[Any] = []
    run = captured.CapturedLayer.run

    def noted(self: Any, *args: Any) -> Any:
        replayed.append(self)
        return run(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured.CapturedLayer, "run", noted)
        try:
            trained(engines, Plain, captures=True, between=between)
        finally:
            torch.backends.cuda.enable_flash_sdp(True)
    assert forms, "nothing was replayed before"
    assert not replayed, "what was recorded with another config"


def test_a_second_backward_is_refused_by_name(engines: Engines) -> None:
    def backward_twice(outputs: Tensor, labels: Tensor) -> Tensor:
        loss = loss_fn(outputs, labels)
        loss.backward(retain_graph=True)
        return loss

    trained(engines, Plain, captures=False, loss_fn=backward_twice)
    with pytest.raises(ConfigError, match="cuda_graphs=False"):
        trained(engines, Plain, captures=True, loss_fn=backward_twice)


def test_no_activations_stay_with_what_was_seen(engines: Engines) -> None:
    KeepsActivations.made.clear()

    def between(step: int, model: Any) -> None:
        gc.collect()
        assert all(made() is None for made in KeepsActivations.made)

    trained(engines, KeepsActivations, captures=True, between=between)


def test_inputs_of_lengths_that_do_not_come_again_are_let_go(
    engines: Engines, recorded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_KEPT_UNUSED", 1)
    monkeypatch.setattr(layers, "_SEEN_BEFORE", 0)
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    init = captured.Static.__init__

    def noted(self: Any, leaf: Tensor) -> None:
        init(self, leaf)
        made.add(self)

    monkeypatch.setattr(captured.Static, "__init__", noted)
    counts: list[int] = []

    def between(step: int, model: Any) -> None:
        gc.collect()
        counts.append(len(made))

    trained(
        engines,
        Plain,
        captures=True,
        between=between,
        rows=lambda step: 4 + 2 * (step // _ALIKE),
        steps=4 * _ALIKE,
    )
    per_length = counts[_ALIKE - 1]
    assert per_length > 0
    assert counts[-1] == per_length
