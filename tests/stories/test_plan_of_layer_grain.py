"""An engine that recomputes layer by layer showed, as its plan, the one for recomputing whole
stages."""

import torch
from torch import nn

from roundpipe import RoundPipeRunConfig
from tests.support.engines import Engines


def test_the_plan_shown_is_the_plan_of_the_calls(engines: Engines) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    engine = engines(
        model, model_run_config=RoundPipeRunConfig(recompute_grain="layer", num_microbatch=2)
    )
    x = torch.randn(4, 4)
    engine.forward_backward((x,), label=x, loss_fn=lambda out, y: (out - y).square().sum())
    assert engine.execute_plan is engine.planner.plan("fused", 2, None, grain="layer").plan
