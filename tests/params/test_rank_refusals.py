"""A rank that cannot do something outside of a step keeps the others from waiting for it."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import roundpipe
from roundpipe.errors import ConfigError, RankError
from tests.support.branching import make_branches
from tests.support.models import make_mlp, mlp_batch
from tests.support.processes import check_in_processes, threads_of_gloo


def test_two_processes(tmp_path: Path) -> None:
    check_in_processes(refuses_alone, tmp_path)


def refuses_alone() -> None:
    """No exception ends a process here, as none does in a notebook: the others have to hear of it
    while this one lives. Afterwards both make another engine."""
    dist.init_process_group("gloo")
    one_cannot_make(sequence, RankError, "rank 1 raised ConfigError making the engine")
    one_cannot_make(in_parts, ConfigError, "choosing devices: rank 1 raised ConfigError")
    all_cut_alike()
    one_has_another_model()
    one_trains_other_weights()
    one_cannot_load()
    one_has_failed_before_both_save()
    one_is_elsewhere()
    one_raises_what_others_could_have_said()
    one_fails_anywhere()
    nobody_talks_in_a_closed_engine()


def sequence(**how: Any) -> Any:
    return roundpipe.RoundPipe(make_mlp(), process_group=dist.group.WORLD, **how)


def in_parts(**how: Any) -> Any:
    return roundpipe.wrap_model_to_roundpipe(
        make_branches(), lower_threshold=1024, process_group=dist.group.WORLD, **how
    )


def one_cannot_make(make: Callable[..., Any], kind: type[Exception], said: str) -> None:
    before = threading.active_count()
    is_bad = dist.get_rank() == 1
    devices: Any = [torch.device("cuda", 99)] if is_bad else 1
    with pytest.raises(ConfigError if is_bad else kind, match="" if is_bad else said):
        make(devices=devices)
    assert threading.active_count() == before
    make(devices=1).close()


def all_cut_alike() -> None:
    """Parts depend on how many devices there are, and ranks may have different numbers of them:
    they would send each other other layers."""
    engine = in_parts(devices=1 + 4 * dist.get_rank())
    counts = [0, 0]
    dist.all_gather_object(counts, engine.num_layers)
    assert counts[0] == counts[1]
    engine.close()


def one_has_another_model() -> None:
    """A frozen layer, for whose messages gloo ended a process; a wider one, of which a rank was
    given a part; one more that nobody trains; the same ones in other layers."""
    rank, before = dist.get_rank(), (threading.active_count(), len(threads_of_gloo()))
    frozen, wider = make_mlp(), torch.nn.Sequential(torch.nn.Linear(4, 4 + 4 * rank))
    frozen[0].requires_grad_(rank == 0)
    more, nested = make_mlp(), make_mlp()
    more.extend([torch.nn.Linear(16, 16).requires_grad_(False)] * rank)
    if rank:
        nested = torch.nn.Sequential(nested[:3], *nested[3:])
    for model in (frozen, wider, more, nested):
        with pytest.raises(RankError, match="rank 1 talks of .* weights .*, and rank 0 of"):
            roundpipe.RoundPipe(model, devices=1, process_group=dist.group.WORLD)
        gc.collect()
        assert (threading.active_count(), len(threads_of_gloo())) == before


def one_trains_other_weights() -> None:
    """It has frozen one since, and has no master of it, by which the others send weights: gloo
    ended a process."""
    engine = sequence(devices=1)
    engine.model[0].bias.requires_grad_(dist.get_rank() == 1)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    said = "rank 1 talks in step 1 with 8 masters .*, and rank 0 in step 1 with 7 masters"
    with pytest.raises(RankError, match=said):
        engine.step(optimizer.step, is_async=False)
    engine.close()


def one_cannot_load() -> None:
    """Before anything is changed; and once something is, as on a broken disk."""
    engine = roundpipe.RoundPipe(make_mlp(), devices=1, process_group=dist.group.WORLD)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    roundpipe.save_checkpoint("state", engine, optimizer)
    dist.barrier()
    rank, path = dist.get_rank(), f"state{'-elsewhere' * dist.get_rank()}"
    refused, said = (FileNotFoundError, "") if rank else (ConfigError, "rank 1 raised FileNotFound")
    with pytest.raises(refused, match=said):
        roundpipe.load_checkpoint(path, engine, optimizer)
    roundpipe.load_checkpoint("state", engine, optimizer)
    engine.forward_backward(mlp_batch(2).args, loss_fn=lambda out, _: out.sum())
    engine.step(optimizer.step, is_async=False)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk")

    if rank == 1:
        engine.load_state_dict = fail  # type: ignore[method-assign]
    broken, said = (OSError, "disk") if rank else (RankError, "rank 1 raised OSError loading")
    with pytest.raises(broken, match=said):
        roundpipe.load_checkpoint("state", engine, optimizer)
    with pytest.raises(RankError, match="last checkpoint"):
        engine.step(optimizer.step, is_async=False)
    engine.close()


def one_has_failed_before_both_save() -> None:
    """Its backward has, behind its back: it raises that, and the other one waited for it. Both may
    go on, as nothing has begun."""
    engine = sequence(devices=1)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    if dist.get_rank() == 1:
        engine._steps._late.keep(MemoryError("none left"))
    kind, said = (MemoryError, "") if dist.get_rank() else (ConfigError, "rank 1 raised MemoryErr")
    with pytest.raises(kind, match=said):
        roundpipe.save_checkpoint("after-all", engine, optimizer)
    dist.barrier()  # which the other one has come to, though this one had not gone on
    roundpipe.save_checkpoint("after-all", engine, optimizer)
    engine.close()


def one_is_elsewhere() -> None:
    """Saves or loads where the other one steps, or has said that it is going to: messages of one
    length meet those of another, for which gloo ends a process or waits."""

    def call(what: str) -> None:
        if what == "step":
            engine.step(optimizer.step, is_async=False)
        elif what == "load":
            roundpipe.load_checkpoint("state", engine, optimizer)
        else:
            roundpipe.save_checkpoint("another", engine, optimizer, sharded=what == "shards")

    for calls in (("save", "step"), ("step", "load"), ("save", "load"), ("shards", "save")):
        engine = sequence(devices=1)
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        with pytest.raises(RankError, match="rank 1 talks .*, and rank 0 .*call the same"):
            call(calls[dist.get_rank()])
        engine.close()
    for early in range(2):
        engine = sequence(devices=1)
        optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
        engine.forward_backward(
            mlp_batch(2).args,
            loss_fn=lambda out, _: out.sum(),
            is_last=dist.get_rank() == early,
        )
        with pytest.raises(RankError, match="saving a checkpoint.*call the same"):
            call("save")
        engine.close()
    assert not Path("another").exists()


def one_raises_what_others_could_have_said() -> None:
    """The error of another group, or one whose text is no Unicode, as names of files may be."""
    for mine in (RankError("of another engine"), OSError("no \udcff")):
        engine = sequence(devices=1)

        def step_fn(mine: Exception = mine) -> None:
            if dist.get_rank() == 1:
                raise mine

        kind, said = (type(mine), "") if dist.get_rank() else (RankError, "rank 1 raised .*Error")
        with pytest.raises(kind, match=said):
            engine.step(step_fn, is_async=False)
        dist.barrier()
        engine.close()


def one_fails_anywhere() -> None:
    """It cannot tell where messages go from one to another. It lives on, and keeps its engine: the
    others waited for the group's timeout."""
    from roundpipe.engine import checkpoint
    from roundpipe.params import masters, rank_sums, rank_talk, ranks, window
    from roundpipe.step import write_back

    places: list[tuple[Any, str, bool]] = [
        (window.Offloaded, "total", False),
        (rank_sums.RankSums, "_of_layer", False),
        (rank_sums.RankSums, "_somewhere", True),
        (window.GradientWindow, "release_layers", True),
        (masters.Masters, "outline", False),
        (masters.Masters, "mark_ahead", True),
        (write_back.WriteBack, "_write_here", False),
        (write_back.WriteBack, "_write_here", True),
        (rank_talk, "decoded", False),
        (ranks.pickle, "dumps", False),
        (checkpoint, "random_state", False),
        (checkpoint, "writable", True),
    ]
    for owner, name, is_async in places:
        engine = sequence(devices=1)
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(owner, name, fail)
            with pytest.raises(MemoryError if dist.get_rank() else (RankError, ConfigError)):
                step_and_save(engine, f"of-{name}", is_async=is_async)
        dist.barrier()
        assert not Path(f"of-{name}").exists()
        engine.close()


def step_and_save(engine: roundpipe.RoundPipe, path: str, *, is_async: bool) -> None:
    optimizer = roundpipe.optim.SGD(engine.optim_parameters(), lr=0.1)
    engine.forward_backward(mlp_batch(2).args, loss_fn=lambda out, _: out.sum())
    engine.step(optimizer.step, is_async)
    roundpipe.save_checkpoint(path, engine, optimizer, sharded=is_async)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("none left")


def nobody_talks_in_a_closed_engine() -> None:
    """The program's own group would have been taken for the engine's."""
    engine = sequence(devices=1)
    engine.close()
    with pytest.raises(RankError, match="its engine was closed"):
        engine.ranks.meet("nowhere")
