"""The safetensors files of a checkpoint: which they are, and what they say of their tensors."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from roundpipe.errors import ConfigError

from .compat import add_variant
from .quantization.reading import refuse_damaged

# What says which files are meant, of all that `from_pretrained` takes.
OF_THE_FILES = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")


class Checkpoint:
    """What the files say about their tensors, without reading one."""

    def __init__(self, name_or_path: str | Path, kwargs: Mapping[str, Any]) -> None:
        self._name_or_path = name_or_path
        self._of_files = {name: kwargs[name] for name in OF_THE_FILES if kwargs.get(name)}
        variant, is_folder = kwargs.get("variant"), Path(name_or_path).is_dir()
        self._is_here = True
        try:
            files = self._files(variant)
        except ConfigError:
            if is_folder:
                raise
            files = []
        if not files and not is_folder:
            self._is_here = False
            files = self._files(variant)
        self.files = files
        # The Hub's cache gives files their names by links, which mappings do not show.
        self._paths = {str(file.resolve()) for file in files}
        headers = [entry for file in files for entry in _header(file).items()]
        self.dtypes = {key: entry["dtype"] for key, entry in headers if "dtype" in entry}
        self._shapes = {key: entry["shape"] for key, entry in headers if "shape" in entry}

    @property
    def files_with_tensors(self) -> list[Path]:
        """The files, of which there is one at least."""
        if not self.files:
            raise ConfigError(
                f"{self._name_or_path} has no safetensors files; save it with save_pretrained first"
            )
        return self.files

    @property
    def folder(self) -> Path:
        """The files are in it, and config.json."""
        return self.files_with_tensors[0].parent

    def has(self, file: str | None) -> bool:
        """Whether it is one of the files that were looked for, or of their kind."""
        return file is not None and (file in self._paths or file.endswith(".safetensors"))

    def refuse_other_sizes(self, model: nn.Module) -> None:
        """Raises ConfigError for the first tensor that has a name of the model's and another number
        of elements.

        Another shape of as many is left to transformers, which makes some layers of such.
        """
        for name, one in model.state_dict().items():
            shape = self._shapes.get(name, list(one.shape))
            if math.prod(shape) != one.numel():
                raise ConfigError(
                    f"{name} has shape {tuple(shape)} in {self.folder}, and "
                    f"{type(model).__name__} with its config takes {tuple(one.shape)}: a file or "
                    "config.json is another checkpoint's; get it again"
                )

    def _files(self, variant: str | None) -> list[Path]:
        single = self._find(add_variant(SAFE_WEIGHTS_NAME, variant))
        if single is not None:
            return [single]
        index = self._find(add_variant(SAFE_WEIGHTS_INDEX_NAME, variant))
        names = set() if index is None else _named_in(index)
        files = {name: self._find(name) for name in sorted(names)}
        for name in (name for name, file in files.items() if file is None):
            raise ConfigError(
                f"{self._name_or_path}: {name} is missing, which {index} names; get it again"
            )
        return [file for file in files.values() if file is not None]

    def _find(self, name: str) -> Path | None:
        how: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
        if self._is_here:  # else it is fetched
            how["local_files_only"] = True
        found = cached_file(
            self._name_or_path, name, **{**self._of_files, **how, "force_download": False}
        )
        return None if found is None else Path(found)


def _named_in(index: Path) -> set[str]:
    """The files that an index names."""
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is damaged ({error!r}); get it again") from error


def _header(file: Path) -> dict[str, Any]:
    """A safetensors file begins with the length of a JSON header and the header."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        # What is no such file says a length of its own.
        is_whole = 0 < length <= file.stat().st_size - 8
        text = opened.read(length) if is_whole else b""
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        refuse_damaged([file])
        raise ConfigError(f"{file} is damaged ({error}); get it again") from error
    return header
