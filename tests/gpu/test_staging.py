"""On an accelerator weights that are left where they are go up through page-locked slices, and
arrive whole."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from roundpipe.device.accelerator import AcceleratorDevice
from roundpipe.memory.pinning import HostMemory
from roundpipe.memory.ring import NUM_SLICES, SLICE_BYTES, Piece, PinnedRing
from tests.support.device_sets import ACCELERATORS, DeviceSet
from tests.support.engines import Engines

pytestmark = pytest.mark.gpu
WIDTH = 2048


def make_model() -> nn.Sequential:
    """Layers of 16 MiB and a little more, so that each takes two slices."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def losses(
    engines: Engines, devices: DeviceSet, model: nn.Sequential, pin_model: str
) -> list[Tensor]:
    engine = engines(model, devices, pin_model=pin_model)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(4):
        found.append(
            engine.forward_backward((inputs,), loss_fn=lambda outputs, _: outputs.square().mean())
        )
        engine.step(optimizer.step)
    return found


@pytest.mark.parametrize("devices", ACCELERATORS, ids=str)
def test_mapped_weights_train_as_page_locked_ones(
    devices: DeviceSet, engines: Engines, tmp_path: Path
) -> None:
    """Bitwise, on the same devices; the first layers are frozen and lie in a file."""
    save_file(make_model().state_dict(), tmp_path / "model.safetensors")
    mapped, moved = make_model(), make_model()
    mapped.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    for model in (mapped, moved):
        model[:4].requires_grad_(False)
    addresses = [parameter.data_ptr() for parameter in mapped.parameters()]
    assert losses(engines, devices, mapped, "off") == losses(engines, devices, moved, "alloc")
    assert [parameter.data_ptr() for parameter in mapped.parameters()] == addresses


@pytest.mark.parametrize("devices", ACCELERATORS, ids=str)
def test_slices_are_page_locked_and_filled_again_only_when_sent(devices: DeviceSet) -> None:
    """More data than the ring holds, three times over, while the lane is kept busy."""
    assert not isinstance(devices.argument, int)
    device = AcceleratorDevice(devices.argument[0])
    ring = PinnedRing(device.up, HostMemory("off", accelerated=True), largest=1 << 40)
    assert all(arena.bytes.is_pinned() for arena in ring._slices)
    content = torch.randint(0, 255, (3 * NUM_SLICES * SLICE_BYTES + 17,), dtype=torch.uint8)
    with device.up.work():
        target = torch.zeros(len(content), dtype=torch.uint8, device=device.torch_device)
        torch.cuda._sleep(100_000_000)
    ring.send(target, [Piece(0, content)], lambda: True).wait()
    assert torch.equal(target.cpu(), content)
    ring.close()
