"""Tiny random models of an encoder and a decoder, and what they are called with. Seeded inside;
knows nothing of the engine."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BartConfig,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    PegasusConfig,
    WhisperConfig,
)

ROWS, SOURCE, TARGET, SOUNDS = 4, 9, 7, 12
WIDTH, VOCABULARY, BINS = 16, 50, 8
CONFIGS: dict[str, type[Any]] = {
    "bart": BartConfig,
    "mbart": MBartConfig,
    "marian": MarianConfig,
    "pegasus": PegasusConfig,
    "m2m100": M2M100Config,
    "whisper": WhisperConfig,
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
OF_SOUND = {"num_mel_bins": BINS, "max_source_positions": SOUNDS, "max_target_positions": 16}
LAYERS = 3 + SIZES["encoder_layers"] + SIZES["decoder_layers"]


def make(name: str, **settings: Any) -> Any:
    """A model in training mode."""
    torch.manual_seed(0)
    config = CONFIGS[name](**SIZES | (OF_SOUND if name == "whisper" else {}) | settings)
    auto = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    return auto.from_config(config).train()


def sources(name: str, rows: int = ROWS) -> dict[str, Tensor]:
    """Sounds, or text that is padded on either side."""
    generator = torch.Generator().manual_seed(0)
    if name == "whisper":
        return {"input_features": torch.randn(rows, BINS, 2 * SOUNDS, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (rows, SOURCE), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    mask[2, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def labels(rows: int = ROWS) -> Tensor:
    """Some rows have fewer than others."""
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(3, VOCABULARY, (rows, TARGET), generator=generator)
    made[0, 3:] = -100
    made[2, 5:] = -100
    return made


def labelled(name: str) -> dict[str, Any]:
    """The last row has no label that counts, so a microbatch may have none; mBART starts its
    decoder with the last that does."""
    made = labels()
    made[3, name == "mbart" :] = -100
    return {**sources(name), "labels": made}


def started(name: str) -> dict[str, Any]:
    """Some of what the decoder starts with is padding; the loss is of other labels."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, VOCABULARY, (ROWS, TARGET), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {**labelled(name), "decoder_input_ids": ids, "decoder_attention_mask": mask}


def rows_of(name: str, rows: int = 6) -> list[dict[str, Tensor]]:
    """A data set."""
    columns = {**sources(name, rows), "labels": labels(rows)}
    return [{key: column[row] for key, column in columns.items()} for row in range(rows)]
