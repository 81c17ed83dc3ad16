"""A plain Accelerate loop in two processes, started as `accelerate launch` starts them, trains over
engines as it trains over models in `DistributedDataParallel`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from roundpipe import RoundPipe, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe_hf.accelerate import RoundPipeAccelerator
from tests.hf.test_accelerate import Loop, make_ours, make_plain, own_state, same_weights
from tests.support.engines import Engines
from tests.support.models import make_llama, make_lora_llama
from tests.support.processes import check_in_processes
from tests.support.reference import weights_of

__all__ = ["own_state"]
STATE = "optimizer.bin"


def test_as_plain_and_saved_for_any_number(tmp_path: Path, engines: Engines) -> None:
    """Each process compares with the plain loop that it has run; here one process goes on from what
    two have saved."""
    check_in_processes(all_checks, tmp_path)
    ours, plain = (torch.load(tmp_path / name / STATE) for name in ("ours", "plain"))
    torch.testing.assert_close(ours["state"], plain["state"], atol=1e-5, rtol=0)
    alone = make_ours(engines, in_bf16())
    alone.accelerator.load_state(str(tmp_path / "in-bf16"))
    alone.model.synchronize()
    masters = torch.load(tmp_path / "in-bf16/custom_checkpoint_0.pkl")
    torch.testing.assert_close(masters, masters_of(alone), atol=0, rtol=0)
    assert len(alone.run().losses) == 5


def all_checks() -> None:
    assert Accelerator(cpu=True).num_processes == 2  # the first one joins the processes
    trains_as_plain()
    goes_on_to_the_bit()
    engines_of_one_process_are_refused()


def make_together(model: nn.Module, **how: Any) -> Loop:
    accelerator = RoundPipeAccelerator(cpu=True, gradient_accumulation_steps=2)
    engine = wrap_model_to_roundpipe(
        model,
        devices=2,
        optim_dtype=torch.float32,
        process_group=torch.distributed.group.WORLD,
    )
    return Loop(accelerator, engine, engine.optim_parameters(), **how)


def trains_as_plain() -> None:
    """Five batches, of which one process gets three and the other two and one again; the second
    process begins with other weights."""
    for make, max_norm in ((lambda: make_llama(tied=True), 0.5), (make_lora_llama, None)):
        models = make(), make()
        with torch.no_grad():
            for parameter in (one for model in models for one in model.parameters()):
                if parameter.requires_grad and torch.distributed.get_rank() == 1:
                    parameter.mul_(1.5)
        ours = make_together(models[0], max_norm=max_norm).run(epochs=2)
        plain = make_plain(models[1], max_norm=max_norm).run(epochs=2)
        assert len(ours.losses) == 6
        assert ours.losses == pytest.approx(plain.losses, abs=1e-5)
        assert ours.norms == pytest.approx(plain.norms, abs=1e-5)
        assert ours.rates == plain.rates
        ours.model.synchronize()
        same_weights(weights_of(ours.model.model), weights_of(plain.model.module))
        if max_norm is not None:
            ours.accelerator.save_state("ours")
            plain.accelerator.save_state("plain")
        ours.model.close()


def in_bf16() -> nn.Module:
    return make_llama(tied=False).to(torch.bfloat16)


def masters_of(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: one.detach() for name, one in loop.model.optim_named_parameters()}


def goes_on_to_the_bit() -> None:
    """The optimizer's copies hold what bf16 weights do not, and each process has its own."""
    first = make_together(in_bf16()).run()
    first.accelerator.save_state("in-bf16")
    expected = first.run().losses[3:]
    second = make_together(in_bf16())
    second.accelerator.load_state("in-bf16")
    assert second.run().losses == expected
    on_each = ProjectConfiguration(save_on_each_node=True)
    second.accelerator.project_configuration = on_each
    with pytest.raises(ConfigError, match="save_on_each_node"):
        second.accelerator.save_state("never")
    first.model.close()
    second.model.close()


def engines_of_one_process_are_refused() -> None:
    """Their gradients would be this process's alone."""
    engine = RoundPipe(nn.Sequential(nn.Linear(2, 2)), devices=1)
    with pytest.raises(ConfigError, match=r"engine is of 1 .* of 2: .*process_group="):
        RoundPipeAccelerator(cpu=True).prepare(engine)
    engine.close()
