"""Linear head + cross-entropy in chunks: torch's numbers, a small part of its memory.

The oracle is `cross_entropy(linear(...).float(), ...)` on the whole batch. Peaks are counted, not
measured: every storage an operation makes is added up for as long as it lives.
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe import ConfigError, RoundPipeRunConfig
from roundpipe.kernels.linear_cross_entropy import DEFAULT_CHUNK_BYTES, linear_cross_entropy
from tests.support.device_sets import ONE, THREE, DeviceSet
from tests.support.engines import Engines, engine_gradients

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 7, 16, 50
ONE_ROW = VOCABULARY * 4


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made inside it: now and at most; and the operations that were run."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.operations: list[str] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        self.operations.append(func.overloadpacket.__name__)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage(), given)
        return result

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in self._known or key in given:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def inputs(
    dtype: torch.dtype = torch.float32, *, with_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Hidden states, head, labels (a third of them ignored), bias."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[:, ::3] = -100
    return hidden, weight, labels, bias if with_bias else None


def full(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    **settings: Any,
) -> Tensor:
    logits = F.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **settings)


def with_gradients(
    loss: Callable[..., Tensor], *given: Any, **settings: Any
) -> list[Tensor | None]:
    """The loss (tripled, so that backward scales) and the gradients of its floating inputs."""
    wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    value = loss(*given, **settings)
    return [value.detach(), *torch.autograd.grad(3 * value, wanted)]


def assert_all_close(actual: list[Any], expected: list[Any], atol: float = 1e-6) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * ONE_ROW, 16 * ONE_ROW, 1 << 20])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "sum", "label_smoothing": 0.1},
        {"ignore_index": 7, "reduction": "mean"},
        {"logit_scale": 0.25, "softcap": 3.0, "label_smoothing": 0.2},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_it_is_torchs_loss(settings: dict[str, Any], chunk_bytes: int) -> None:
    """Loss and every gradient to 1e-6, from one token per chunk to all of them, with a bias and
    without."""
    for with_bias in (True, False):
        given = inputs(with_bias=with_bias)
        if "ignore_index" in settings:
            labels = given[2]
            labels[labels < 0] = settings["ignore_index"]
        # A sum over 14 labels, tripled: gradients of the order of ten, whose last bit is 1e-6.
        atol = 1e-6 if settings.get("reduction") != "sum" else 1e-5
        ours = with_gradients(linear_cross_entropy, *given, chunk_bytes=chunk_bytes, **settings)
        assert_all_close(ours, with_gradients(full, *given, **settings), atol)


def test_num_items_in_batch_divides_the_sum() -> None:
    """As in transformers: a number or a tensor, and the reduction does not matter."""
    given = inputs()
    expected = full(*given, reduction="sum") / 100
    for items in (100, torch.tensor(100)):
        assert torch.equal(linear_cross_entropy(*given, num_items_in_batch=items), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_of_one_chunk_is_torchs_to_the_bit(dtype: torch.dtype, reduction: Any) -> None:
    """Also in 16 bits, where the logits are widened behind the head as Hugging Face's loss does."""
    given = inputs(dtype)
    assert torch.equal(
        linear_cross_entropy(*given, reduction=reduction), full(*given, reduction=reduction)
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_counts(reduction: Any) -> None:
    """A microbatch whose labels are all ignored has loss 0 and gradients 0, never nan."""
    hidden, weight, labels, bias = inputs()
    results = with_gradients(
        linear_cross_entropy,
        hidden,
        weight,
        torch.full_like(labels, -100),
        bias,
        reduction=reduction,
    )
    for result in results:
        assert result is not None
        assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("divisor", [0, torch.tensor(0)], ids=["number", "tensor"])
def test_a_loss_over_no_items_is_nan_and_its_gradients_are_zeros(divisor: Any) -> None:
    """As of all the logits: what is logged says so, and a step changes nothing."""
    hidden, weight, labels, bias = inputs()
    given = hidden, weight, torch.full_like(labels, -100), bias
    ours = with_gradients(linear_cross_entropy, *given, num_items_in_batch=divisor)
    theirs = with_gradients(lambda *given: full(*given, reduction="sum") / torch.tensor(0), *given)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_positions_that_do_not_count_get_no_gradient_of_a_loss_that_overflowed() -> None:
    hidden, weight, labels, bias = inputs()
    (gradient,) = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels, bias) * torch.inf, hidden
    )
    assert torch.equal(gradient.isfinite(), (labels == -100).unsqueeze(-1).expand_as(gradient))


def test_no_tokens_at_all() -> None:
    hidden, weight, labels, _ = inputs(with_bias=False)
    results = with_gradients(linear_cross_entropy, hidden[:0], weight, labels[:0])
    assert [float(result.abs().sum()) for result in results if result is not None] == [
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_are_summed_wide_and_rounded_once(dtype: torch.dtype) -> None:
    """Many chunks of 16-bit weights are no worse than one: at most the last bit of the sum may
    differ."""
    generator = torch.Generator().manual_seed(1)
    tokens = 512
    hidden = torch.randn(tokens, WIDTH, generator=generator).add(1).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).mul(0.1).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    one, many = (
        with_gradients(
            linear_cross_entropy, hidden, weight, labels, reduction="sum", chunk_bytes=chunk_bytes
        )[2]
        for chunk_bytes in (1 << 20, 1)
    )
    last_bit = torch.finfo(dtype).eps
    torch.testing.assert_close(many, one, rtol=last_bit, atol=1e-6)

    # The same sum kept in 16 bits: this input would show it.
    bits = torch.zeros_like(weight)
    for token in range(tokens):
        d_logits = torch.autograd.functional.jacobian(
            lambda logits, token=token: F.cross_entropy(
                logits.float(), labels[token], reduction="sum"
            ),
            F.linear(hidden[token], weight).detach(),
        )
        bits += torch.outer(d_logits, hidden[token].detach())
    assert ((3 * bits - one).abs() > last_bit * one.abs() + 1e-6).any()


def test_under_autocast() -> None:
    """The product is made in autocast's dtype, as `linear` would; gradients come in the inputs'
    own."""
    given = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = with_gradients(linear_cross_entropy, *given, chunk_bytes=4 * ONE_ROW)
        theirs = with_gradients(full, *given)
    assert torch.equal(ours[0], theirs[0])
    assert_all_close(ours, theirs, atol=0.01)
    assert not torch.allclose(ours[1], with_gradients(full, *given)[1], rtol=0, atol=1e-6)


def test_double_precision() -> None:
    """Wider than fp32 stays wider."""
    given = inputs(torch.float64)
    settings: dict[str, Any] = {"softcap": 2.0, "label_smoothing": 0.1}
    ours = with_gradients(linear_cross_entropy, *given, chunk_bytes=8 * ONE_ROW, **settings)
    assert_all_close(ours, with_gradients(full, *given, **settings), atol=1e-12)


@pytest.mark.parametrize("frozen", [(0,), (1, 3), (0, 1)])
def test_frozen_inputs(frozen: tuple[int, ...]) -> None:
    """LoRA freezes the head, a linear probe everything below it: the rest gets its gradient all the
    same."""
    given = inputs()
    for index in frozen:
        given[index].requires_grad_(False)
    ours = with_gradients(linear_cross_entropy, *given, chunk_bytes=4 * ONE_ROW)
    assert len(ours) == 4 - len(frozen)
    assert_all_close(ours, with_gradients(full, *given))


def test_tied_head() -> None:
    """The embedding's weight is the head's: both uses add up."""
    _, weight, labels, _ = inputs(with_bias=False)
    tokens = torch.randint(VOCABULARY, labels.shape, generator=torch.Generator().manual_seed(3))

    def tied(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda weight: loss(F.embedding(tokens, weight).tanh(), weight, labels)

    assert_all_close(
        with_gradients(tied(linear_cross_entropy), weight), with_gradients(tied(full), weight)
    )


def test_without_grad_no_gradient_is_made() -> None:
    """Evaluation runs the head's product and the softmax, nothing else; a frozen head gets no
    product of its own."""

    def products(*given: Any) -> int:
        with LiveBytes() as live:
            linear_cross_entropy(*given)
        return sum(name.startswith(("mm", "addmm")) for name in live.operations)

    hidden, weight, labels, _ = inputs(with_bias=False)
    with torch.no_grad():
        assert products(hidden, weight, labels) == 1
    assert products(hidden, weight.detach(), labels) == 2
    assert products(hidden, weight, labels) == 3


@pytest.mark.parametrize("head_trains", [True, False])
def test_a_tenth_of_the_memory(head_trains: bool) -> None:
    """8K tokens, 152K vocabulary, width 2K and the default chunk, each sixteenth: the peak of
    forward and backward.

    In fp32: a CPU multiplies 16-bit factors only after widening them, so that their peak is not the
    GPU's.
    """
    sixteenth = 16
    tokens, vocabulary, width = 8192 // sixteenth, 151_936 // sixteenth, 2048 // sixteenth
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=head_trains)
    labels = torch.randint(vocabulary, (tokens,))

    with LiveBytes() as ours:
        linear_cross_entropy(
            hidden, weight, labels, chunk_bytes=DEFAULT_CHUNK_BYTES // sixteenth**2
        ).backward()
    hidden.grad = weight.grad = None
    with LiveBytes() as theirs:
        logits = F.linear(
            hidden, weight
        )  # held until after backward, as a Hugging Face model's output holds them
        F.cross_entropy(logits.float(), labels).backward()
    assert ours.peak < theirs.peak / 10


def test_memory_does_not_grow_with_the_tokens() -> None:
    """Four times the tokens: only the gradient of the hidden states and the losses grow."""
    weight = torch.randn(2000, 16, requires_grad=True)

    def peak(tokens: int) -> int:
        hidden, labels = torch.randn(tokens, 16, requires_grad=True), torch.randint(2000, (tokens,))
        with LiveBytes() as live:
            linear_cross_entropy(hidden, weight, labels, chunk_bytes=64 * 2000 * 4).backward()
        return live.peak

    assert peak(2048) - peak(512) < 1536 * (3 * 16 * 4 + 64)


def test_a_second_backward_is_refused() -> None:
    """The gradients were scaled in place and handed over: computing on with them would be silently
    wrong."""
    loss = linear_cross_entropy(*inputs())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_shapes_that_do_not_go_together_are_named() -> None:
    hidden, weight, labels, _ = inputs()
    with pytest.raises(ConfigError, match=r"\(3, 7\), labels have \(3, 6\)"):
        linear_cross_entropy(hidden, weight, labels[:, 1:])


class LossHead(nn.Module):
    """The last layer of a pipeline: its output is the microbatch's loss."""

    def __init__(self, tied_to: nn.Embedding) -> None:
        super().__init__()
        self.weight = tied_to.weight

    def forward(self, hidden: Tensor) -> Tensor:
        labels = torch.arange(hidden.shape[0] * hidden.shape[1]).view(hidden.shape[:2]) % VOCABULARY
        return linear_cross_entropy(
            hidden, self.weight, labels, reduction="sum", chunk_bytes=4 * ONE_ROW
        )


@pytest.mark.parametrize("devices", [ONE, THREE], ids=str)
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_as_the_last_layer_of_a_pipeline(engines: Engines, devices: DeviceSet, grain: Any) -> None:
    """Fused, recomputed, tied to the embedding at the other end: the numbers of the same modules
    without an engine."""
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    model = nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Tanh(), LossHead(embedding))
    tokens = torch.randint(VOCABULARY, (4, LENGTH))
    losses = [model(row) for row in tokens.split(1)]
    expected = torch.autograd.grad(sum(losses), list(model.parameters()))
    engine = engines(model, devices)
    loss = engine.forward_backward(
        (tokens,), run_config=RoundPipeRunConfig(num_microbatch=4, recompute_grain=grain)
    )
    torch.testing.assert_close(loss, sum(losses).detach(), rtol=0, atol=1e-5)
    assert_all_close(list(engine_gradients(engine).values()), list(expected), atol=1e-5)
