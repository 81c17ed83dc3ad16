"""What happens before the blocks: rotary embeddings that change with the length, noise and hooks on
the embeddings.

The oracle is the model's own forward, in bf16 too: frequencies are fp32 buffers and must stay so.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Olmo2Config, Phi3Config
from transformers.integrations.neftune import neftune_post_forward_hook

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.presets import preset as presets
from tests.support.device_sets import ONE, THREE
from tests.support.engines import Engines
from tests.support.preset_models import (
    INPUTS,
    TINY,
    YARN_ROPE,
    gradients_of,
    make_model,
    own_forward,
    tokens,
)
from tests.support.tolerances import assert_same_sums

MANY_STAGES = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 5), range(1, 4), range(1)]
)
SHORT = {
    **TINY,
    "max_position_embeddings": 8,
}  # batches are longer, so that dynamic kinds change their frequencies
LONG_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": YARN_ROPE,
    "longrope": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 8,
        **LONG_FACTORS
    },
}  # fmt: skip


def rotary_model(rope: str, dtype: torch.dtype, make: Any = LlamaConfig) -> Any:
    return make_model(config=make(**SHORT, rope_parameters=dict(ROPES[rope]))).to(dtype)


def phi3(**settings: Any) -> Phi3Config:
    """Its config has the length up to which the short factors hold beside the parameters."""
    return Phi3Config(**settings, original_max_position_embeddings=8)


def both(engines: Engines, model: Any, *lengths: int) -> tuple[list[Any], Any, Any]:
    """Logits of batches of these lengths, one after the other: the engine's and the model's. And
    its twin."""
    twin = copy.deepcopy(model)
    engine = engines(model, ONE)
    pairs = []
    for length in lengths:
        with torch.no_grad():
            ours = engine(
                tokens(2, length), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)
            ).logits
            pairs.append((ours, twin(tokens(2, length), use_cache=False).logits))
    return pairs, model, twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rope", ROPES)
def test_rotary_variants_are_the_models(engines: Engines, rope: str, dtype: torch.dtype) -> None:
    """A longer batch changes the frequencies of a dynamic kind for those after it, a short one may
    change them back."""
    assert_same_after(6, engines, rotary_model(rope, dtype))


def assert_same_after(last: int, engines: Engines, model: Any) -> Any:
    """Batches of several lengths, ``last`` that of the last one. Returns the twin's embeddings."""
    pairs, model, twin = both(engines, model, 6, 12, 10, last)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    ours, theirs = model.model.rotary_emb, twin.model.rotary_emb
    assert torch.equal(ours.inv_freq, theirs.inv_freq)
    assert ours.inv_freq.dtype == theirs.inv_freq.dtype
    assert ours.max_seq_len_cached == theirs.max_seq_len_cached
    return theirs


@pytest.mark.parametrize(
    ("make", "rope"),
    [(phi3, "longrope"), *((Olmo2Config, rope) for rope in ROPES)],
    ids=["phi3", *ROPES],
)
def test_rotary_variants_in_the_generic_preset(engines: Engines, make: Any, rope: str) -> None:
    """The last part runs the rotary embeddings a second time, which must not change them. It wrote
    their buffer, as the first did, and the engine refused that."""
    model = rotary_model(rope, torch.float32, make)
    short = model.model.rotary_emb.inv_freq.clone()
    theirs = assert_same_after(12, engines, model)
    assert torch.equal(short, theirs.inv_freq) == (rope == "yarn")


@pytest.mark.parametrize(
    ("make", "rope"),
    [(LlamaConfig, "dynamic"), (LlamaConfig, "longrope"), (phi3, "longrope")],
    ids=["dynamic", "longrope", "phi3"],
)
def test_microbatches_of_growing_length(engines: Engines, make: Any, rope: str) -> None:
    """Dynamic frequencies in one round: each microbatch has those it would have in a loop, in the
    recompute too."""
    model = rotary_model(rope, torch.float32, make)
    parts = [
        {"input_ids": tokens(2, n), "labels": tokens(2, n), "num_items_in_batch": 50}
        for n in (6, 10, 12)
    ]
    twin = copy.deepcopy(model)
    losses = [twin(**part, use_cache=False).loss for part in parts]
    sum(losses).backward()
    engine = engines(model, THREE)
    loss = engine.forward_backward(
        microbatches=[((), part, None) for part in parts],
        loss_fn=lambda output, _: output.loss,
        run_config=RoundPipeRunConfig(execute_plan=MANY_STAGES),
    )
    engine.synchronize()
    assert_same_sums(loss, sum(losses), terms=2 * (6 + 10 + 12))
    assert_same_sums(gradients_of(model), gradients_of(twin), terms=2 * (6 + 10 + 12))


def with_noise(model: Any) -> Any:
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    model.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_noise_on_the_embeddings_is_the_models(name: str) -> None:
    """NEFTune is a hook on the embeddings in training. Its noise is the first thing drawn, here as
    in the model."""
    model = with_noise(make_model(name, config=Phi3Config(**TINY) if name == "phi3" else None))
    made = presets.cut(model)
    assert made is not None
    torch.manual_seed(5)
    theirs = model(**INPUTS["labels"](), use_cache=False).logits
    torch.manual_seed(5)
    ours = made.sequential[1:](made.sequential[0](**INPUTS["labels"]())).logits
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, model.eval()(**INPUTS["labels"](), use_cache=False).logits)


def test_noise_is_the_same_in_the_recompute(engines: Engines) -> None:
    """Embeddings drawn anew would give the embedding's neighbours another gradient."""
    gradients = []
    for plan in (ModelExecutePlan(fwd_plan=[], bwd_plan=[range(5)]), MANY_STAGES):
        engine = engines(with_noise(make_model("llama")))
        torch.manual_seed(5)
        engine.forward_backward(
            input_kwargs=INPUTS["labels"](),
            run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=plan),
        )
        engine.synchronize()
        gradients.append({name: p.grad for name, p in engine.model.named_parameters()})
    quiet, _ = own_forward(make_model("llama"), INPUTS["labels"]())
    assert quiet.loss is not None
    assert [
        name for name in gradients[0] if not torch.equal(gradients[0][name], gradients[1][name])
    ] == []
