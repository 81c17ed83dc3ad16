"""Renamed things of transformers are called by no name of old: a person who installs the latest
release sees none of its warnings."""

from typing import Any

import pytest
from torch import nn

from roundpipe.engine.generation import is_checkpointing
from roundpipe.presets import preset
from roundpipe.presets.architectures import decoders
from roundpipe_hf.compat import disable_checkpointing
from tests.support.device_sets import ONE
from tests.support.engines import Engines
from tests.support.models import make_llama
from tests.support.preset_models import tokens


class Later(nn.Module):
    """In later releases the old names warn; here that has no effect."""

    gradient_checkpointing = True

    @property
    def is_gradient_checkpointing(self) -> bool:
        raise AssertionError("asked by its old name")

    def gradient_checkpointing_disable(self) -> None:
        raise AssertionError("called by its old name")

    def activation_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False


def test_checkpointing_is_asked_for_and_ended_by_no_old_name() -> None:
    model = Later()
    assert is_checkpointing(nn.Sequential(nn.Identity(), model))
    disable_checkpointing(model)
    assert not is_checkpointing(model)
    model = make_llama(tied=False)
    model.gradient_checkpointing_enable()
    assert is_checkpointing(model)
    disable_checkpointing(model)
    assert not is_checkpointing(model)


@pytest.mark.parametrize("name", ["gradient", "activation"])
def test_an_engine_enables_no_checkpointing_by_either_name(engines: Engines, name: str) -> None:
    """By the later one it was forwarded to the model."""
    engine = engines(make_llama(tied=False), ONE)
    getattr(engine, f"{name}_checkpointing_enable")()
    assert not is_checkpointing(engine.model)


def test_a_cache_that_is_none_is_called_by_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and blocks took it as past_key_values, which later releases call cache."""
    model, named = make_llama(tied=False), set[str]()
    real = decoders._MASKS["full_attention"]

    def noted(*args: Any, **kwargs: Any) -> Any:
        named.update(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setitem(decoders._MASKS, "full_attention", noted)
    for block in model.model.layers:
        block.register_forward_pre_hook(
            lambda _, args, kwargs: named.update(kwargs), with_kwargs=True
        )
    made = preset.cut(model)
    assert made is not None
    first, *others = made.sequential
    state = first(input_ids=tokens(), past_key_values=None)
    for layer in others:
        state = layer(state)
    assert {"position_ids", "position_embeddings"} <= named
    assert not {"past_key_values", "cache"} & named
