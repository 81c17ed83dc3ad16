"""The modules that stage runs of one device compute with: made, or left by the stage run before.
Sends nothing anywhere."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from ..device import Device
from ..layers.buffers import BufferCache
from ..layers.compiler import BlockCompiler
from ..layers.parameters import ReplicaParameters
from ..layers.replica import Replica
from ..layers.snapshot import LayerWatch, Writers
from ..params.dtypes import GradientRules
from ..plan.actions import Pass
from ..recompute.row_wise import RowCuts
from .stage import Stage


class _Left(NamedTuple):
    """What a stage run has left to the next one of its layer."""

    replica: Replica
    watch: LayerWatch | None


class ReplicaCache:
    """See [Note: replicas used again]. Used by the device's worker.

    Args:
        stays: tells whether a layer's weights stay in a slot, so that its residents can be used
            again too.
    """

    def __init__(
        self,
        device: Device,
        layers: Sequence[nn.Module],
        rules: GradientRules,
        compiler: BlockCompiler,
        buffers: BufferCache,
        writers: Writers,
        stays: Callable[[int, torch.Tensor], bool],
    ) -> None:
        self._device = device
        self._layers = layers
        self._rules = rules
        self._compiler = compiler
        self._writers = writers
        self._stays = stays
        self.buffers = buffers
        self._cuts = RowCuts()
        # By layer, and the tokens that its row-wise modules run for.
        self._left: dict[tuple[int, int], _Left] = {}
        # By layer and address of its weights, of which there may be two in turn.
        self._residents: dict[tuple[int, int], ReplicaParameters] = {}
        # Layers, and whether they train, of which a forward was seen.
        self._seen: set[tuple[int, bool]] = set()

    def begin_call(self) -> None:
        """Slots of some layers may have gone."""
        self._residents = {
            key: residents
            for key, residents in self._residents.items()
            if self._stays(key[0], residents.slot)
        }

    def module(self, stage: Stage, index: int) -> nn.Module:
        """The layer's replica, made when it is first asked for. To be called on the compute
        lane."""
        if index not in stage.replicas:
            self._open(stage, index)
        return stage.replicas[index].module

    def _open(self, stage: Stage, index: int) -> None:
        layer, slot, sent, _ = stage.uploaded[index]
        sent.arrive(self._device.compute)
        _, *trains = stage.layer_modes[index]
        residents = self._residents.pop((index, slot.buffer.data_ptr()), None)
        if residents is None or not residents.fit(slot.buffer, trains):
            residents = ReplicaParameters(layer, slot.buffer, trains, self._rules)
        if stage.stage_run.pass_ is not Pass.FORWARD or stage.keeps_graphs:
            residents.accumulator.attach(residents.parameters)
        mode = index, stage.layer_modes[index][0]
        if stage.stage_run.pass_ is not Pass.BACKWARD and mode not in self._seen:
            self._seen.add(mode)
            residents.look()
        stage.open(index, residents, self._replica(stage, index, residents))

    def _replica(self, stage: Stage, index: int, residents: ReplicaParameters) -> Replica:
        left = self._left.pop((index, stage.tokens_at_once), None)
        if left is not None and left.replica.fits(stage.modes):
            left.replica.fill(residents.parameters, self.buffers.place)
            if left.watch is not None:
                stage.watches[index] = left.watch
            return left.replica
        if left is not None:
            self._compiler.let_go(left.replica.module)
        finish = partial(self._finish, stage)
        return Replica(
            self._layers[index], residents.parameters, self.buffers.place, stage.modes, finish
        )

    def _finish(self, stage: Stage, replica: nn.Module) -> None:
        """A replica's modules are made."""
        self._compiler.apply(replica, self._device, stage.modes)
        if stage.tokens_at_once:
            compiled = self._compiler.part_of(replica, self._device)
            self._cuts.apply(replica, stage.tokens_at_once, compiled)

    def watch(self, stage: Stage, index: int) -> LayerWatch:
        """Knows what the layer's modules are like, and can make them so again. To be used on the
        compute lane."""
        if index not in stage.watches:
            pairs = stage.replicas[index].pairs
            stage.watches[index] = LayerWatch(
                pairs, self._device, self.buffers, self._writers, stage.modes
            )
        return stage.watches[index]

    def release(self, stage: Stage) -> None:
        """A stage run is over. To be called before its slots are released."""
        for watch in stage.watches.values():
            watch.give_back()
        for index, replica in stage.replicas.items():
            # A backward may set something too, by hooks on tensors or because it runs a part of the
            # layer again.
            if (
                index in stage.untouched and stage.stage_run.pass_ is Pass.FORWARD
            ) or replica.is_as_made:
                self._leave(stage, index, replica)
            else:
                self._compiler.let_go(replica.module)
        for index, residents in stage.residents.items():
            residents.accumulator.let_go()
            if self._stays(index, residents.slot):
                self._residents[index, residents.slot.data_ptr()] = residents
        stage.replicas.clear()
        stage.watches.clear()
        stage.residents.clear()

    def _leave(self, stage: Stage, index: int, replica: Replica) -> None:
        """To the next stage run of the layer, unless another one that was under way has left its
        own already."""
        replica.empty()
        key = index, stage.tokens_at_once
        if key in self._left:
            self._compiler.let_go(replica.module)
        else:
            watch = stage.watches.get(index)
            is_light = watch is not None and not (replica.with_buffers or watch.keeps_tensors)
            self._left[key] = _Left(replica, watch if is_light else None)

    def forget(self) -> None:
        """After a failure nothing is taken for granted. No stage run may be under way.

        Also buffers may have been written without a trace; that is only looked for at the end of a
        stage run.
        """
        self.buffers.clear()
        self._residents.clear()
        for left in self._left.values():
            self._compiler.let_go(left.replica.module)
        self._left.clear()
