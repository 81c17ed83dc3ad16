"""Renamed things of transformers are called by no name of old: a person who installs the latest
release sees none of its warnings."""

from torch import nn

from roundpipe.engine.generation import is_checkpointing
from roundpipe_hf.compat import disable_checkpointing
from tests.support.models import make_llama


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
