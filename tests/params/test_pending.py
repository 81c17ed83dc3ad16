"""An update that is decided and not computed yet shows nowhere: whoever looks first has it
computed, or waits."""

import copy
import gc
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

from roundpipe.kernels.updates import UpdateInto
from roundpipe.params.placement import held, newest
from roundpipe.params.placement.held import Held, holder_of
from roundpipe.params.placement.newest import Hold, PendingUpdates
from roundpipe.params.window import Master
from tests.support.optimizers import PATIENCE_S


class AddOne(NamedTuple):
    """Adds 1 to the weight and its moment."""

    weight: Tensor
    moments: tuple[Tensor, ...]
    seen: bool = False

    def moved(self, weight: Tensor, moments: tuple[Tensor, ...]) -> "AddOne":
        return AddOne(weight, moments)


def add_one(updates: Sequence[UpdateInto]) -> None:
    with torch.no_grad():
        for update, working in updates:
            for tensor in (update.weight, *update.moments):
                tensor.add_(1)
            if working is not None:
                working.copy_(update.weight)


def zeros() -> tuple[Master, Tensor]:
    return Master(torch.zeros(2, 3)), torch.zeros(2, 3)


def saved(tensor: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda t: t * 1,
    "method": lambda t: t.sum() / 6,
    "in a list": lambda t: torch.stack([t, t])[0],
    "foreach": lambda t: torch._foreach_mul([t.detach()], 1)[0],
    "norm": lambda t: torch.linalg.vector_norm(t, ord=float("inf")),
    "index": lambda t: t[0],
    "item": lambda t: t[0, 0].item(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view": lambda t: t.view(-1),
    "transposed": lambda t: t.mT,
    "iterated": lambda t: next(iter(t)),
    "array": lambda t: numpy.asarray(t.detach()),
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "list of numbers": lambda t: t.tolist(),
    "storage": lambda t: torch.empty(0).set_(t.untyped_storage()),
    "copied": copy.deepcopy,
    "pickled": lambda t: pickle.loads(pickle.dumps(t)),
    "saved": saved,
    "used by a module": lambda t: nn.functional.linear(torch.eye(3), t).t(),
    "copied from": lambda t: torch.empty(2, 3).copy_(t),
    "out": lambda t: torch.mul(t, 1, out=torch.empty(2, 3)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("which", ["master", "moment"])
def test_whoever_looks_sees_the_update(which: str, look: Callable[[Tensor], Any]) -> None:
    master, moment = zeros()
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    assert master in pending
    with torch.no_grad():
        seen = look(master if which == "master" else moment)
    torch.testing.assert_close(
        torch.as_tensor(seen).float().detach(), torch.ones(torch.as_tensor(seen).shape)
    )
    assert master not in pending
    assert (type(master), type(moment)) == (Master, Tensor)
    assert not isinstance(seen, Held)


def test_text_shows_the_update() -> None:
    master, moment = zeros()
    for tensor in (master, moment):
        PendingUpdates(add_one).add([AddOne(master, (moment,))])
        before = repr(tensor)
        assert "0." not in before
        assert before == repr(tensor)


def test_what_an_update_leaves_alone_can_be_read_without_it() -> None:
    master, moment = zeros()
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    assert (master.shape, master.dtype, master.device.type) == (
        torch.Size([2, 3]),
        torch.float32,
        "cpu",
    )
    assert (master.requires_grad, moment.requires_grad, master.numel(), moment.nbytes) == (
        True,
        False,
        6,
        24,
    )
    assert isinstance(master, Master)
    assert isinstance(master, nn.Parameter)
    assert {master: 1, moment: 2}[master] == 1
    assert master.grad is None
    assert master in pending


ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda t: t.view(-1),
    "detached": lambda t: t.detach(),
    "row": lambda t: t[0],
    "storage": lambda t: t.untyped_storage(),
    "array": lambda t: t.detach().numpy(),
    "parameter": lambda t: nn.Parameter(t.detach()),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("which", ["master", "moment"])
def test_memory_that_somebody_else_holds_is_updated_at_once(
    which: str, alias: Callable[[Tensor], Any]
) -> None:
    """Through a view taken before, nobody can be made to wait."""
    master, moment = zeros()
    held = alias(master if which == "master" else moment)
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    assert master not in pending
    as_tensor = (
        torch.empty(0).set_(held)
        if isinstance(held, torch.UntypedStorage)
        else torch.as_tensor(held)
    )
    assert torch.equal(as_tensor.detach().reshape(-1)[:3], torch.ones(3))
    del held, as_tensor
    gc.collect()
    pending.add([AddOne(master, (moment,))])
    assert master in pending


def test_a_gradient_in_other_hands_is_used_at_once() -> None:
    master, moment = zeros()
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,), seen=True)])
    assert master not in pending
    assert torch.equal(moment, torch.ones(2, 3))


def test_updates_of_one_master_build_on_each_other() -> None:
    master, moment = zeros()
    pending = PendingUpdates(add_one)
    for _ in range(3):
        pending.add([AddOne(master, (moment,))])
    pending.compute_all()
    assert torch.equal(master.detach(), torch.full((2, 3), 3.0))
    assert torch.equal(moment, torch.full((2, 3), 3.0))


def test_the_working_copy_is_written_in_the_same_pass() -> None:
    (master, moment), working = zeros(), torch.zeros(2, 3)
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    pending.compute([(master, working)])
    assert torch.equal(working, torch.ones(2, 3))


def test_a_graph_that_saved_the_old_value_refuses_to_run_backward() -> None:
    """As after an update that was computed at once."""
    master, moment = zeros()
    loss = master.square().sum()
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_another_thread_waits_until_the_update_is_computed() -> None:
    master, moment = zeros()
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    begun, seen = threading.Event(), []

    def look() -> None:
        begun.set()
        seen.append(float(moment.sum()))
        seen.append(float(master.detach().sum()))

    reader = threading.Thread(target=look)
    reader.start()
    assert begun.wait(PATIENCE_S)
    assert master in pending
    pending.compute_all()
    reader.join(PATIENCE_S)
    assert seen == [6.0, 6.0]


def test_an_update_may_be_computed_at_any_moment_of_another_threads_look() -> None:
    """A look takes several lines of Python, and the optimizer thread may finish between any two of
    them."""
    looks = [look_interrupted_at(0)]
    while not looks[-1].is_last:
        looks.append(look_interrupted_at(len(looks)))
    assert [look.seen for look in looks] == [6.0] * len(looks)
    assert len(looks) > 5, "nothing was interrupted"


class Look(NamedTuple):
    seen: float
    is_last: bool  # it was about to wait


def look_interrupted_at(moment: int) -> Look:
    """The update is computed before the line of held.py or newest.py with that number, as the look
    comes past them."""
    master, looked_at = zeros()
    pending = made_elsewhere(add_one)
    pending.add([AddOne(master, (looked_at,))])
    lines, is_last = 0, False

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines, is_last
        if frame.f_code.co_filename not in (held.__file__, newest.__file__):
            return None
        if event == "line" and master in pending:
            lines += 1
            is_last = frame.f_code.co_name == "<lambda>"
            if lines > moment or is_last:
                pending.compute_all()
        return trace

    sys.settrace(trace)
    try:
        return Look(float(looked_at.sum()), is_last)
    finally:
        sys.settrace(None)


def made_elsewhere(compute: Callable[[Sequence[UpdateInto]], None]) -> PendingUpdates:
    """By another thread, so that this one would wait."""
    made: list[PendingUpdates] = []
    thread = threading.Thread(target=lambda: made.append(PendingUpdates(compute)))
    thread.start()
    thread.join(PATIENCE_S)
    return made[0]


def test_many_updates_are_deferred_each_for_itself() -> None:
    """One of them can be seen; it is computed at once and the others are not."""
    pairs = [zeros() for _ in range(3)]
    held = pairs[1][1].view(-1)
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,)) for master, moment in pairs])
    assert [master in pending for master, _ in pairs] == [True, False, True]
    assert held.tolist() == [1.0] * 6
    pending.compute_all()
    assert [float(master.detach().sum()) for master, _ in pairs] == [6.0, 6.0, 6.0]


def test_one_master_twice_in_a_step_is_updated_twice() -> None:
    master, moment = zeros()
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))] * 2)
    pending.compute_all()
    assert float(moment.sum()) == float(master.detach().sum()) == 12.0


def test_an_update_that_fails_keeps_nobody_waiting() -> None:
    def fail(updates: Sequence[UpdateInto]) -> None:
        raise MemoryError("no room")

    master, moment = zeros()
    pending = PendingUpdates(fail)
    pending.add([AddOne(master, (moment,))])
    with pytest.raises(MemoryError, match="no room"):
        float(master.sum())
    assert (type(master), type(moment)) == (Master, Tensor)


def test_state_of_a_class_of_its_own_is_updated_at_once() -> None:
    class Quantized(Tensor):
        pass

    master, moment = Master(torch.zeros(3)), torch.zeros(3).as_subclass(Quantized)
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    assert master not in pending
    assert torch.equal(moment.as_subclass(Tensor), torch.ones(3))


class There:
    """A device state that notes what is done there, and whether that is part of the work."""

    def __init__(self) -> None:
        self.is_at_work = False
        self.seen: list[str] = []
        self.lock = threading.RLock()

    def adopt(self, holds: Sequence[Hold]) -> None:
        self.seen.append("adopted")
        for hold in holds:
            hold.device_state, hold.there = self, hold.tensors  # type: ignore[assignment]

    @contextmanager
    def work(self) -> Iterator[None]:
        self.is_at_work = True
        yield
        self.is_at_work = False


def test_gradients_are_brought_to_a_device_as_part_of_the_work_there() -> None:
    """Their memory may be used again as soon as they are dropped, so it must belong to the lane
    that reads them."""
    master, moment = zeros()
    there: Any = There()

    class Moving(AddOne):
        def moved(self, weight: Tensor, moments: tuple[Tensor, ...]) -> AddOne:
            there.seen.append("moved at work" if there.is_at_work else "moved")
            return AddOne(weight, moments)

    pending = PendingUpdates(add_one)
    pending.add([Moving(master, (moment,))])
    pending.compute([(master, None)], there)
    assert there.seen == ["adopted", "moved at work"]
    assert isinstance(master, Held)


def test_all_tensors_of_a_master_change_hands_at_once() -> None:
    """When their update is computed on a device. Else whoever touches one of them meanwhile would
    fetch all, and find some held by the update still."""
    master, moment = zeros()
    there: Any = There()
    pending = PendingUpdates(add_one)
    pending.add([AddOne(master, (moment,))])
    before = holder_of(master)
    pending.compute([(master, None)], there)
    assert before is holder_of(master) is holder_of(moment)
    assert isinstance(before, Hold)
    assert before.decided is None
    assert before.decide_again(AddOne(master, (moment,)), pending)
    assert before is holder_of(master) is holder_of(moment)
    assert before.decided is pending
