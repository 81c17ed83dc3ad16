"""Every preset cuts its architecture bit-exactly: run as plain PyTorch, the sequence is the
model."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    LilyConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from roundpipe.errors import ConfigError
from roundpipe.presets import preset
from roundpipe.presets.architectures.decoders import Opening
from roundpipe.presets.decoder import Block
from roundpipe.presets.parts import Part
from tests.support.preset_models import (
    CONFIGS,
    INPUTS,
    ONLY_EAGER,
    ROW_PACKING,
    ROWS,
    TOKENS,
    backward,
    gradients_of,
    images,
    make_model,
    make_vit,
    own_forward,
    packed,
    padded,
    tokens,
)
from tests.support.tolerances import assert_same_sums


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are computed faster by one thread than handed out to several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cut_of(model: nn.Module) -> preset.Cut:
    made = preset.cut(model)
    assert made is not None
    return made


def same(ours: Any, theirs: Any) -> bool:
    return ours is theirs is None or torch.equal(ours, theirs)


def assert_same_as_model(model: Any, kwargs: dict[str, Any]) -> None:
    theirs, expected = own_forward(model, kwargs)
    ours = run(cut_of(model), kwargs)
    backward(ours)
    assert type(ours) is type(theirs)
    assert getattr(ours, "past_key_values", None) is None
    assert same(ours.loss, theirs.loss)
    assert same(ours.logits, theirs.logits)
    found = gradients_of(model)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("inputs", INPUTS)
def test_llama_is_bit_exact(inputs: str, attention: str) -> None:
    assert_same_as_model(make_model("llama", attention), INPUTS[inputs]())


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama"])
def test_every_preset_is_bit_exact(name: str) -> None:
    for attention in ["eager"] if name in ONLY_EAGER else ["sdpa", "eager"]:
        model = make_model(name, attention)
        for inputs in ("labels", "padded left", "packed (B, S)", "num_items_in_batch"):
            assert_same_as_model(model, INPUTS[inputs]())


@pytest.mark.parametrize("inputs", INPUTS)
def test_gpt2_is_bit_exact(inputs: str) -> None:
    """It shares less code with Llama than the others do."""
    assert_same_as_model(make_model("gpt2"), INPUTS[inputs]())


def test_gpt2_token_types_are_embedded() -> None:
    assert_same_as_model(make_model("gpt2"), {**INPUTS["labels"](), "token_type_ids": tokens() % 2})


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({}, torch.tensor([3, 0, 4, 1])),
        ({}, torch.tensor([3, -100, 4, 1])),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ({"problem_type": "multi_label_classification"}, torch.eye(5)[:4]),
    ],
    ids=["classes", "a class missing", "regression", "several labels"],
)
def test_vit_is_bit_exact_and_its_losses_add_up(settings: dict[str, Any], labels: Tensor) -> None:
    """Only cross-entropy can be told the batch's count; means over images are weighted."""
    model = make_vit(**settings)
    kwargs, places = {**images(), "labels": labels}, ROWS * (4 + 1)  # patches and the class token
    assert_same_as_model(model, kwargs)
    for more in ({}, {"num_items_in_batch": 10}):
        theirs, expected = own_forward(model, {**kwargs, **more})
        for num_microbatch in (2, 3):
            ours = run(cut_of(model), {**kwargs, **more}, num_microbatch)
            backward(ours)
            assert_same_sums(ours.loss, theirs.loss, terms=places)
            assert_same_sums(gradients_of(model), expected, terms=places)


def test_vit_at_another_resolution_and_without_labels() -> None:
    kwargs = {"pixel_values": torch.randn(2, 3, 16, 8), "interpolate_pos_encoding": True}
    assert_same_as_model(make_vit(), kwargs)


def test_default_cache_setting_changes_nothing() -> None:
    """`config.use_cache` is True by default: the model's own forward then builds a cache, the
    sequence does not."""
    model, kwargs = make_model(), INPUTS["padded left"]()
    assert model.config.use_cache
    assert torch.equal(run(cut_of(model), kwargs).logits, model(**kwargs).logits)


def run(cut: preset.Cut, kwargs: dict[str, Any], num_microbatch: int = 1) -> Any:
    """What the engine does, in three lines."""
    args_list, kwargs_list = cut.split_input((), kwargs, num_microbatch)
    outputs = []
    for args, part in zip(args_list, kwargs_list, strict=True):
        state = cut.sequential[0](*args, **part)
        outputs.append(cut.sequential[1:](state))
    return cut.merge_output(outputs, [len(output.logits) for output in outputs])


@pytest.mark.parametrize("num_microbatch", [2, 3, 4, 7])
@pytest.mark.parametrize("inputs", INPUTS)
def test_microbatch_losses_add_up(inputs: str, num_microbatch: int) -> None:
    """Uneven numbers of valid tokens and uneven microbatches included: the merged loss is that of
    the batch."""
    model, kwargs = make_model(), INPUTS[inputs]()
    theirs, expected = own_forward(model, kwargs)
    ours = run(cut_of(model), kwargs, num_microbatch)
    backward(ours)
    assert_same_sums(ours.logits, theirs.logits, terms=TOKENS)
    if theirs.loss is not None:
        assert_same_sums(ours.loss, theirs.loss, terms=ROWS * TOKENS)
    assert_same_sums(gradients_of(model), expected, terms=ROWS * TOKENS)


@pytest.mark.parametrize("takes_num_items", [True, False])
def test_an_assigned_loss_is_used_and_adds_up(takes_num_items: bool) -> None:
    """Also one that knows nothing of num_items_in_batch, and with a microbatch that has no valid
    token at all."""
    model, kwargs = make_model(), padded("right")
    kwargs["labels"][2:] = -100
    cut = cut_of(model)

    def twice(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
    ) -> Tensor:
        scores, targets = logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
        reduction = "mean" if num_items_in_batch is None else "sum"
        return (
            2
            * nn.functional.cross_entropy(scores, targets, reduction=reduction)
            / (num_items_in_batch or 1)
        )

    def mean_only(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        return twice(logits, labels, vocab_size)

    model.loss_function = twice if takes_num_items else mean_only
    theirs = model(**kwargs)
    theirs.loss.backward()
    expected = gradients_of(model)
    ours = run(cut, kwargs, 2)
    ours.loss.backward()
    assert_same_sums(ours.loss, theirs.loss, terms=ROWS * TOKENS)
    assert_same_sums(gradients_of(model), expected, terms=ROWS * TOKENS)


def test_packed_documents_do_not_see_each_other() -> None:
    """Two packed rows with different cuts, two microbatches: each document as if it were alone."""
    model = make_model()
    ids, labels = tokens(2), tokens(2)
    documents = [(0, 0, 5), (0, 5, 12), (1, 0, 4), (1, 4, 12)]
    for row, start, _ in documents:
        labels[row, start] = -100  # as the flattening collator does
    sums = [
        model(
            input_ids=ids[row : row + 1, a:b],
            labels=labels[row : row + 1, a:b],
            num_items_in_batch=20,
        ).loss
        for row, a, b in documents
    ]
    ours = run(cut_of(model), {
        "input_ids": ids, "labels": labels,
        "position_ids": torch.stack([packed(5, 7), packed(4, 8)]),
    }, 2)  # fmt: skip
    assert_same_sums(ours.loss, sum(sums), terms=2 * TOKENS)


def test_packed_rows_with_a_mask_of_ones_warn() -> None:
    kwargs = {
        "input_ids": tokens(),
        "position_ids": ROW_PACKING,
        "attention_mask": torch.ones(ROWS, TOKENS),
    }
    with pytest.warns(UserWarning, match="attend to each other"):
        cut_of(make_model()).split_input((), kwargs, 2)


def test_what_belongs_to_the_whole_batch_is_not_cut() -> None:
    """A 1-d argument as long as the batch has rows is cut only if it has rows."""
    cut, kept = cut_of(make_model()), torch.arange(ROWS)
    _, parts = cut.split_input((tokens(),), {"logits_to_keep": kept, "labels": tokens()}, 2)
    assert [part["input_ids"].shape[0] for part in parts] == [2, 2]
    assert all(part["logits_to_keep"] is kept for part in parts)
    with pytest.raises(ConfigError, match="cu_seq_lens"):
        cut.split_input((tokens(),), {"cu_seq_lens_q": torch.arange(ROWS)}, 2)
    _, (only,) = cut.split_input((tokens(1),), {"cu_seq_lens_q": torch.tensor([0, 5, 12])}, 2)
    assert only["cu_seq_lens_q"].tolist() == [0, 5, 12]


def test_one_microbatch_is_left_alone() -> None:
    _, (only,) = cut_of(make_model()).split_input((tokens(1),), {"labels": tokens(1)}, 4)
    assert only.keys() == {"input_ids", "labels"}


# --- the cut ---


def test_the_sequence_owns_the_models_parameters_once() -> None:
    """The model's own Parameters and buffers, none twice, none through the loss; tied weights stay
    one."""
    model = make_model("llama-tied-rope3")
    sequential = cut_of(model).sequential
    assert [type(layer).__name__ for layer in sequential] == [
        "Prefix",
        "Block",
        "Block",
        "Block",
        "HeadAndLoss",
    ]
    assert {id(p) for p in sequential.parameters()} == {id(p) for p in model.parameters()}
    assert {id(b) for b in sequential.buffers()} == {id(b) for b in model.buffers()}
    assert {id(m) for m in sequential[-1].modules()} == {
        id(m) for m in (sequential[-1], model.model.norm, model.lm_head)
    }


def test_a_checkpointing_flag_does_not_recompute_but_hooks_run() -> None:
    """The engine recomputes; the block's own checkpointing would do it a second time."""
    model = make_model()
    cut, calls = cut_of(model), []
    model.gradient_checkpointing_enable()
    model.model.layers[1].register_forward_hook(lambda *_: calls.append("block"))
    model.model.layers[1].mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    run(cut, INPUTS["labels"]()).loss.backward()
    assert calls == ["mlp", "block"]
    assert model.is_gradient_checkpointing


def test_embedding_hooks_run() -> None:
    """NEFTune and `enable_input_require_grads` sit there."""
    model = make_model().requires_grad_(False)
    model.enable_input_require_grads()
    assert run(cut_of(model), INPUTS["no labels"]()).logits.requires_grad


def test_blocks_compile_without_breaks_once_for_all() -> None:
    """One graph serves every block: nothing in the state or the wrapper is specific to one."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cut, kwargs = cut_of(make_model()), INPUTS["labels"]()
    expected = run(cut, kwargs).logits
    compiled = torch.compile(Block.forward, backend=backend, fullgraph=True, dynamic=False)
    state = cut.sequential[0](**kwargs)
    for block in list(cut.sequential)[1:-1]:
        state = compiled(block, state)
    assert torch.equal(cut.sequential[-1](state).logits, expected)
    assert len(graphs) == 1


def test_hooks_that_would_be_lost_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    cut_of(model)
    assert not caplog.records
    model.model.register_forward_hook(lambda *_: None)
    cut_of(model)
    assert "['model']" in caplog.text


def test_another_forward_is_another_architecture() -> None:
    """It goes through the generic preset, which runs that forward."""

    class Mine(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Named(LlamaForCausalLM):
        pass

    config = CONFIGS["llama"]()
    assert isinstance(cut_of(Mine(config)).sequential[0].part, Part)
    assert isinstance(cut_of(Named(config)).sequential[0].part, Opening)
    assert preset.cut(nn.Linear(2, 2)) is None


def test_parameters_out_of_reach_are_refused() -> None:
    model = make_model()
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"2 parameters .*extra\.weight"):
        preset.cut(model)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"use_cache": True}, "cache"),
        ({"past_key_values": object()}, "cache"),
        ({"cache": object()}, "cache"),  # its name in later releases
        ({"output_hidden_states": True}, "output_hidden_states.*use_sequential_preset=False"),
        ({"output_attentions": True}, "output_attentions"),
        ({"return_dict": False}, "return_dict"),
        ({"adapter_names": ["a"] * ROWS}, "adapter_names"),
    ],
)
def test_what_blocks_alone_cannot_do_is_refused(more: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        cut_of(make_model()).sequential[0](input_ids=tokens(), **more)


# --- adapters ---


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=2, init_lora_weights=False, task_type=TaskType.CAUSAL_LM, **settings)


ADAPTERS: dict[str, Callable[[], LoraConfig]] = {
    "qv": lambda: lora(target_modules=["q_proj", "v_proj"]),
    "all-linear": lambda: lora(target_modules="all-linear"),
    "dora": lambda: lora(target_modules=["q_proj", "down_proj"], use_dora=True),
    "embedding and head": lambda: lora(target_modules=["embed_tokens", "lm_head", "o_proj"]),
    "modules_to_save": lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
}


@pytest.fixture(params=ADAPTERS)
def adapted(request: pytest.FixtureRequest) -> Any:
    base = make_model()
    torch.manual_seed(3)
    return get_peft_model(base, ADAPTERS[request.param]())


def test_adapters_are_bit_exact(adapted: Any) -> None:
    for inputs in ("labels", "padded left"):
        assert_same_as_model(adapted, INPUTS[inputs]())


def test_adapters_train_without_an_input_that_requires_grad(adapted: Any) -> None:
    """Everything else frozen and no input-grad helper called."""
    run(cut_of(adapted), INPUTS["labels"](), 2).loss.backward()
    gradients = gradients_of(adapted)
    assert gradients.keys() == {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2), "PROMPT_TUNING"),
        (PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2), "PREFIX_TUNING"),
        (
            AdaLoraConfig(task_type=TaskType.CAUSAL_LM, total_step=10, target_modules=["q_proj"]),
            "ADALORA",
        ),
        (lora(target_modules=["q_proj"], alora_invocation_tokens=[1]), "LORA"),
        (LilyConfig(task_type=TaskType.CAUSAL_LM, r=2, target_modules=["q_proj"]), "LILY"),
    ],
)
def test_adapters_that_do_more_than_replace_modules_are_refused(config: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        preset.cut(get_peft_model(make_model(), config))
