"""Writes a checkpoint as a GGUF file, as llama.cpp and what is built on it read it."""

import errno
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from roundpipe.errors import ConfigError
from roundpipe.system.progress import progress

from ..files import Checkpoint
from ..folders import check_room, save_whole
from ..loading import config_of
from .vocabulary import Vocabulary
from .weights import Weights, dense

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DTYPES = {"f16": "MOSTLY_F16", "q8_0": "MOSTLY_Q8_0"}
_MADE_ANEW = ("rotary_emb.inv_freq",)  # in old checkpoints; no weight
_QUERY_OR_KEY = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")
_PIECE = 2**22  # elements that are quantized at once


def export_gguf(model: str | Path, out: str | Path, dtype: str = "f16") -> None:
    """Writes a checkpoint of a Llama, Qwen2 or Qwen3 model as a GGUF file, with its tokenizer.

    One tensor is in memory at once. A checkpoint that is quantized (NF4, FP8, int8) is read
    dequantized. Vectors, of norms for example, are written in float32. Needs the extra ``gguf``.

    Args:
        model: a folder with safetensors files, as `merge_and_save` writes it, or the name of a
            model in the Hub's cache.
        out: the new file.
        dtype: that of matrices: ``"f16"``, or ``"q8_0"``, 8.5 bits for each weight. Rows that do
            not divide into blocks of 32 weights are ``"f16"`` then as well.

    Raises:
        ConfigError: another architecture, dtype or kind of tokenizer, a setting of the model that
            this does not export, a file that is there already, too little room on its disk, or a
            value that is too large for float16. There is no new file.
        OSError: the disk ran full. There is no new file.

    Example:
        >>> merge_and_save("outputs/adapter", "path/to/base", "outputs/merged")
        >>> export_gguf("outputs/merged", "outputs/model.gguf", dtype="q8_0")
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; {', '.join(map(repr, _DTYPES))} can be written")
    try:
        import gguf
    except ImportError as error:
        raise ConfigError("GGUF files need `pip install roundpipe-hf[gguf]`") from error
    target = Path(out)
    if target.exists():
        raise ConfigError(f"{target} is there already; name another file or remove it")
    checkpoint, config = Checkpoint(model, {}), config_of(model, {})
    architecture = _architecture(config)
    file = _File(gguf, checkpoint, config, architecture, dtype)
    check_room(target, file.num_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Because others may write here, and have files of any name.
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    save_whole(target, file.write, file.num_bytes, beside=beside)


def _architecture(config: Any) -> str:
    """Raises ConfigError if the model is, or has, something that is not exported."""
    name = (config.architectures or ["none"])[0]
    if name not in _ARCHITECTURES:
        raise ConfigError(f"{name} is not exported to GGUF; {', '.join(_ARCHITECTURES)} are")
    rope = _rope(config)
    known = ("default", "llama3") if name == "LlamaForCausalLM" else ("default",)
    settings = {
        "hidden_act": (config.hidden_act, ("silu",)),
        "rope_type": (rope.get("rope_type", "default"), known),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), (1.0,)),
        "use_sliding_window": (getattr(config, "use_sliding_window", False), (False,)),
    }
    for setting, (value, exported) in settings.items():
        if value not in exported:
            raise ConfigError(f"{name} with {setting}={value!r} is not exported to GGUF")
    return _ARCHITECTURES[name]


def _rope(config: Any) -> dict[str, Any]:
    return dict(getattr(config, "rope_parameters", None) or {})


def _head_dim(config: Any) -> int:
    said = getattr(config, "head_dim", None)
    return int(said or config.hidden_size // config.num_attention_heads)


class _File:
    """What is in the new file, known before it is written."""

    def __init__(
        self, gguf: Any, checkpoint: Checkpoint, config: Any, architecture: str, dtype: str
    ) -> None:
        self._gguf, self._config, self._architecture = gguf, config, architecture
        self._name, self._dtype = checkpoint.folder.name, dtype
        self._vocabulary = Vocabulary(checkpoint.folder, config.vocab_size)
        weights = Weights(checkpoint.files, config).tensors
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
        self._weights: dict[str, tuple[str, torch.Tensor]] = {}
        for key, weight in weights.items():
            if key.endswith(_MADE_ANEW) or (key == "lm_head.weight" and self._is_tied(weights)):
                continue
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise ConfigError(f"{key} has no name in a GGUF file of {architecture}")
            self._weights[name] = (key, weight)
        if not config.tie_word_embeddings and "output.weight" not in self._weights:
            raise ConfigError(f"{checkpoint.folder} has no lm_head.weight, which is not tied")
        if _rope(config).get("rope_type") == "llama3":
            self._weights["rope_freqs.weight"] = ("", _frequency_factors(config))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(self._size(weight) for _, weight in self._weights.values())

    def write(self, path: Path) -> None:
        """Writes the file to ``path``."""
        types = self._gguf.GGMLQuantizationType
        writer = self._gguf.GGUFWriter(path, self._architecture)
        try:
            self._describe(writer)
            for name, (_, weight) in self._weights.items():
                kind = self._kind(weight)
                how = {"F32": np.float32, "F16": np.float16}.get(kind, np.float32)
                shape, size = weight.shape, self._size(weight)
                writer.add_tensor_info(name, shape, np.dtype(how), size, raw_dtype=types[kind])
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            with progress(
                total=self.num_bytes, desc=f"Writing {self._dtype}", unit="B", unit_scale=True
            ) as bar:
                for key, weight in self._weights.values():
                    _write(writer, self._content(key, weight))
                    bar.update(self._size(weight))
        finally:
            writer.close()

    def _is_tied(self, weights: dict[str, torch.Tensor]) -> bool:
        head, embeddings = weights["lm_head.weight"], weights.get("model.embed_tokens.weight")
        same = embeddings is not None and torch.equal(dense(head), dense(embeddings))
        return bool(self._config.tie_word_embeddings) and same

    def _describe(self, writer: Any) -> None:
        config, head_dim = self._config, _head_dim(self._config)
        writer.add_type("model")
        writer.add_name(self._name)
        writer.add_file_type(int(self._gguf.LlamaFileType[_DTYPES[self._dtype]]))
        writer.add_quantization_version(self._gguf.GGML_QUANT_VERSION)
        writer.add_vocab_size(config.vocab_size)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(_rope(config)["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        self._vocabulary.write_to(writer)

    def _kind(self, weight: torch.Tensor) -> str:
        if weight.dim() < 2:
            return "F32"
        is_blocks = self._dtype == "q8_0" and weight.shape[-1] % 32 == 0
        return "Q8_0" if is_blocks else "F16"

    def _size(self, weight: torch.Tensor) -> int:
        # A block of 32 weights and its scale are 34 bytes.
        per_weight = {"F32": 4.0, "F16": 2.0, "Q8_0": 34 / 32}
        return int(weight.numel() * per_weight[self._kind(weight)])

    def _content(self, key: str, weight: torch.Tensor) -> np.ndarray[Any, Any]:
        found = _QUERY_OR_KEY.search(key) if self._architecture == "llama" else None
        value = dense(weight).detach()
        if found:
            config = self._config
            heads = config.num_attention_heads if found[1] == "q" else config.num_key_value_heads
            value = _pairs_together(value, heads)
        kind = self._kind(weight)
        if kind == "F32":
            return value.float().numpy()
        if kind == "F16":
            halves = value.to(torch.float16)
            if value.dtype != torch.float16 and not torch.equal(halves.isinf(), value.isinf()):
                raise ConfigError(f"{key} has values that are too large for float16; use 'q8_0'")
            return halves.numpy()
        quantize = partial(self._gguf.quantize, qtype=self._gguf.GGMLQuantizationType.Q8_0)
        rows, columns = value.reshape(-1, value.shape[-1]), value.shape[-1]
        content = np.empty((rows.shape[0], columns // 32 * 34), dtype=np.uint8)
        step = max(_PIECE // columns, 1)
        for start in range(0, rows.shape[0], step):
            content[start : start + step] = quantize(rows[start : start + step].float().numpy())
        return content


def _write(writer: Any, content: np.ndarray[Any, Any]) -> None:
    try:
        writer.write_tensor_data(content)
    except OSError as error:
        # NumPy only says that it wrote less than it wanted to.
        raise OSError(error.errno or errno.ENOSPC, str(error)) from error


def _pairs_together(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys of Llama in the order that GGUF has: the two numbers of a pair that
    rotary embeddings turn beside each other, not half a head apart."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _frequency_factors(config: Any) -> torch.Tensor:
    """By how much Llama 3 slows down each frequency of its rotary embeddings; (head_dim / 2,)."""
    slowed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    head_dim = _head_dim(config)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain: torch.Tensor = 1.0 / _rope(config)["rope_theta"] ** exponents
    return plain / slowed
