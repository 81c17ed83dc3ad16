"""Models whose weights stay in their safetensors files: mapped into memory, paged in when read,
never copied.

`from_pretrained` maps weights already when nothing has to be changed about them. So this file only
asks for that, looks afterwards whether it was so, and says which weights were copied after all and
why.
"""

import copy
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    TrainingArguments,
)

from roundpipe.errors import ConfigError
from roundpipe.memory.mmap import FileMappings, can_tell_mappings

from .arguments import pipeline_of
from .compat import model_class_of
from .files import OF_THE_FILES, Checkpoint
from .folders import SAFETENSORS_NAMES
from .quantization.packing import (
    default_folder,
    on_meta,
    quantize_checkpoint,
    quantized_keys,
)
from .quantization.reading import method_of, read_quantized, refuse_damaged

logger = logging.getLogger(__name__)

# Where from_pretrained would put weights, or what it would make of them, instead of leaving them in
# the file.
_COPIES_ALL = (
    "quantization_config",
    "tp_plan",
    "tp_size",
    "device_mesh",
    "distributed_config",
    "gguf_file",
)
# What a model has beside its config, though that knows of it.
_OF_THE_MODEL = (*_COPIES_ALL, "dtype", "torch_dtype", "attn_implementation")
# What a config says of the files, also one that the caller has made without them.
_SAID_OF_FILES = ("architectures", "dtype", "quantization_config")


def load_pretrained_mmap(
    name_or_path: str | Path, *, model_class: Any = None, **kwargs: Any
) -> PreTrainedModel:
    """Loads a model as ``from_pretrained`` does, with its weights left in the safetensors files.

    For training with ``pin_model="off"``, which reads them from there: frozen weights need no
    memory then, and what is read of the files is only a cache that the system drops when it needs
    the room. Weights that train are written, so those are copied when the first update reaches
    them.

    Args:
        name_or_path: a folder, or the name of a model on the Hub.
        model_class: a model or auto class; default: the class named in the model's config.
        kwargs: those of ``from_pretrained``. ``dtype`` is that of the files unless given: another
            one copies every weight.

    Raises:
        ConfigError: an option that would move or change every weight; a file that was cut.

    Warns, once, naming every parameter that did not stay in a file, with the reason.

    Example:
        >>> model = load_pretrained_mmap("path/to/model")
        >>> model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        >>> args = RoundPipeTrainingArguments("out", pin_model="off")
        >>> RoundPipeTrainer(model, args, train_dataset=dataset).train()
    """
    _refuse_copies(kwargs)
    wants_info = kwargs.pop("output_loading_info", False)
    model_class = model_class or class_of(name_or_path, kwargs)
    how = {"output_loading_info": True, "dtype": "auto", **kwargs}
    loaded = _from_pretrained(model_class, name_or_path, how)
    model: PreTrainedModel = loaded[0]
    if can_tell_mappings():
        _warn_of_copies(model, Checkpoint(name_or_path, kwargs), set(loaded[1]["missing_keys"]))
    else:
        logger.warning(
            "this system does not tell which files are mapped, so nobody knows whether weights "
            "were copied"
        )
    return loaded if wants_info else model


def load_pretrained(
    name_or_path: str | Path,
    *,
    quantization: str | None = None,
    mmap: bool = True,
    quantized_dir: str | Path | None = None,
    model_class: Any = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Loads a model as ``from_pretrained`` does; quantized weights stay as they are stored, in host
    memory or in their files, and are frozen.

    Checkpoints that are read: bitsandbytes NF4, FP8 in square blocks (DeepSeek-V3, Qwen3 FP8),
    MXFP4 (gpt-oss) and int8 as this writes it. Train adapters over them.

    Args:
        name_or_path: a folder, or the name of a model on the Hub.
        quantization: how to quantize a checkpoint that is not: ``"nf4"``, ``"nf4_double"`` (its
            scales too), ``"fp8"`` or ``"int8"`` the linear layers but the head, and experts;
            ``"mxfp4"`` experts that are stacked. Done
            once, file by file, and kept in ``quantized_dir``. None: as the checkpoint is.
        mmap: weights stay in the files; else they are read into memory.
        quantized_dir: where what is quantized here is kept; default: in the Hugging Face cache.
        model_class: a model or auto class; default: the class named in the model's config.
        kwargs: those of ``from_pretrained``.

    Raises:
        ConfigError: a quantization that is unknown, or another one than the checkpoint's; files
            that are damaged; weights that do not divide into blocks; too little room on the disk; a
            ``quantized_dir`` that holds something else, as when the checkpoint has changed since.

    Example:
        >>> model = load_pretrained("path/to/model", quantization="nf4")
        >>> model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        >>> RoundPipeTrainer(model, RoundPipeTrainingArguments("out"), train_dataset=rows).train()
    """
    config, others = _config_and_others(name_or_path, kwargs)
    method = method_of(config)
    if mmap or quantization is not None or method is not None:
        _refuse_copies(kwargs)
    if quantization is not None or method is not None:
        kwargs = {**others, "config": config}
    if quantization is not None and method is None:
        checkpoint = Checkpoint(name_or_path, kwargs)
        files = checkpoint.files_with_tensors
        out = Path(quantized_dir or default_folder(files, quantization))
        cls = model_class_of(model_class or class_of(name_or_path, kwargs), config)
        model = on_meta(cls, config)
        if not kwargs.get("ignore_mismatched_sizes"):
            checkpoint.refuse_other_sizes(model)
        shapes = {name: weight.shape for name, weight in model.named_parameters()}
        keys = quantized_keys(model, quantization)
        quantize_checkpoint(files, out, quantization, keys, shapes)
        name_or_path, kwargs = out, {key: kwargs[key] for key in kwargs if key not in OF_THE_FILES}
        config.quantization_config = config_of(out, {}).quantization_config
        method = quantization
    elif quantization not in (None, method):
        raise ConfigError(
            f"quantization={quantization!r}: {name_or_path} is quantized already, as {method}; "
            "leave it out"
        )
    if method is None:
        if mmap:
            return load_pretrained_mmap(name_or_path, model_class=model_class, **kwargs)
        cls = model_class or class_of(name_or_path, kwargs)
        plain: PreTrainedModel = _from_pretrained(cls, name_or_path, {"dtype": "auto", **kwargs})
        return plain
    files = Checkpoint(name_or_path, kwargs).files
    cls = model_class_of(model_class or class_of(name_or_path, kwargs), config)
    others = {key: value for key, value in kwargs.items() if key not in (*OF_THE_FILES, "config")}
    return read_quantized(files, cls, config, mmap=mmap, **others)


def model_for_trainer(name_or_path: str, args: TrainingArguments | None) -> PreTrainedModel:
    """What ``RoundPipeTrainer(model="name or path")`` trains; with ``pin_model="off"`` its weights
    stay in their files.

    In the dtype of the files and in host memory, unless ``args.model_init_kwargs`` (TRL's) say
    otherwise.
    """
    given = getattr(args, "model_init_kwargs", None) or {}
    kwargs = json.loads(given) if isinstance(given, str) else dict(given)
    if any(kwargs.get(option) is not None for option in (*_COPIES_ALL, "device_map")):
        model: PreTrainedModel = class_of(name_or_path, kwargs).from_pretrained(
            name_or_path, **{"dtype": "auto", **kwargs}
        )
        return model
    is_mapped = args is not None and pipeline_of(args).pin_model == "off"
    return load_pretrained(name_or_path, mmap=is_mapped, **kwargs)


def _from_pretrained(model_class: Any, name_or_path: str | Path, how: dict[str, Any]) -> Any:
    """What that returns. Where it fails because of files of a checkpoint, the first one at fault is
    named."""
    try:
        return model_class.from_pretrained(name_or_path, **how)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, SafetensorError) or Path(name_or_path).is_dir():
            checkpoint = Checkpoint(name_or_path, how)
            refuse_damaged(checkpoint.files)
            if isinstance(error, RuntimeError):
                config = config_of(name_or_path, how)
                checkpoint.refuse_other_sizes(on_meta(model_class_of(model_class, config), config))
        raise


def _refuse_copies(kwargs: Mapping[str, Any]) -> None:
    for option in _COPIES_ALL:
        if kwargs.get(option) is not None:
            raise ConfigError(
                f"{option} changes every weight while loading, so none can stay in its file; leave "
                "it out"
            )
    if kwargs.get("device_map") not in (None, "cpu"):
        raise ConfigError(
            "device_map: the pipeline places layers itself; leave it out to keep weights in their "
            "file"
        )
    if kwargs.get("disable_mmap") or kwargs.get("use_safetensors") is False:
        raise ConfigError(
            "disable_mmap / use_safetensors=False: only mapped safetensors files can be left as "
            "they are"
        )


def class_of(name_or_path: str | Path, kwargs: Mapping[str, Any]) -> Any:
    """The class that wrote the files, else a causal language model."""
    config = config_of(name_or_path, kwargs)
    name = (config.architectures or [""])[0]
    return getattr(transformers, name, AutoModelForCausalLM)


def config_of(name_or_path: str | Path, kwargs: Mapping[str, Any]) -> Any:
    """The caller's config, or that of the files, before other ``kwargs`` are set in it."""
    given = kwargs.get("config")
    if isinstance(given, PretrainedConfig):
        return given
    return AutoConfig.from_pretrained(given or name_or_path, **_of_config(kwargs))


def _config_and_others(
    name_or_path: str | Path, kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The config that ``from_pretrained`` would make of the ``kwargs``, and those that it has no
    use for."""
    given, of_config = kwargs.get("config"), _of_config(kwargs)
    kept = {name: kwargs[name] for name in (*of_config, *_OF_THE_MODEL) if name in kwargs}
    others = {name: value for name, value in kwargs.items() if name not in (*kept, "config")}
    if isinstance(given, PretrainedConfig):
        config = copy.deepcopy(given)
    else:
        config, unused = AutoConfig.from_pretrained(
            given or name_or_path, return_unused_kwargs=True, **of_config, **others
        )
        others = {name: value for name, value in others.items() if name in unused}
    if given is not None:
        said, _ = PretrainedConfig.get_config_dict(name_or_path, **of_config)
        for name in _SAID_OF_FILES:
            if getattr(config, name, None) is None and said.get(name) is not None:
                setattr(config, name, said[name])
    config.name_or_path = str(name_or_path)
    return config, kept | others


def _of_config(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those that say where a config is."""
    return {name: kwargs[name] for name in (*OF_THE_FILES, "trust_remote_code") if name in kwargs}


def _warn_of_copies(model: PreTrainedModel, checkpoint: Checkpoint, missing: set[str]) -> None:
    mappings = FileMappings.now()
    copied: dict[str, list[str]] = defaultdict(list)
    num_bytes = 0
    for name, parameter in model.named_parameters():
        if parameter.nbytes and not checkpoint.has(mappings.file_of(parameter)):
            copied[_why(name, parameter, checkpoint, missing)].append(name)
            num_bytes += parameter.nbytes
    if copied:
        reasons = "\n".join(f"  {why}: {', '.join(_short(names))}" for why, names in copied.items())
        logger.warning(
            "%d of %d parameters (%.1f MiB) were copied into memory instead of staying in their "
            "safetensors file:\n%s",
            sum(map(len, copied.values())),
            sum(1 for _ in model.parameters()),
            num_bytes / 2**20,
            reasons,
        )


def _why(name: str, parameter: nn.Parameter, checkpoint: Checkpoint, missing: set[str]) -> str:
    dtype = checkpoint.dtypes.get(name)
    if not checkpoint.dtypes:
        return "the checkpoint has no safetensors files; save it with save_pretrained first"
    if name in missing:
        return "not in the checkpoint, so made anew"
    if dtype is None:
        return (
            "stacked, cast or otherwise made from other tensors of the checkpoint; save_pretrained "
            "does not undo that, so it happens at every load. Experts are stacked once by "
            "roundpipe_hf.stack_experts(base, out)"
        )
    if SAFETENSORS_NAMES.get(str(parameter.dtype).removeprefix("torch.")) != dtype:
        return (
            f"{dtype} in the file, {parameter.dtype} in the model; "
            'load it with dtype="auto" to leave it as it is'
        )
    return "changed while loading"


def _short(names: list[str]) -> Iterable[str]:
    """Every name, those that differ in the number of their block only once:
    ``layers.{0-27}.mlp.gate_up_proj``."""
    by_shape: dict[str, list[int]] = defaultdict(list)
    numbered = Counter(re.sub(r"\d+", "#", name) for name in names)
    for name in names:
        shape, first = re.sub(r"\d+", "#", name, count=1), re.search(r"\d+", name)
        if first is None or numbered[re.sub(r"\d+", "#", name)] == 1:
            yield name
        else:
            by_shape[shape].append(int(first.group()))
    for shape, numbers in by_shape.items():
        is_run = numbers == list(range(numbers[0], numbers[-1] + 1))
        listed = f"{numbers[0]}-{numbers[-1]}" if is_run else ",".join(map(str, numbers))
        yield shape.replace("#", "{" + listed + "}", 1)
