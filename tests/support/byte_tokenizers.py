"""Small tokenizers over bytes, as models of several families have them."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from roundpipe_hf.export.vocabulary import _WORDS

TEXT = "Numbers such as 1234, and words that aren't; a tab\tand new\n\nlines."


def tokenizer_of(cut: str) -> PreTrainedTokenizerFast:
    own = Tokenizer(models.BPE(ignore_merges=cut == "llama-bpe"))
    over_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    without = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = {"qwen2": "", "llama-bpe": "{1,3}"}
    if cut == "gpt-2":
        own.pre_tokenizer = over_bytes
    elif cut == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        own.pre_tokenizer = pre_tokenizers.Sequence([digits, over_bytes])
    else:
        split = pre_tokenizers.Split(Regex(_WORDS % words[cut]), "isolated")
        own.pre_tokenizer = pre_tokenizers.Sequence([split, without])
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    own.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
