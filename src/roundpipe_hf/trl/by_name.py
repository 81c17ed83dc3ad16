"""Models that a script of TRL's names by a path: loaded into host memory, with what else TRL would
load for them."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoProcessor, PreTrainedModel

from ..loading import model_for_trainer

logger = logging.getLogger(__name__)


def load_by_name(name_or_path: str, args: Any, settings: dict[str, Any]) -> PreTrainedModel:
    """The model. Its tokenizer, of the same revision, goes into ``settings`` where TRL would not
    find it any more."""
    model = model_for_trainer(name_or_path, args)
    given = getattr(args, "model_init_kwargs", None) or {}
    given = json.loads(given) if isinstance(given, str) else given
    if "revision" in given and settings.get("processing_class") is None:
        settings["processing_class"] = AutoProcessor.from_pretrained(
            name_or_path,
            revision=given["revision"],
            trust_remote_code=given.get("trust_remote_code", False),
        )
    if model.dtype is not torch.float32 and not {"dtype", "torch_dtype"} & set(given):
        logger.warning(
            "%s is loaded in %s, the dtype of its files. TRL would load float32, which "
            "model_init_kwargs={'dtype': 'float32'} asks for",
            name_or_path,
            str(model.dtype).removeprefix("torch."),
        )
    return model


@contextmanager
def without_false_warning(trainer: type, *, is_loaded: bool) -> Iterator[None]:
    """TRL's constructor warns that ``model_init_kwargs`` are ignored where it is given a model,
    because it cannot know that `load_by_name` has loaded it with them."""
    modules = {cls.__module__ for cls in trainer.__mro__ if cls.__module__.startswith("trl.")}
    said_by = [logging.getLogger(module) for module in modules if is_loaded]
    for each in said_by:
        each.addFilter(_is_true)
    try:
        yield
    finally:
        for each in said_by:
            each.removeFilter(_is_true)


def _is_true(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not ("`model_init_kwargs`" in text and "already instantiated" in text)


@contextmanager
def references_on_host(args: Any) -> Iterator[None]:
    """TRL's constructor loads a reference model by the policy's name, to a GPU if there is one and
    nothing says otherwise."""
    if args is None or args.device.type == "cpu":
        yield
        return
    given = args.model_init_kwargs
    args.model_init_kwargs = {**(given or {}), "device_map": None}
    try:
        yield
    finally:
        args.model_init_kwargs = given
