"""Several processes train one model as a single one trains it on the joined batch.

Each check runs in all processes, joined by gloo; the oracle is an engine of one process alone, over
the same rows.
"""

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import roundpipe
from roundpipe.errors import ConfigError, RankError
from tests.support.branching import make_branches
from tests.support.models import LORA_LLAMA, MLP, TIED_LLAMA, Batch, ModelCase, make_mlp, mlp_batch
from tests.support.processes import check_in_processes, run_in_processes

ROWS, STEPS = 7, 4
Optimizer = Callable[..., torch.optim.Optimizer]


def test_two_processes(tmp_path: Path) -> None:
    """All in the same two, because starting them is what takes time. Each engine has a group of its
    own, so that one that has failed is nothing to the next."""
    check_in_processes(all_as_one, tmp_path)


def all_as_one() -> None:
    dist.init_process_group("gloo")
    trains_as_one(
        (MLP, torch.optim.AdamW, False, 1),
        (MLP, roundpipe.optim.AdamW, False, 3),
        (MLP, roundpipe.optim.AdamW, True, 1),
    )
    assert_state_is_shared_out()
    saves_as_one()
    skips_as_one()
    one_raises(is_async=False)
    one_raises(is_async=True)
    one_fails_to_update(is_async=False)
    one_fails_to_update(is_async=True)
    one_clips_twice()
    what_is_not_summed_is_not_clipped()
    one_ends_while_the_other_saves()
    an_engine_outlives_its_group()


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_larger_models(count: int, tmp_path: Path) -> None:
    check_in_processes(larger_as_one, tmp_path, count)


def larger_as_one() -> None:
    """LoRA, tied weights, and an optimizer that looks at a weight as a whole."""
    dist.init_process_group("gloo")
    trains_as_one(
        (MLP, torch.optim.AdamW, True, 3),
        (LORA_LLAMA, roundpipe.optim.AdamW, True, 1),
        (TIED_LLAMA, torch.optim.Adafactor, False, 1),
    )
    assert_state_is_shared_out()
    in_parts_as_one(is_async=False)
    in_parts_as_one(is_async=True)


def in_parts_as_one(*, is_async: bool) -> None:
    """A model that is no sequence, one of whose weights is used by two parts and by its own code;
    some are on the host only."""
    models = make_branches(), others_changed(make_branches())
    for model, group in zip(models, (None, dist.group.WORLD), strict=True):
        with roundpipe.wrap_model_to_roundpipe(
            model, lower_threshold=1024, devices=2, process_group=group
        ) as engine:
            assert isinstance(engine, roundpipe.AutoRoundPipe)
            optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=1e-3)
            for number in range(STEPS):
                batch = mlp_batch(ROWS, number)
                for rows in shares(ROWS, number, is_alone=group is None, each=False):
                    args, _, label = cut(batch, rows)
                    batch.loss_fn(engine(*args), label).backward()
                engine.step(optimizer.step, is_async)
    alone, together = (dict(model.named_parameters()) for model in models)
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    assert_equal_on_all(together.values())


def trains_as_one(*grid: tuple[ModelCase, Optimizer, bool, int]) -> None:
    """Sync and async; rows that differ in number, steps to which only the first process has any,
    accumulation and clipping; the others begin with other weights."""
    for case, optimizer, is_async, devices in grid:
        settings: Any = {"devices": devices, "is_async": is_async}
        batches = [case.batch(ROWS, seed) for seed in range(STEPS)]
        alone = trained(case.make(), batches, optimizer, None, **settings)
        model = others_changed(case.make())
        together = trained(model, batches, optimizer, dist.group.WORLD, **settings)
        torch.testing.assert_close(together.weights, alone.weights, atol=1e-6, rtol=0)
        torch.testing.assert_close(together.norms, alone.norms, atol=1e-6, rtol=1e-6)
        assert_equal_on_all(together.weights.values())


def assert_state_is_shared_out() -> None:
    """Masters and moments by bytes: 12 for an element that this rank owns, and that of a bf16
    weight for one that another owns."""
    model = make_mlp().bfloat16()
    sizes = [parameter.numel() for parameter in model.parameters()]
    with roundpipe.RoundPipe(
        model, torch.float32, devices=1, process_group=dist.group.WORLD
    ) as engine:
        optimizer = roundpipe.optim.AdamW(engine.optim_parameters())
        x = torch.ones(2, 16, dtype=torch.bfloat16)
        engine.forward_backward((x,), loss_fn=lambda out, _: out.float().sum())
        engine.step(optimizer.step, is_async=False)
        engine.synchronize()
        owned = sum(one.numel() for one in engine.optim_parameters() if one.is_owned)  # type: ignore[attr-defined]
        moments = sum(
            value.nbytes for s in optimizer.state.values() for value in s.values() if value.ndim
        )
        masters = engine.statistics()["master_bytes"]
    assert (masters, moments) == (4 * owned + 2 * (sum(sizes) - owned), 8 * owned)
    ranks = dist.get_world_size()
    assert owned <= sum(sizes) / ranks + max(sizes)
    total = torch.tensor([owned])
    dist.all_reduce(total)
    assert total.item() == sum(sizes)


def saves_as_one() -> None:
    """What two processes write has what a single one writes, and either goes on from the other's:
    bf16 weights with masters, which are coarser than what is compared."""
    batches = [in_bf16(mlp_batch(8, seed)) for seed in range(STEPS)]
    for group, name in ((dist.group.WORLD, "together"), (None, f"alone-{dist.get_rank()}")):
        model = make_mlp().bfloat16()
        trained(model, batches[:2], roundpipe.optim.AdamW, group, path=name, one_row=True)
    dist.barrier()
    from safetensors.torch import load_file

    files = [load_file(name) for name in ("together", "alone-0")]
    for file in files:
        file.pop("rest")
        file.pop("rng/cpu")
    assert files[0].keys() == files[1].keys()
    torch.testing.assert_close(*files, atol=1e-6, rtol=1e-5)
    went_on = [
        trained(
            make_mlp().bfloat16(),
            batches[2:],
            roundpipe.optim.AdamW,
            group,
            source=name,
            one_row=True,
        )
        for group, name in ((dist.group.WORLD, "alone-0"), (None, "together"))
    ]
    torch.testing.assert_close(went_on[0].weights, went_on[1].weights, atol=1e-2, rtol=0)
    own = {name: went_on[1].masters[name] for name in went_on[0].masters}
    torch.testing.assert_close(went_on[0].masters, own, atol=1e-6, rtol=1e-5)


def skips_as_one() -> None:
    """An inf in one process's gradients alone makes all skip the step and lower the scale; the next
    one is taken by all. torch's own clipping, which would see a part of the gradients, is
    refused, and then nobody goes on."""
    model, scaler = make_mlp(), roundpipe.GradScaler(init_scale=4.0, growth_interval=100)
    first = model[0].weight.detach().clone()
    engine = roundpipe.RoundPipe(model, devices=1, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)

    def step_fn() -> None:
        scaler.unscale_(optimizer)
        roundpipe.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()

    for is_last in (False, True):
        # The second process has no losses in the last step, and yet the scale.
        if not is_last or dist.get_rank() == 0:
            factor = torch.inf if dist.get_rank() else 1.0
            engine.forward_backward(
                mlp_batch(2).args, loss_fn=lambda out, _, by=factor: scaler.scale(out.sum() * by)
            )
        engine.step(step_fn, is_async=False)
        scaler.update()
        engine.synchronize()
        assert scaler.get_scale() == 2.0
        assert bool((model[0].weight != first).any()) == is_last
        assert_equal_on_all(model.parameters())

    def clips_by_torch() -> None:
        nn.utils.clip_grad_norm_(engine.optim_parameters(), 1.0)

    with pytest.raises(ConfigError, match=r"roundpipe\.clip_grad_norm_"):
        engine.step(clips_by_torch, is_async=False)
    with pytest.raises(RankError, match=r"raised ConfigError.*last checkpoint"):
        engine.step(step_fn, is_async=False)
    engine.close()


def one_raises(*, is_async: bool) -> None:
    """The others name it."""
    model = make_mlp()
    engine = roundpipe.RoundPipe(model, devices=1, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)

    def step_fn() -> None:
        if dist.get_rank() == 1:
            raise KeyError("mine")
        roundpipe.clip_grad_norm_(optimizer, 1.0)  # in which the other hears of it

    kind, said = (KeyError, "mine") if dist.get_rank() else (RankError, "rank 1 raised KeyError")

    def step() -> None:
        engine.step(step_fn, is_async=is_async)
        engine.synchronize()

    with pytest.raises(kind, match=said):
        step()
    engine.close()


def one_fails_to_update(*, is_async: bool) -> None:
    """A rank that ran out of memory in its update, and went on, said where it was to another one
    that waited for weights, and took it for them."""
    model = make_mlp()
    engine = roundpipe.RoundPipe(model, devices=1, process_group=dist.group.WORLD)
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)

    def fail(masters: Any) -> None:
        raise MemoryError("none left")

    if dist.get_rank() == 1:
        engine.ranks.spread = fail  # type: ignore[method-assign]
    kind, said = (MemoryError, "none left") if dist.get_rank() else (RankError, "lost rank 1")

    def step() -> None:
        engine.step(optimizer.step, is_async=is_async)
        engine.synchronize()

    with pytest.raises(kind, match=said):
        step()
    again = "raised MemoryError" if dist.get_rank() else said
    with pytest.raises(RankError, match=rf"{again}.*last checkpoint"):
        engine.step(optimizer.step, is_async=False)
    engine.close()


def one_clips_twice() -> None:
    """Only the first rank measures the norm to print it: the other one would answer the second
    time with what is no norm."""
    engine = roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)

    def step_fn() -> None:
        if dist.get_rank() == 0:
            roundpipe.clip_grad_norm_(optimizer, torch.inf)
        roundpipe.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()

    with pytest.raises(RankError, match=r"rank 1 talks in step 1 .*, and rank 0 in step_fn"):
        engine.step(step_fn, is_async=False)
    engine.close()


def what_is_not_summed_is_not_clipped() -> None:
    """The gradient of a parameter that is not the engine's is another one on each rank, so ranks
    would clip by different norms."""
    engine = roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD)
    own = nn.Parameter(torch.ones(3))
    own.grad = torch.full((3,), float(dist.get_rank()))
    optimizer = torch.optim.SGD([*engine.optim_parameters(), own], lr=0.1)
    with pytest.raises(ConfigError, match=r"shape \(3,\) that is not the engine's"):
        engine.step(lambda: roundpipe.clip_grad_norm_(optimizer, 1.0), is_async=False)
    engine.close()


def one_ends_while_the_other_saves() -> None:
    """It is named there, too."""
    engine = roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    if dist.get_rank() == 0:
        with pytest.raises(RankError, match="lost rank 1"):
            roundpipe.save_checkpoint("not-whole", engine, optimizer)
    engine.close()
    assert not os.path.exists("not-whole")


def an_engine_outlives_its_group() -> None:
    """A program that ends all groups, and begins others, may close its engine afterwards."""
    engine = roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = f"file://{Path('again').resolve()}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    engine.close()


@pytest.mark.slow
def test_a_killed_rank_is_named_and_leaves_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    """The others end by themselves, long before the group's timeout."""
    ended = run_in_processes(one_is_killed, tmp_path, 3)
    assert [code for code, _ in ended] == [1, 1, -signal.SIGKILL], "\n".join(t for _, t in ended)
    assert "lost rank 2" in ended[0][1]
    assert "RankError" in ended[1][1]
    assert os.listdir(tmp_path) == ["step-1"]


def one_is_killed() -> None:
    dist.init_process_group("gloo")
    engine = roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD)
    optimizer = roundpipe.optim.AdamW(engine.optim_parameters())
    for step in range(1, 4):
        engine.forward_backward(mlp_batch(2).args, loss_fn=lambda out, _: out.sum())
        engine.step(optimizer.step)
        if (step, dist.get_rank()) == (2, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        roundpipe.save_checkpoint(f"step-{step}", engine, optimizer)


def test_what_cannot_be_is_refused() -> None:
    for group in (object(), "gloo", 2):
        with pytest.raises(ConfigError, match=r"process_group is .*init_process_group"):
            roundpipe.RoundPipe(make_mlp(), devices=1, process_group=group)
    with pytest.raises(ConfigError, match="process_group with optimizer_state_dir='here'"):
        roundpipe.RoundPipe(
            make_mlp(), devices=1, process_group=object(), optimizer_state_dir="here"
        )


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    masters: dict[str, Tensor]  # those that this rank owns
    norms: list[float]


def trained(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer_class: Optimizer,
    group: Any,
    *,
    devices: int = 1,
    is_async: bool = False,
    path: str | None = None,
    source: str | None = None,
    one_row: bool = False,
) -> Trained:
    """By a batch's rows: with a ``group`` those of this process, in two calls. ``one_row``: each a
    microbatch, so that gradients are rounded alike however many processes there are."""
    engine = roundpipe.wrap_model_to_roundpipe(
        model, optim_dtype=torch.float32, devices=devices, process_group=group
    )
    with engine:
        optimizer = optimizer_class(engine.optim_parameters(), lr=1e-2)
        if source is not None:
            roundpipe.load_checkpoint(source, engine, optimizer)

        def step_fn() -> Tensor:
            norm = roundpipe.clip_grad_norm_(engine, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        handles = []
        for number, batch in enumerate(batches):
            for rows in shares(len(batch.label), number, is_alone=group is None, each=one_row):
                args, kwargs, label = cut(batch, rows)
                engine.forward_backward(args, kwargs, label=label, loss_fn=batch.loss_fn)
            handles.append(engine.step(step_fn, is_async))
        norms = [float(handle.result()) for handle in handles]
        if path is not None:
            roundpipe.save_checkpoint(path, engine, optimizer)
        engine.synchronize()
        masters = {
            name: master.detach().clone()
            for name, master in engine.optim_named_parameters()
            if getattr(master, "is_owned", True)
        }
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return Trained(weights, masters, norms)


def shares(count: int, number: int, *, is_alone: bool, each: bool) -> list[slice]:
    """The rows of each call of this process. Now and then the first one has them all."""
    rank, ranks = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    if number % 2 and not each:
        begin, end = (0, count) if rank == 0 else (0, 0)
    else:
        begin, end = count * rank // ranks, count * (rank + 1) // ranks
    if each:
        return [slice(row, row + 1) for row in range(begin, end)]
    calls = (slice(begin, (begin + end) // 2), slice((begin + end) // 2, end))
    return [rows for rows in calls if rows.start < rows.stop]


def cut(batch: Batch, rows: slice) -> tuple[Any, Any, Tensor]:
    kwargs = {name: value[rows] for name, value in batch.kwargs.items()}
    return tuple(value[rows] for value in batch.args), kwargs, batch.label[rows]


def in_bf16(batch: Batch) -> Batch:
    return batch._replace(args=tuple(value.bfloat16() for value in batch.args))


def others_changed(model: nn.Module) -> nn.Module:
    if dist.get_rank():
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5 if parameter.requires_grad else 1.0)
    return model


def assert_equal_on_all(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        torch.testing.assert_close(tensor.detach(), first, atol=0, rtol=0)
