"""A saved model lacked its frozen weights, had a wrapper's names, or failed on weights that are
tied.

The story: what was saved was the wrapper's own state. Here half of the blocks are frozen and head
and embeddings are one weight; after two steps the files must be those that the plain model writes,
and load as it does.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from roundpipe import RoundPipeRunConfig
from tests.support.engines import Engines
from tests.support.preset_models import INPUTS, make_model

NAMES = ["gpt2", "llama-tied-rope3"]


def make(name: str) -> Any:
    model = make_model(name)
    model.base_model.get_submodule("h" if name == "gpt2" else "layers")[:2].requires_grad_(False)
    return model


def train(engines: Engines, model: Any) -> Any:
    """Two asynchronous steps: nothing has been written back when the saving begins."""
    engine = engines(model)
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.1)
    for _ in range(2):
        engine.forward_backward(
            input_kwargs=INPUTS["labels"](), run_config=RoundPipeRunConfig(num_microbatch=2)
        )
        engine.step(optimizer.step)
    return engine


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(**INPUTS["labels"](), use_cache=False).logits
    return logits


@pytest.mark.parametrize("name", NAMES)
def test_files_are_the_plain_models_own(engines: Engines, tmp_path: Path, name: str) -> None:
    """The same names, none missing and none too many; loaded, the same logits to the bit, and the
    tie is back."""
    model = make(name)
    model.save_pretrained(tmp_path / "plain")
    before = logits_of(model)
    engine = train(engines, model)
    engine.save_pretrained(tmp_path / "trained")
    plain, trained = (
        load_file(tmp_path / run / "model.safetensors") for run in ("plain", "trained")
    )
    assert plain.keys() == trained.keys()
    assert "lm_head.weight" not in trained
    loaded, report = type(model).from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not any(
        report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    engine.synchronize()
    assert torch.equal(logits_of(loaded), logits_of(model))
    assert not torch.allclose(logits_of(loaded), before)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_dict_loads_into_a_plain_model(engines: Engines, name: str) -> None:
    """Strictly, frozen weights and both names of a tied one included."""
    model = make(name)
    engine = train(engines, model)
    state = engine.state_dict()
    plain = make_model(name)
    assert state.keys() == plain.state_dict().keys()
    plain.load_state_dict(state, strict=True)
    assert torch.equal(logits_of(plain), logits_of(model))
