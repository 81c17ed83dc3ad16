"""A tokenizer, text and images small enough to train on in a second. Made offline."""

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "bird",
    "sees",
    "hears",
    "likes",
    "old",
    "small",
    "red",
    "house",
    "tree",
    "and",
    ".",
]
LLAMA = [
    *("--model_type", "llama"),
    "--config_overrides",
    "vocab_size=32,hidden_size=16,intermediate_size=24,num_hidden_layers=2,num_attention_heads=2,"
    "num_key_value_heads=2,max_position_embeddings=64",
]
QUIET = ["--report_to", "none", "--disable_tqdm", "True", "--use_cpu", "--save_strategy", "no"]


def save_tokenizer(folder: Path) -> Path:
    """One token per word of `WORDS`."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=64,
    )
    fast.save_pretrained(folder)
    return folder


def sentences(count: int, seed: int = 0) -> list[str]:
    """Of 4 to 11 words."""
    draws = np.random.default_rng(seed)
    return [" ".join(draws.choice(WORDS, size=draws.integers(4, 12))) + " ." for _ in range(count)]


def save_images(folder: Path, count: int = 6) -> Path:
    """Two classes of tiny images: bright above, bright below."""
    from PIL import Image

    draws = np.random.default_rng(0)
    for name in ("above", "below"):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = draws.integers(0, 60, size=(9, 8, 3), dtype=np.uint8)
            pixels[: 4 if name == "above" else None, :][-4 if name == "below" else 0 :] += 150
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder
