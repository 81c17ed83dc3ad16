"""A tokenizer as GGUF files describe it: byte pairs over bytes, as GPT-2, Llama 3 and Qwen have."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from roundpipe.errors import ConfigError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Who reads a GGUF file knows by a name how text is cut into words before pairs are joined. By what
# tokenizer.json says of it: the patterns, whether GPT-2's own cuts bytes, and whether a word that
# is a token needs no pairs.
_CUTS: dict[tuple[tuple[str, ...], bool, bool], str] = {
    ((), True, False): "gpt-2",
    (("digits",), True, False): "smollm",
    ((_WORDS % "",), False, False): "qwen2",
    ((_WORDS % "{1,3}",), False, True): "llama-bpe",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


class Vocabulary:
    """What a GGUF file says of the tokenizer in a folder.

    Args:
        folder: with a tokenizer.json.
        size: how many tokens the model has; those that the tokenizer lacks are named so.

    Raises:
        ConfigError: no tokenizer, one that is not byte pairs over bytes (sentencepiece), one that
            cuts words in an unknown way, or one with more tokens than the model.
    """

    def __init__(self, folder: Path, size: int) -> None:
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ConfigError(f"{folder} has no tokenizer.json, without which no GGUF file is read")
        said = json.loads(file.read_text())
        self.cut = _cut(file, said)
        added = {one["id"]: one for one in said["added_tokens"]}
        tokens = {number: token for token, number in said["model"]["vocab"].items()}
        tokens |= {number: one["content"] for number, one in added.items()}
        if max(tokens) >= size:
            raise ConfigError(f"{file} has {max(tokens) + 1} tokens, the model {size}")
        self.tokens = [tokens.get(number, f"[PAD{number}]") for number in range(size)]
        self.types = [
            _UNUSED if number not in tokens else _type(added.get(number)) for number in range(size)
        ]
        merges = said["model"]["merges"]
        self.merges = [one if isinstance(one, str) else " ".join(one) for one in merges]
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def write_to(self, writer: Any) -> None:
        """Adds all of it to a `gguf.GGUFWriter`."""
        tokenizer = self._tokenizer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.cut)
        writer.add_add_space_prefix(False)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        for name in ("bos", "eos", "unk", "pad"):
            number = getattr(tokenizer, f"{name}_token_id")
            if number is not None:
                getattr(writer, f"add_{name}_token_id")(number)
        first = tokenizer("a")["input_ids"][:1]
        writer.add_add_bos_token(first == [tokenizer.bos_token_id])
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)


def _type(added: Any) -> int:
    if added is None:
        return _NORMAL
    return _CONTROL if added["special"] else _USER_DEFINED


def _cut(file: Path, said: Any) -> str:
    before = said.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    over_bytes = [one for one in steps if one.get("type") == "ByteLevel"]
    if said["model"].get("type") != "BPE" or not over_bytes:
        raise ConfigError(
            f"{file} is no tokenizer of byte pairs over bytes (as sentencepiece's is none); those "
            "of GPT-2, Llama 3, Qwen and SmolLM are exported"
        )
    patterns = tuple(_pattern(one) for one in steps if one not in over_bytes)
    is_whole = bool(said["model"].get("ignore_merges"))
    key = (patterns, bool(over_bytes[0].get("use_regex", True)), is_whole)
    # Readers of GGUF do without Qwen's normal form of characters.
    normal = said.get("normalizer") or {"type": "NFC"}
    changes_text = any(one["type"] != "NFC" for one in normal.get("normalizers", [normal]))
    if key not in _CUTS or over_bytes[0].get("add_prefix_space") or changes_text:
        raise ConfigError(
            f"{file} cuts words in a way that has no name in GGUF that is known here: {steps}, "
            f"ignore_merges={is_whole}, normalizer {said.get('normalizer')}; "
            f"known are {', '.join(_CUTS.values())}"
        )
    return _CUTS[key]


def _pattern(step: Any) -> str:
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return "digits"
    is_split = step.get("type") == "Split" and step.get("behavior") == "Isolated"
    return str(step["pattern"].get("Regex")) if is_split and not step.get("invert") else str(step)
