"""Packed rows, in which several documents follow each other and `position_ids` restart with each.

The story: masks and offsets were made for the whole batch, then cut along their first dimension
with it; documents saw each other, or a key-value cache grew, and once more in the recompute. The
oracle runs each document alone.
"""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from roundpipe import ConfigError, ModelExecutePlan, RoundPipeRunConfig
from tests.support.device_sets import TWO
from tests.support.engines import Engines
from tests.support.preset_models import TOKENS, gradients_of, make_model, packed, tokens

RECOMPUTED = ModelExecutePlan(fwd_plan=[range(4)], bwd_plan=[range(4, 5), range(1, 4), range(1)])
CUTS = [(5, 7), (4, 8)]


class Rows(NamedTuple):
    """Packed rows as the flattening collator makes them: no mask, and no document's first token is
    predicted."""

    inputs: dict[str, Tensor]
    documents: list[tuple[int, int, int]]  # row, start, stop

    @classmethod
    def of(cls, cuts: list[tuple[int, ...]]) -> "Rows":
        ids = tokens(len(cuts))
        labels, documents = ids.clone(), []
        for row, lengths in enumerate(cuts):
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            labels[row, starts] = -100
            documents += [(row, start, start + n) for start, n in zip(starts, lengths, strict=True)]
        positions = torch.stack([packed(*lengths) for lengths in cuts])
        return cls({"input_ids": ids, "labels": labels, "position_ids": positions}, documents)

    def each_alone(self, model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of the documents one by one, weighted by their tokens."""
        count = int((self.inputs["labels"] != -100).sum())
        ids, labels = self.inputs["input_ids"], self.inputs["labels"]
        total = torch.zeros(())
        for row, start, stop in self.documents:
            document = {
                "input_ids": ids[row : row + 1, start:stop],
                "labels": labels[row : row + 1, start:stop],
            }
            total = total + model(**document, use_cache=False, num_items_in_batch=count).loss
        total.backward()
        return total.detach(), gradients_of(model)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of all caches that are made."""
    made: list[str] = []
    init = Cache.__init__

    def noting(self: Cache, *args: Any, **kwargs: Any) -> None:
        made.append(type(self).__name__)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Cache, "__init__", noting)
    return made


@pytest.mark.parametrize("cuts", [CUTS[:1], CUTS, [(3, 4, 5), (12,), (1, 11)]], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_documents_do_not_see_each_other(
    engines: Engines, caches: list[str], name: str, cuts: list[tuple[int, ...]]
) -> None:
    """(a), (b), (d): one row; rows with different cuts in two microbatches; recomputed; `use_cache`
    left as it is."""
    model, rows = make_model(name), Rows.of(cuts)
    assert model.config.use_cache
    expected, expected_gradients = rows.each_alone(copy.deepcopy(model))
    caches.clear()
    engine = engines(model, TWO)
    loss = engine.forward_backward(
        input_kwargs=rows.inputs,
        loss_fn=lambda output, _: output.loss,
        run_config=RoundPipeRunConfig(num_microbatch=min(2, len(cuts)), execute_plan=RECOMPUTED),
    )
    engine.synchronize()
    assert caches == []
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-6)
    gradients = gradients_of(engine.model)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected_gradients[parameter], rtol=0, atol=1e-6, msg=parameter
        )


def test_offsets_of_the_batch_are_not_cut(engines: Engines) -> None:
    """(c): cumulative lengths have an entry for each document, not for each row; and scalars have
    none at all."""
    rows = Rows.of(CUTS)
    model = make_model("llama")
    seen: list[Tensor] = []
    engine = engines(model)
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["cu_seq_lens_q"]), with_kwargs=True
    )
    offsets = {
        "cu_seq_lens_q": torch.tensor([0, 5]),
        "max_length_q": 7,
    }  # as many entries as the batch has rows
    with pytest.raises(ConfigError, match="cu_seq_lens"):
        engine.forward_backward(
            input_kwargs=rows.inputs | offsets, run_config=RoundPipeRunConfig(num_microbatch=2)
        )
    engine.forward_backward(
        input_kwargs=rows.inputs | offsets, run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    assert all(torch.equal(offset, offsets["cu_seq_lens_q"]) for offset in seen)
    assert seen


def test_with_a_mask_of_ones_it_is_as_in_the_model_and_says_so(engines: Engines) -> None:
    """(e): transformers looks at positions only where there is no mask, so documents do see each
    other."""
    rows = Rows.of(CUTS)
    inputs = rows.inputs | {"attention_mask": torch.ones(len(CUTS), TOKENS, dtype=torch.long)}
    model = make_model("llama")
    alone, _ = rows.each_alone(copy.deepcopy(model))
    plain = copy.deepcopy(model)(**inputs, use_cache=False).loss
    assert not torch.allclose(plain, alone)
    engine = engines(model)
    with pytest.warns(UserWarning, match="attend to each other"):
        loss = engine.forward_backward(
            input_kwargs=inputs, run_config=RoundPipeRunConfig(num_microbatch=2)
        )
    torch.testing.assert_close(loss, plain.detach(), rtol=0, atol=1e-6)
