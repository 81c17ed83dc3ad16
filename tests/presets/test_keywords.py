"""A keyword that nothing in a model reads is refused by its name.

Presets hand their ``**kwargs`` on as transformers does, where a misspelt one ends in nothing. So
``return_logits=False``, of another engine, made all the logits and said no word.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe import ConfigError, RoundPipeRunConfig
from tests.support.engines import Engines
from tests.support.preset_models import INPUTS, ROWS, TOKENS, make_model, make_vit, own_forward
from tests.support.tolerances import assert_same_sums

IN_TWO = RoundPipeRunConfig(num_microbatch=2)
NAMES = ["llama", "gpt2", "qwen3-moe"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("misspelt", ["attention_maks", "retrun_logits", "anything"])
def test_a_keyword_that_nothing_reads_is_refused_by_name(
    name: str, misspelt: str, engines: Engines
) -> None:
    engine = engines(make_model(name))
    given = {**INPUTS["labels"](), misspelt: torch.ones(ROWS, TOKENS)}
    with pytest.raises(ConfigError, match=f"{misspelt}=") as caught:
        engine(**given)
    assert ("did you mean" in str(caught.value)) == (misspelt != "anything")
    with pytest.raises(ConfigError, match=f"{misspelt}="):
        engine.forward_backward(input_kwargs=given)
    right = ((), INPUTS["labels"](), None)
    for microbatches in ([right, ((), given, None)], lambda n: [right, ((), given, None)]):
        for run in (engine.forward_backward, engine.forward_loss):
            with pytest.raises(ConfigError, match=f"{misspelt}="):  # those that come cut, too
                run(microbatches=microbatches)


def test_image_classifiers_refuse_them_too(engines: Engines) -> None:
    engine = engines(make_vit())
    given = {"pixel_values": torch.zeros(2, 3, 8, 8), "return_logits": False}
    with pytest.raises(ConfigError, match="return_logits="):
        engine(**given)
    with pytest.raises(ConfigError, match="return_logits="):
        engine.forward_backward(microbatches=[((), given, None)])


@pytest.mark.parametrize("name", NAMES)
def test_microbatches_that_come_cut_keep_what_is_read(name: str, engines: Engines) -> None:
    """As the batch that they make up; ``skip_logits`` is known to presets alone."""
    model = make_model(name)
    theirs, _ = own_forward(copy.deepcopy(model), INPUTS["labels"]())
    given = INPUTS["labels"]()
    items = given["labels"][..., 1:].ne(-100).sum()
    with torch.no_grad():
        loss = engines(model).forward_loss(
            microbatches=[
                (
                    (),
                    {key: value[part] for key, value in given.items()}
                    | {"skip_logits": True, "num_items_in_batch": items},
                    None,
                )
                for part in (slice(1), slice(1, None))
            ]
        )
    assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)


@pytest.mark.parametrize("name", NAMES)
def test_logits_that_are_not_to_be_returned_are_not_made(name: str, engines: Engines) -> None:
    model = make_model(name)
    theirs, _ = own_forward(copy.deepcopy(model), INPUTS["padded left"]())
    engine = engines(model)
    for returns in (False, True):
        with torch.no_grad():
            output = engine(
                **INPUTS["padded left"](), return_logits=returns, roundpipe_run_config=IN_TWO
            )
        assert (output.logits is not None) == returns
        assert_same_sums(output.loss, theirs.loss, terms=ROWS * TOKENS)


def test_without_labels_there_would_be_nothing_to_return(engines: Engines) -> None:
    engine = engines(make_model("llama"))
    given = INPUTS["labels"]()
    labels = given.pop("labels")
    with pytest.raises(ConfigError, match="return_logits=False without labels"):
        engine(**given, return_logits=False)
    with pytest.raises(ConfigError, match="skip_logits"):
        engine.forward_backward(
            microbatches=[((), {**given, "labels": labels, "return_logits": False}, None)]
        )


def test_what_a_loss_of_the_users_own_reads_goes_through(engines: Engines) -> None:
    """By name, or, where it takes any keyword, whatever it is called."""
    seen: list[Any] = []

    def named(
        logits: Tensor, labels: Tensor, vocab_size: int, sharpness: Any = None, **_: Any
    ) -> Tensor:
        seen.append(sharpness)
        return logits.square().mean()

    def any_keyword(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        seen.append(kwargs["sharpness"])
        return logits.square().mean()

    for loss_function in (named, any_keyword):
        engine = engines(make_model("llama"))
        engine.loss_function = loss_function
        with torch.no_grad():
            engine(**INPUTS["labels"](), sharpness=3.0)
    assert set(seen) == {3.0}
