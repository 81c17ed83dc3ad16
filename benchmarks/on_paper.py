"""No measurements of ours: what plans promise on machines that were never at hand.

    python benchmarks/on_paper.py

* Eight RTX 4090 behind PCIe gen4: published milliseconds of a layer at 8,192 tokens go through the
  planner and the simulator, with the weights' and gradients' copies and the host's update, and
  stand beside the published tokens/s of round-robin training on such a machine.
* DeepSeek-V3 (671 G parameters) in FP8 with adapters on cards of 32 GB: bytes over the links and
  operations, at stated rates, beside the published tokens/s of training it on eight such cards.
"""

from dataclasses import replace
from typing import NamedTuple

import measure

from roundpipe import ModelExecutePlan
from roundpipe.plan.best import plan_for, step_ms
from roundpipe.plan.costs import LayerCosts, Workload
from roundpipe.plan.memory import slot_counts

COLUMNS = ["what", "mode", "plan", "bubble_pct", "tokens_per_s", "published", "ratio"]
TOKENS = 8192  # of a microbatch
CARDS, MICROBATCHES = 8, 16
LINK = 25e9  # bytes/s of PCIe gen4 x16, each way
UPDATE = 4e9  # parameters/s of a host's fused AdamW
MEMORY = 24e9


class Shapes(NamedTuple):
    """Milliseconds of a layer and of the head (forward, backward without recompute), as published,
    and sizes in elements."""

    name: str
    blocks: int
    block_ms: tuple[float, float]
    head_ms: tuple[float, float]
    hidden: int
    block: int  # weights
    head: int
    kept: int  # what autograd keeps of a block, for a token
    is_lora: bool
    published: tuple[int, int]  # asynchronous, synchronous


RTX_4090 = [
    Shapes("Qwen3-1.7B full", 28, (7.43, 15.8), (22.1, 43.7), 2048, 50_331_648,
           311_164_928, 45_000, False, (65_417, 56_489)),
    Shapes("Llama-3.1-8B full", 32, (18.5, 41.2), (37.2, 74.5), 4096, 218_103_808,
           525_336_576, 100_000, False, (24_275, 18_888)),
    Shapes("Qwen3-32B full", 64, (40.6, 91.2), (54.9, 108.0), 5120, 487_587_840,
           777_912_320, 160_000, False, (5_516, 4_164)),
    Shapes("Qwen3-235B LoRA", 94, (43.0, 58.4), (42.4, 43.3), 4096, 2_487_222_272,
           622_329_856, 150_000, True, (1_820, 1_592)),
]  # fmt: skip


def costs_of(shapes: Shapes) -> LayerCosts:
    """An embedding, the blocks, the head, for one microbatch in 16 bits."""
    sizes = [shapes.head, *[shapes.block] * shapes.blocks, shapes.head]
    gradients = [0 if shapes.is_lora else 2 * size for size in sizes]
    inputs = 2 * TOKENS * shapes.hidden
    kept = 2 * TOKENS * shapes.kept
    return LayerCosts(
        forward=(0.0, *[shapes.block_ms[0]] * shapes.blocks, shapes.head_ms[0]),
        backward=(0.0, *[shapes.block_ms[1]] * shapes.blocks, shapes.head_ms[1]),
        weight_bytes=tuple(2 * size for size in sizes),
        gradient_bytes=tuple(2 * size for size in gradients),  # summed in fp32
        offloaded_bytes=tuple(gradients),
        saved_bytes=(0, *[kept] * shapes.blocks, inputs),
        input_bytes=(8 * TOKENS, *[inputs] * (shapes.blocks + 1)),
        up_ms_per_byte=1e3 / LINK,
        down_ms_per_byte=1e3 / LINK,
    )


def predicted(shapes: Shapes, *, overlaps: bool) -> measure.Record:
    costs = costs_of(shapes)
    trained = 0 if shapes.is_lora else 2 * shapes.head + shapes.blocks * shapes.block
    workload = Workload(
        num_devices=CARDS,
        num_microbatches=MICROBATCHES,
        overlaps=overlaps,
        limit_bytes=MEMORY,
        may_share=True,
        optimizer_ms=1e3 * trained / UPDATE,
    )
    plan = plan_for("fused", costs, workload)
    took = step_ms(plan, "fused", costs, workload)
    alone = replace(workload, optimizer_ms=0.0)
    # What one card would compute without waiting for anything, and without the update.
    computed = MICROBATCHES * computed_ms(plan, costs) / CARDS
    published = shapes.published[0 if overlaps else 1]
    tokens = MICROBATCHES * TOKENS / took * 1e3
    return {
        "what": f"8 x RTX 4090, {shapes.name}, {MICROBATCHES} x {TOKENS} tokens",
        "mode": "async" if overlaps else "sync",
        "plan": f"{len(plan.fwd_plan)} stages forward, {len(plan.bwd_plan)} backward",
        "bubble_pct": round(100 * (1 - computed / step_ms(plan, "fused", costs, alone)), 1),
        "tokens_per_s": tokens,
        "published": published,
        "ratio": tokens / published,
    }


def computed_ms(plan: ModelExecutePlan, costs: LayerCosts) -> float:
    """All computing of one microbatch: what fused stages do not compute again, and the rest."""
    forward = {layer for stage in plan.fwd_plan for layer in stage}
    again = sum(costs.recompute[layer] for layer in forward)
    return sum(costs.forward) + sum(costs.backward) + again


class Card(NamedTuple):
    memory: float
    link: float  # bytes/s
    flops: float  # that matrix products reach


DEEPSEEK_BYTES = 671e9
DEEPSEEK_ACTIVE = 37e9
DEEPSEEK_LAYER = 256 * 3 * 7168 * 2048  # elements of a layer's experts
RTX_5090 = Card(32e9, 50e9, 125e12)


def deepseek(cards: int, tokens: int, card: Card = RTX_5090) -> measure.Record:
    """Weights go up for the forward and again for the backward; a token takes two operations for
    each active parameter in forward, recompute, and gradients of inputs."""
    link = 2 * DEEPSEEK_BYTES / (cards * card.link)
    compute = 3 * 2 * DEEPSEEK_ACTIVE * tokens / (cards * card.flops)
    layer = (1 + 2) * DEEPSEEK_LAYER  # its bytes, and what is unpacked from them to bf16
    counts = slot_counts([range(1), range(1, 2)], (layer, layer), 1)
    slots = sum(size * count for size, count in counts.items())
    return {
        "what": f"DeepSeek-V3 FP8 LoRA, {cards} x 32 GB, {tokens} tokens a step",
        "mode": f"link {link:.1f} s, compute {compute:.1f} s",
        "plan": f"slots of two layers: {slots / 1e9:.1f} GB of {card.memory / 1e9:.0f}",
        "bubble_pct": "",
        "tokens_per_s": tokens / max(link, compute),
        "published": 136 if cards == CARDS else "",
        "ratio": tokens / max(link, compute) / 136 if cards == CARDS else "",
    }


def main() -> None:
    records = [predicted(one, overlaps=overlaps) for one in RTX_4090 for overlaps in (True, False)]
    records += [deepseek(cards, tokens) for cards in (1, CARDS) for tokens in (8192, 65536)]
    print(measure.table(records, COLUMNS))


if __name__ == "__main__":
    main()
