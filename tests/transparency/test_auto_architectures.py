"""Twelve architectures of transformers through `AutoRoundPipe`, from tiny random configs: gradients
of the plain model.

Encoders, decoders, both, two towers, images, sound, a state space model. None by a preset, although
some have one.
"""

import copy
from typing import Any

import pytest
import torch

from roundpipe import AutoRoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from tests.support.device_sets import THREE

ROWS = 4
pytestmark = pytest.mark.slow

TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
IMAGES = {**TEXT, "image_size": 32, "patch_size": 8}
TWO_STACKS = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SOUND = {
    **TEXT,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0
    ),
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Class of the model, settings of its config, what it is called with.
ARCHITECTURES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "GPT2LMHeadModel": (
        {
            "vocab_size": 50,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
        ("input_ids", "attention_mask", "token_labels"),
    ),
    "DistilBertForMaskedLM": (
        {
            "vocab_size": 50,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        ("input_ids", "attention_mask", "token_labels"),
    ),
    "DebertaV2ForSequenceClassification": (
        {
            **TEXT,
            **NO_DROPOUT,
            "vocab_size": 50,
            "pooler_dropout": 0.0,
            "pooler_hidden_size": 16,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
        },
        ("input_ids", "attention_mask", "labels"),
    ),
    "ModernBertForSequenceClassification": (
        {**TEXT, **SPECIAL, "vocab_size": 50, "cls_token_id": 1, "sep_token_id": 2},
        ("input_ids", "attention_mask", "labels"),
    ),
    "BartForConditionalGeneration": (TWO_STACKS, ("input_ids", "attention_mask", "token_labels")),
    "WhisperForConditionalGeneration": (
        {
            **TWO_STACKS,
            **SPECIAL,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "decoder_start_token_id": 1,
        },
        ("input_features", "token_labels"),
    ),
    "CLIPModel": (
        {
            "text_config": {**TEXT, **SPECIAL, "vocab_size": 50, "max_position_embeddings": 16},
            "vision_config": IMAGES,
            "projection_dim": 8,
        },
        ("input_ids", "attention_mask", "pixel_values", "return_loss"),
    ),
    "ViTForImageClassification": ({**IMAGES, **NO_DROPOUT}, ("pixel_values", "labels")),
    "SwinForImageClassification": (
        {
            **NO_DROPOUT,
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 2],
            "num_heads": [1, 2],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
        ("pixel_values", "labels"),
    ),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        ("pixel_values", "labels"),
    ),
    "Wav2Vec2ForSequenceClassification": (SOUND, ("input_values", "labels")),
    "MambaForCausalLM": (
        {"vocab_size": 50, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2},
        ("input_ids", "token_labels"),
    ),
}


def inputs_of(names: tuple[str, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 50, (ROWS, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, 6:] = 0
    everything = {
        "input_ids": ids,
        "attention_mask": mask,
        "token_labels": ids.masked_fill(mask == 0, -100),
        "labels": torch.arange(ROWS) % 2,
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator),
        "input_features": torch.randn(ROWS, 8, 32, generator=generator),
        "input_values": torch.randn(ROWS, 400, generator=generator),
        "return_loss": True,
    }
    return {name.removeprefix("token_"): everything[name] for name in names}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients(name: str) -> None:
    """Batches of four rows in three microbatches; batch statistics (of the ResNet) are those of
    evaluation."""
    import transformers

    settings, names = ARCHITECTURES[name]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).train(
        name != "ResNetForImageClassification"
    )
    plain, inputs = copy.deepcopy(model), inputs_of(names)
    expected = plain(**inputs).loss
    expected.backward()
    with wrap_model_to_roundpipe(
        model,
        use_sequential_preset=False,
        devices=3,
        lower_threshold=600,
        upper_threshold=1500,
        model_run_config=RoundPipeRunConfig(num_microbatch=3),
    ) as engine:
        assert type(engine) is AutoRoundPipe
        assert len(engine.statistics()["engines"]) >= 4
        loss = engine(**inputs).loss
        loss.backward()
        engine.synchronize()
        THREE.check(loss, expected, bitwise=False)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        THREE.check(
            found,
            {name: p.grad for name, p in plain.named_parameters() if p.grad is not None},
            bitwise=False,
        )
