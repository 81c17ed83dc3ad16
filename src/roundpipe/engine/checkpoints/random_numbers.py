"""The state of all generators that a run draws from."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ...device.generators import state_of
from ..base import Engine


def random_state(model: Engine) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors, and what is none."""
    tensors = {"rng/cpu": state_of(torch.default_generator)}
    for place, device in enumerate(
        device for device in model.devices if not device.shares_generator()
    ):
        tensors[f"rng/device{place}"] = device.rng_state()
    others: dict[str, Any] = {"python": random.getstate()}
    if "numpy" in sys.modules:
        kind, words, *position = sys.modules["numpy"].random.get_state()
        others["numpy"] = (kind, words.tolist(), *position)
    return tensors, others


def set_random_state(
    model: Engine, tensors: Mapping[str, torch.Tensor], others: Mapping[str, Any]
) -> None:
    """Sets generators as far as there are as many devices now as there were."""
    torch.set_rng_state(tensors["rng/cpu"].clone())
    for place, device in enumerate(
        device for device in model.devices if not device.shares_generator()
    ):
        if f"rng/device{place}" in tensors:
            device.set_rng_state(tensors[f"rng/device{place}"].clone())
    random.setstate(others["python"])
    if "numpy" in others and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(others["numpy"])
