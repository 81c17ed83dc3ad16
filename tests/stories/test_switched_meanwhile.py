"""What the user switches, replaces or removes while late stage runs of a call still run belongs to
later calls.

The story: `forward_backward` returns when the losses are known; another adapter was set, or a hook
removed, before the last stages had been through their backward. They recomputed with what was there
by then, and the gradients of the adapter that the call had trained were gone without a word.
"""

import threading
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig, doing_recompute
from tests.support.engines import Engines, engine_gradients
from tests.support.models import make_llama
from tests.support.optimizers import PATIENCE_S
from tests.support.preset_models import INPUTS


class Gate:
    """Holds the first layer that is recomputed until it is opened, before the layers above it are
    looked at."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def wait(self, *_: object) -> None:
        if doing_recompute():
            assert self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


def late_plan(num_layers: int) -> RoundPipeRunConfig:
    """All layers but the last are recomputed after the call has returned."""
    last, others = range(num_layers - 1, num_layers), range(num_layers - 1)
    return RoundPipeRunConfig(
        num_microbatch=2, execute_plan=ModelExecutePlan(fwd_plan=[others], bwd_plan=[last, others])
    )


def gradients(
    engine: RoundPipe,
    run: Callable[[], object],
    gate: Gate,
    switch: Callable[[], None],
    *,
    late: bool,
) -> dict[str, Tensor]:
    """Of one call; ``switch`` comes while its last stage run still runs, or after it."""
    if not late:
        gate.open()
    run()
    if not late:
        with OptimizerCtx():  # waits for all stage runs
            pass
    switch()
    gate.open()
    with OptimizerCtx():
        pass
    return engine_gradients(engine)


def test_another_adapter(engines: Engines) -> None:
    found = []
    for late in (False, True):
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(0)
        model = get_peft_model(make_llama(tied=False), config, adapter_name="one")
        model.add_adapter("two", config)
        model.set_adapter("one")
        engine, gate = engines(model), Gate()
        model.base_model.model.model.layers[0].register_forward_pre_hook(gate.wait)
        run_config = late_plan(engine.statistics()["layers"])

        def run(engine: RoundPipe = engine, run_config: RoundPipeRunConfig = run_config) -> None:
            engine.forward_backward(
                input_kwargs=INPUTS["labels"](),
                loss_fn=lambda output, _: output.loss,
                run_config=run_config,
            )

        def switch(model: nn.Module = model, gate: Gate = gate) -> None:
            model.set_adapter("two")  # type: ignore[operator]
            gate.open()
            with OptimizerCtx():
                pass
            model.set_adapter("one")  # type: ignore[operator]  # only what trains shows its gradient

        found.append(gradients(engine, run, gate, switch, late=late))
    assert found[0]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


class Gated(nn.Module):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._wait = gate.wait

    def forward(self, hidden: Tensor) -> Tensor:
        self._wait()
        output: Tensor = self.linear(hidden)
        return output


def doubled(_: nn.Module, __: object, output: Tensor) -> Tensor:
    return 2 * output


def doubled_by_name(_: nn.Module, __: object, ___: object, output: Tensor) -> Tensor:
    return 2 * output


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_hook_that_is_removed(with_kwargs: bool, engines: Engines) -> None:
    found = []
    for late in (False, True):
        torch.manual_seed(0)
        gate = Gate()
        model = nn.Sequential(Gated(gate), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        inputs = torch.randn(6, 4)
        engine = engines(model)
        hook = model[1].register_forward_hook(
            doubled_by_name if with_kwargs else doubled, with_kwargs=with_kwargs
        )

        def run(engine: RoundPipe = engine, inputs: Tensor = inputs) -> None:
            engine.forward_backward(
                (inputs,),
                loss_fn=lambda outputs, _: outputs.square().sum(),
                run_config=late_plan(4),
            )

        found.append(gradients(engine, run, gate, hook.remove, late=late))
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())
