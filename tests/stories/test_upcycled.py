"""A dense model made into a mixture of experts: every expert is a copy of its MLP, so that the
mixture is the dense model until it is trained."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig

from fetch_assets import IndexUnreachableError, smollm2_folder, wiki_summaries
from roundpipe import RoundPipeRunConfig
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, engine_gradients
from tests.support.mixtures import STACKS
from tests.support.preset_models import (
    INPUTS,
    ROWS,
    TINY,
    TOKENS,
    gradients_of,
    make_model,
    own_forward,
)
from tests.support.tolerances import assert_same_sums

NUM_EXPERTS, NUM_CHOSEN, STEPS = 4, 2, 3
# As SmolLM2: a Llama with one matrix for both embeddings.
SIZES: dict[str, Any] = {**TINY, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
KEPT = [*SIZES, "rope_parameters"]


def upcycled(dense: Any) -> Any:
    """The router is random: the shares of the chosen experts add up to 1, and experts are alike."""
    config = MixtralConfig(
        **{name: getattr(dense.config, name) for name in KEPT},
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        output_router_logits=True,
        router_aux_loss_coef=0.1,
        sliding_window=None,
    )
    mixture = make_model(config=config)
    weights = mixture.state_dict()
    of_dense: dict[str, Tensor] = dense.state_dict()
    for name in weights:
        if name in of_dense:
            weights[name] = of_dense[name]
        elif name.endswith("experts.gate_up_proj"):
            mlp = name.removesuffix("experts.gate_up_proj")
            both = [of_dense[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
            weights[name] = torch.cat(both).repeat(NUM_EXPERTS, 1, 1)
        elif name.endswith("experts.down_proj"):
            mlp = name.removesuffix("experts.down_proj")
            weights[name] = of_dense[f"{mlp}down_proj.weight"].repeat(NUM_EXPERTS, 1, 1)
    mixture.load_state_dict(weights)
    return mixture


@pytest.mark.parametrize("devices", [ONE, THREE], ids=["one device", "three devices"])
def test_an_upcycled_model_starts_as_the_dense_one_and_trains(
    engines: Engines, devices: DeviceSet
) -> None:
    """Its losses are the plain mixture's at every step, the auxiliary one included."""
    dense = make_model(config=LlamaConfig(**SIZES))
    mixture = upcycled(dense)
    plain, batch = copy.deepcopy(mixture), INPUTS["padded left"]()
    theirs = dense(**batch)
    engine = engines(mixture, devices)
    in_three = RoundPipeRunConfig(num_microbatch=3)
    with torch.no_grad():
        ours = engine(**batch, roundpipe_run_config=in_three)
    counted = batch["attention_mask"].bool()
    assert_same_sums(
        ours.logits[counted], theirs.logits.detach()[counted], terms=TINY["intermediate_size"]
    )
    optimizer = torch.optim.SGD(engine.optim_parameters(), lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    losses = []
    for _ in range(STEPS):
        expected, gradients = own_forward(plain, batch)
        loss = engine.forward_backward(input_kwargs=batch, run_config=in_three)
        engine.synchronize()
        assert_same_sums(loss, expected.loss.detach(), terms=ROWS * TOKENS)
        assert_same_sums(gradients_of(engine.model), gradients, terms=ROWS * TOKENS)
        engine.step(optimizer.step, is_async=False)
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients.get(name)
        reference.step()
        plain.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


LENGTH, RATE = 16, 1e-3


def smollm2_and_text() -> tuple[Any, dict[str, Tensor]]:
    """The model in fp32, and the first words of some encyclopedia articles."""
    try:
        folder, articles = smollm2_folder(), wiki_summaries()[:ROWS]
    except IndexUnreachableError as error:
        pytest.skip(str(error))
    ids = AutoTokenizer.from_pretrained(folder)(
        [article.extract for article in articles],
        max_length=LENGTH,
        truncation=True,
        return_tensors="pt",
    ).input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, {"input_ids": ids, "labels": ids}


@pytest.mark.slow
def test_smollm2_upcycled_starts_as_it_was_and_its_experts_learn(engines: Engines) -> None:
    """Real weights, all layers. The adapters of the experts start at nothing, so that with them,
    too, the mixture is the dense model; then they learn as PEFT's do under torch's optimizer."""
    dense, batch = smollm2_and_text()
    mixture = upcycled(dense)
    with torch.no_grad():
        at_first = dense(**batch)
    sizes = dense.config
    del dense
    torch.manual_seed(0)
    config = LoraConfig(r=8, target_parameters=STACKS)
    model: Any = get_peft_model(mixture, config)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert all("experts" in name for name in start)

    plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    expected = []
    for _ in range(STEPS):
        output = model(**batch)
        output.loss.backward()
        of_step = {name: model.get_parameter(name).grad.clone() for name in start}
        expected.append((output.loss.detach(), of_step))
        plain.step()
        plain.zero_grad()
    model.load_state_dict(start, strict=False)

    engine = engines(model, THREE)
    cut = RoundPipeRunConfig(num_microbatch=2)
    with torch.no_grad():
        ours = engine(**batch, output_router_logits=False, roundpipe_run_config=cut)
    assert_same_sums(ours.logits, at_first.logits, terms=sizes.intermediate_size)
    assert_same_sums(ours.loss, at_first.loss, terms=ROWS * LENGTH)
    optimizer = torch.optim.AdamW(engine.optim_parameters(), lr=RATE)
    losses = []
    for theirs, of_step in expected:
        loss = engine.forward_backward(input_kwargs=batch, run_config=cut)
        assert_same_sums(loss, theirs, terms=ROWS * LENGTH)
        # PEFT sums over tokens, then over a width of the weight; here it is the other way.
        terms = ROWS * LENGTH * sizes.hidden_size
        assert_same_sums(engine_gradients(engine), of_step, terms=terms)
        engine.step(optimizer.step, is_async=False)
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
