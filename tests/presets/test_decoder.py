"""The generic preset: decoders it knows nothing of run exactly, or are refused with what differs.

docs/models.md lists what is tried here.
"""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GlmConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaForCausalLM,
    MambaConfig,
    Olmo2Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from roundpipe import ModelExecutePlan, RoundPipeRunConfig
from roundpipe.presets import decoder, preset
from tests.support import mixtures
from tests.support.device_sets import THREE
from tests.support.engines import Engines
from tests.support.preset_models import (
    CONFIGS,
    INPUTS,
    ROWS,
    TINY,
    TOKENS,
    VOCABULARY,
    backward,
    gradients_of,
    make_model,
    own_forward,
    tokens,
)
from tests.support.tolerances import assert_same_sums

MANY_STAGES = ModelExecutePlan(
    fwd_plan=[range(2), range(2, 4)], bwd_plan=[range(4, 5), range(1, 4), range(1)]
)

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_NO_GROUPS = {name: value for name, value in TINY.items() if name != "num_key_value_heads"}
_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: BloomConfig(**_SMALL, hidden_dropout=0.0, attention_dropout=0.0),
    "falcon": lambda: FalconConfig(**_SMALL, hidden_dropout=0.0, attention_dropout=0.0),
    "gemma2": lambda: Gemma2Config(**TINY, head_dim=8, sliding_window=5),
    "gemma3": lambda: Gemma3TextConfig(**TINY, head_dim=8, sliding_window=5, layer_types=_WINDOWS),
    "glm": lambda: GlmConfig(**TINY, head_dim=8),
    "gpt-neox": lambda: GPTNeoXConfig(**_NO_GROUPS),
    "granite": lambda: GraniteConfig(
        **TINY, embedding_multiplier=3.0, logits_scaling=4.0, residual_multiplier=0.5
    ),
    "olmo2": lambda: Olmo2Config(**TINY),
    "phi3": lambda: Phi3Config(**TINY),
    "smollm3": lambda: SmolLM3Config(**TINY),
    "stablelm": lambda: StableLmConfig(**TINY),
}  # fmt: skip
MORE: dict[str, Callable[[], PreTrainedConfig]] = {
    "bert-decoder": lambda: BertConfig(
        **_SMALL,
        intermediate_size=48,
        is_decoder=True,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    "cohere": lambda: CohereConfig(**TINY),
    "cohere2": lambda: Cohere2Config(**TINY, sliding_window=5),
    "falcon-alibi": lambda: FalconConfig(**_SMALL, alibi=True),
    "gemma": lambda: GemmaConfig(**TINY, head_dim=8),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, state_size=4
    ),
    "olmoe": lambda: OlmoeConfig(**TINY, num_experts=4, num_experts_per_tok=2),
    "opt": lambda: OPTConfig(
        **_SMALL,
        ffn_dim=48,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        pad_token_id=1,
        dropout=0.0,
    ),
    "phi": lambda: PhiConfig(**TINY),
    "starcoder2": lambda: Starcoder2Config(**TINY, residual_dropout=0.0, embedding_dropout=0.0),
    **{
        name: partial(mixtures.CONFIGS[name], TINY)
        for name in ("deepseek-v3", "glm4-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe")
    },
}


def make(name: str) -> Any:
    config = (ARCHITECTURES | MORE)[name]()
    return make_model(config=config)


def inputs_for(model: Any) -> list[dict[str, Any]]:
    """Those of the usual inputs that the model's forward knows."""
    known = inspect.signature(type(model).forward).parameters
    wanted = [
        "labels",
        "padded left",
        "packed (B, S)",
        "inputs_embeds",
        "keep 3 logits",
        "num_items_in_batch",
    ]
    return [
        kwargs
        for name in wanted
        if not (kwargs := INPUTS[name]()).keys() - known.keys() - {"num_items_in_batch"}
    ]


def assert_runs_exactly(engines: Engines, name: str) -> None:
    model = make(name)
    batches = inputs_for(model)
    expected = [own_forward(copy.deepcopy(model), kwargs) for kwargs in batches]
    made = preset.cut(model)
    assert made is not None
    assert isinstance(made.sequential[0], decoder.Prefix)
    for kwargs, (theirs, theirs_gradients) in zip(batches, expected, strict=True):
        ours = made.sequential[1:](made.sequential[0](**kwargs))
        backward(ours)
        gradients = gradients_of(model)
        assert type(ours) is type(theirs)
        assert torch.equal(ours.logits, theirs.logits)
        assert ours.loss is theirs.loss is None or torch.equal(ours.loss, theirs.loss)
        assert [
            name for name in gradients if not torch.equal(gradients[name], theirs_gradients[name])
        ] == []
    engine = engines(model, THREE)
    (theirs, theirs_gradients), kwargs = expected[1], batches[1]
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=MANY_STAGES)
    loss = engine.forward_backward(
        input_kwargs=kwargs, loss_fn=lambda output, _: output.loss, run_config=config
    )
    engine.synchronize()
    assert_same_sums(loss, theirs.loss, terms=ROWS * TOKENS)
    assert_same_sums(gradients_of(engine.model), theirs_gradients, terms=ROWS * TOKENS)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unknown_decoders_run_exactly(engines: Engines, name: str) -> None:
    """Layer by layer to the bit, and through the engine: windows, ALiBi, soft caps and scales
    without being told."""
    assert_runs_exactly(engines, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_unknown_decoders_run_exactly(engines: Engines, name: str) -> None:
    """Also experts, state spaces, linear attention."""
    assert_runs_exactly(engines, name)


def assert_refused(model: Any, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    caplog.clear()
    assert preset.cut(model) is None
    (record,) = [record for record in caplog.records if record.name.startswith("roundpipe")]
    assert reason in record.getMessage()


def test_models_of_another_shape_are_refused_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Gemma 3n threads four streams through its blocks; BART's own loss shifts nothing."""
    streams = Gemma3nTextConfig(
        **TINY,
        head_dim=8,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=0,
        laurel_rank=4,
        layer_types=["full_attention"] * 3,
    )
    assert_refused(make_model(config=streams), caplog, "run in parts, its forward raises")
    unshifted = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        decoder_ffn_dim=48,
        decoder_layers=3,
        decoder_attention_heads=4,
    )
    assert_refused(make_model(config=unshifted), caplog, "two microbatches")


def test_a_forward_that_depends_on_more_is_refused_with_the_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Here the hidden states change between two blocks, then what leaves the last depends on the
    tokens."""

    class Between(LlamaForCausalLM):
        """Its backbone adds to the hidden states half way."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model.__class__ = BackboneBetween

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class BackboneBetween(type(make_model().model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
            hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            positions = self.rotary_emb(hidden, position_ids=torch.arange(hidden.shape[1])[None])
            for block in self.layers:
                hidden = block(hidden + 1, position_embeddings=positions)
            return SimpleOutput(self.norm(hidden))

    class SimpleOutput:
        past_key_values = cache = hidden_states = attentions = None

        def __init__(self, last_hidden_state: Any) -> None:
            self.last_hidden_state = last_hidden_state

    class FromTokens(LlamaForCausalLM):
        """Its logits depend on which tokens came in, not only on their hidden states."""

        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            output = super().forward(input_ids, **kwargs)
            if input_ids is not None:
                output.logits = output.logits + input_ids[..., None]
            return output

    assert_refused(Between(CONFIGS["llama"]()), caplog, "changes the hidden states before block 1")
    assert_refused(
        FromTokens(CONFIGS["llama"]()), caplog, "its logits differ from its own forward's by up to"
    )


def test_parameters_that_the_forward_does_not_reach_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make("phi3")
    model.extra = torch.nn.Linear(2, 2)
    assert_refused(model, caplog, "extra.weight")


def test_models_that_are_no_decoders_are_passed_by_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (
        preset.cut(BertForSequenceClassification(BertConfig(**_SMALL, intermediate_size=48)))
        is None
    )
    assert not caplog.records


def test_trying_leaves_no_trace() -> None:
    """Modes, random numbers, hooks, gradients and the config are as before."""
    model = make("phi3")
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    config, random = model.config.to_dict(), torch.get_rng_state()
    assert preset.cut(model) is not None
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attention_that_needs_a_gpu_is_tried_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("phi3")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    assert preset.cut(model) is not None
    assert model.config._attn_implementation == "flash_attention_2"


def test_modes_are_those_of_the_call() -> None:
    """Dropout outside of blocks follows `train()` and `eval()`, called after the model was cut."""
    model = make_model(config=PhiConfig(**TINY, embd_pdrop=0.5))
    made = preset.cut(model)
    assert made is not None
    trained = made.sequential[0](input_ids=tokens())["hidden_states"]
    model.eval()
    evaluated = made.sequential[0](input_ids=tokens())["hidden_states"]
    assert (trained == 0).float().mean() > 0.3
    assert torch.equal(evaluated, model.model.embed_tokens(tokens()))
