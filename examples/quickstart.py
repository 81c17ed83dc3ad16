"""LoRA-fine-tune a real pretrained model with RoundPipeTrainer, end to end, on whatever this
machine has.

    python examples/quickstart.py               # every GPU there is, else the CPU
    python examples/quickstart.py --devices 3   # three virtual devices on the CPU: the same losses

SmolLM2-135M learns to answer "Tell me about X." in the manner of an encyclopedia. So short a run
changes its style, not what it knows.
"""

import argparse
import random
import sys
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    set_seed,
)

from fetch_assets import AssetError, Summary, smollm2_folder, wiki_summaries
from roundpipe import RoundPipe, virtual
from roundpipe_hf import RoundPipeTrainer, RoundPipeTrainingArguments

Row = dict[str, list[int]]

TOPIC = "Jupiter"
MAX_TOKENS = 80
BATCH_SIZE = 8
HELD_OUT = 3 * BATCH_SIZE
# With the same microbatches every number of devices gives the same numbers; the default would
# depend on it.
NUM_MICROBATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--devices",
        type=int,
        help="use this many virtual CPU devices; default: every GPU, else one",
    )
    parser.add_argument(
        "--steps", type=int, default=12, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/quickstart"), help="folder for the adapter"
    )
    options = parser.parse_args()
    for name in ("devices", "steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; give at least 1")
    try:
        fine_tune(options.devices, options.steps, options.output)
    except AssetError as error:
        sys.exit(f"error: {error}")


def fine_tune(devices: int | None, steps: int, output: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    collator = DataCollatorForSeq2Seq(tokenizer)
    rows = short_rows(tokenizer, HELD_OUT + steps * BATCH_SIZE)
    held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]

    set_seed(0)
    adapter = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    model = get_peft_model(pretrained(), adapter)
    print(
        f"\n{model.get_nb_trainable_parameters()[0]:,} of {model.num_parameters():,} parameters "
        "are trained (LoRA)"
    )
    answer_before = answer(model, tokenizer)

    trainer = RoundPipeTrainer(
        model=model,
        args=RoundPipeTrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=BATCH_SIZE,
            max_steps=steps,
            learning_rate=1e-3,
            logging_steps=4,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=False,
            devices=None if devices is None else virtual(devices),
            num_microbatch=NUM_MICROBATCH,
        ),
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=collator,
    )
    trainer.add_callback(ShowPlan(trainer))
    loss_before = trainer.evaluate()["eval_loss"]
    trainer.train()
    loss_after = trainer.evaluate()["eval_loss"]
    trainer.save_model()

    print(
        f"\nTell me about {TOPIC}.\n  before: {answer_before}\n  after:  {answer(model, tokenizer)}"
    )
    print(f"\nHeld-out loss  before: {loss_before:.6f}  after: {loss_after:.6f}")
    loss_reloaded = held_out_loss(
        PeftModel.from_pretrained(pretrained(), output),
        DataLoader(held_out, BATCH_SIZE, collate_fn=collator),
    )
    print(f"Adapter saved to {output}; reloaded with plain PEFT its loss is {loss_reloaded:.6f}")
    if abs(loss_reloaded - loss_after) > 1e-4:
        sys.exit("error: the reloaded adapter gives another loss than the trained model")


def pretrained() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)


def short_rows(tokenizer: PreTrainedTokenizerBase, count: int) -> list[Row]:
    """``count`` rows of at most ``MAX_TOKENS``, in an order that never changes."""
    summaries = wiki_summaries()
    random.Random(0).shuffle(summaries)
    rows = (encode(tokenizer, summary) for summary in summaries if summary.title != TOPIC)
    return list(islice((row for row in rows if len(row["input_ids"]) <= MAX_TOKENS), count))


def encode(tokenizer: PreTrainedTokenizerBase, summary: Summary) -> Row:
    """A question and its answer, where only the answer counts for the loss."""
    question = encode_question(tokenizer, summary.title)
    text = tokenizer(summary.extract + tokenizer.eos_token)["input_ids"]
    return {"input_ids": question + text, "labels": [-100] * len(question) + text}


def encode_question(tokenizer: PreTrainedTokenizerBase, title: str) -> list[int]:
    chat = [{"role": "user", "content": f"Tell me about {title}."}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def answer(model: PeftModel, tokenizer: PreTrainedTokenizerBase) -> str:
    question = torch.tensor([encode_question(tokenizer, TOPIC)])
    model.eval()
    tokens = model.generate(
        input_ids=question,
        attention_mask=torch.ones_like(question),
        max_new_tokens=40,
        do_sample=False,
    )
    return tokenizer.decode(tokens[0, question.shape[1] :], skip_special_tokens=True).strip()


class ShowPlan(TrainerCallback):
    """Says, before the first step, where the model runs, how it was cut and what each stage
    uploads."""

    def __init__(self, trainer: RoundPipeTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: object, **__: object) -> None:
        tqdm.write(
            describe(self.trainer.model_wrapped)
        )  # not print, because the progress bar is there already


def describe(engine: RoundPipe) -> str:
    sizes = engine.statistics()["layer_bytes"]
    plan = engine.execute_plan
    backward = [
        "forward, loss and backward",
        *["recompute and backward"] * (len(plan.bwd_plan) - 1),
    ]
    passes = [
        *(("forward", stage) for stage in plan.fwd_plan),
        *zip(backward, plan.bwd_plan, strict=True),
    ]
    lines = [
        f"\nDevices: {', '.join(device.name for device in engine.devices)}",
        f"Plan for {len(sizes)} layers, {mebibytes(sum(sizes))} of weights, {NUM_MICROBATCH} "
        "microbatches:",
    ]
    for name, stage in passes:
        size = sum(sizes[layer] for layer in stage)
        lines.append(
            f"  layers {stage.start:2} to {stage.stop - 1:2}  {mebibytes(size):>10}  {name}"
        )
    return "\n".join(lines)


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def held_out_loss(model: PeftModel, batches: DataLoader[Row]) -> float:
    """What ``trainer.evaluate()`` measures, by plain PyTorch: the mean of the batches' losses."""
    model.eval()
    with torch.no_grad():
        return sum(model(**batch).loss.item() for batch in batches) / len(batches)


if __name__ == "__main__":
    main()
