"""What an engine and its optimizer hold in host memory."""

from ..memory.ring import NUM_SLICES, SLICE_BYTES
from ..params.working import ParameterStore
from ..quantized import stored_bytes
from ..step.state_pages import AHEAD_BYTES, BEHIND_BYTES
from ..system.host_memory import SPARED_BYTES
from .planned import PlannedStep
from .ways import OPTIMIZERS


def host_bytes(step: PlannedStep, free_bytes: float) -> dict[str, int]:
    """Bytes by what they are for, beside what Python and its libraries take.

    ``weights``: working copies, without those that stay in their files; ``gradients``: one set as
    offloaded, up to two where steps are asynchronous; ``second_buffer``: where updates may write
    beside calls, and there is room; ``staging``: slices that pageable memory passes through;
    ``state_pages``: what an update needs in memory of state on a disk; ``moving``: what wrapping
    needs beyond all these, because a layer's weights are there twice while they move into
    page-locked memory.

    Args:
        free_bytes: of the machine, for all of it.
    """
    store, choice = step.store, step.choice
    trained = [p for p in store.parameters if p.requires_grad]
    stays = choice.pin_model != "off"
    weights = sum(stored_bytes(p) for p in store.parameters if stays or p.requires_grad)
    elements = sum(p.numel() for p in trained)
    offloading = [
        use
        for layer in store.layers
        if layer.layer not in step.on_device
        for use in layer.trainable
    ]
    gradients = sum(
        use.parameter.numel() * step.rules.dtypes(use.parameter).offloaded.itemsize
        for use in offloading
    )
    masters, moments = optimizer_bytes(step)
    on_disk = masters + moments if choice.optimizer_state_dir is not None else 0
    largest = max((p.numel() for p in trained), default=0) * on_disk // max(elements, 1)
    if on_disk:
        masters = moments = 0
    made = {
        "weights": weights,
        "masters": masters,
        "moments": moments,
        "state_pages": min(on_disk, AHEAD_BYTES + BEHIND_BYTES + 3 * largest),
        "gradients": int(gradients * step.gradient_sets(moments)),
        "spilled": step.spilled_bytes(),
        "staging": _staging_bytes(step, store),
    }
    second = _second_buffer_bytes(step) if choice.is_async else 0
    has_room = sum(made.values()) + 2 * second + SPARED_BYTES < free_bytes
    made["second_buffer"] = second if has_room else 0
    # The first call's plan was made from guesses. Before a synchronous update makes moments, and what
    # comes after them, what waited on the host then is gone; an asynchronous one begins before.
    later = 0 if choice.is_async else made["moments"] + made["gradients"] - gradients
    made["spilled"] = max(made["spilled"], step.spilled_bytes(step.first) - later)
    if choice.pin_model == "alloc" and step.kind != "cpu":
        made["moving"] = max(0, weights + _most_moved_bytes(store) - sum(made.values()))
    return made


def optimizer_bytes(step: PlannedStep) -> tuple[int, int]:
    """Counts the bytes of masters, and those of moments."""
    trained = [p for p in step.store.parameters if p.requires_grad]
    moment_bytes = OPTIMIZERS[step.choice.optimizer].moment_bytes
    return (
        sum(p.numel() * step.rules.master(p).itemsize for p in trained),
        int(sum(p.numel() for p in trained) * moment_bytes),
    )


def _staging_bytes(step: PlannedStep, store: ParameterStore) -> int:
    rings = step.machine.gpus if step.choice.pin_model == "off" else 0
    largest = max(layer.image_bytes for layer in store.layers)
    slices = rings * min(SLICE_BYTES, largest)
    if step.on_device:
        most = max(4 * layer.num_elements for layer in store.layers)
        slices += min(SLICE_BYTES, most)
    return NUM_SLICES * slices


def _most_moved_bytes(store: ParameterStore) -> int:
    """Counts the weights of the largest layer, a tied one with the first that uses it."""
    return max(
        sum(
            stored_bytes(use.parameter)
            for use in layer.uses
            if store.uses[id(use.parameter)][0].layer == layer.layer
        )
        for layer in store.layers
    )


def _second_buffer_bytes(step: PlannedStep) -> int:
    store = step.store
    store.device_states.update(dict.fromkeys(step.on_device, None))  # type: ignore[arg-type]
    try:
        return store.second_buffer_bytes()
    finally:
        store.device_states.clear()


def frozen_bytes(step: PlannedStep) -> int:
    """Counts frozen weights as they lie in files, tied ones once."""
    frozen = {
        id(use.parameter): use.image_bytes
        for layer in step.store.layers
        for use in layer.uses
        if not use.parameter.requires_grad
    }
    return sum(frozen.values())
