"""`free_devices` gives the devices back to somebody else for a while."""

import torch

import roundpipe
from roundpipe import RoundPipe
from tests.support.engines import run_batch
from tests.support.models import make_mlp, mlp_batch


def test_what_stays_between_calls_goes_and_comes_again() -> None:
    """Frozen weights stay where there is room. Training goes on from the same weights."""
    model, batch = make_mlp(), mlp_batch(4)
    for parameter in list(model.parameters())[:-1]:
        parameter.requires_grad_(False)
    with RoundPipe(model, devices=roundpipe.virtual(2), max_gpu_memory="1GB") as engine:
        optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for frees in (False, True, True):
            losses.append(run_batch(engine, batch, 2))
            engine.step(step, is_async=True)
            assert sum(engine.statistics()["slot_bytes"].values()) > 0
            if frees:
                engine.free_devices()
                assert sum(engine.statistics()["slot_bytes"].values()) == 0
        assert losses[0] > losses[2]
        with torch.no_grad():
            ours = engine(*batch.args)
        engine.synchronize()
    torch.testing.assert_close(ours, model(*batch.args).detach())
