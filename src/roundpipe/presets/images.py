"""Images beside rows of tokens: which images are which row's, and microbatches that have them.

A processor lines up the images of all rows, whatever their numbers. Each makes a number of tokens,
for which its row has as many placeholders; so rows take images in order until their placeholders
are filled.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError
from ..microbatch import split

_REMEDY = "; pass use_sequential_preset=False to wrap_model_to_roundpipe to run the model as it is"


class Image(NamedTuple):
    """How much of a batch is one image's: ``lines`` along dim 0 of ``pixel_values``, and ``tokens``
    in its row."""

    lines: int
    tokens: int


Measure = Callable[[Any, Mapping[str, Any]], list[Image]]
"""``(model, named)``: the images of what a forward is given, which has ``pixel_values``."""


Positions = Callable[[Any, Mapping[str, Any]], torch.Tensor | None]
"""``(model, named)``: (kinds, rows, tokens), or None where the model's forward makes them."""


def images_of_rows(model: Any, named: Mapping[str, Any], measure: Measure) -> list[list[Image]]:
    """The images of each row.

    Raises:
        ConfigError: images and placeholders differ, or there is no telling.
    """
    for name in ("pixel_values_videos", "video_grid_thw"):
        if named.get(name) is not None:
            raise ConfigError(f"{name}: the preset knows images only{_REMEDY}")
    images = [] if named.get("pixel_values") is None else measure(model, named)
    ids = named.get("input_ids")
    if ids is None:
        if images:
            raise ConfigError(
                f"{len(images)} images came with inputs_embeds, which do not say whose they are; "
                "give input_ids"
            )
        return []
    rows: list[list[Image]] = []
    for row, wanted in enumerate((ids == model.config.image_token_id).sum(dim=1).tolist()):
        taken = sum(map(len, rows))
        end, found = taken, 0
        while found < wanted and end < len(images):
            found += images[end].tokens
            end += 1
        if found != wanted:
            raise ConfigError(
                f"row {row} has {wanted} placeholders of images, but the {end - taken} images from "
                f"number {taken} on, which are the row's, make {found} tokens"
            )
        rows.append(images[taken:end])
    taken = sum(map(len, rows))
    if taken != len(images):
        raise ConfigError(
            f"there are {len(images)} images, but all rows up to the last, {len(rows) - 1}, have "
            f"placeholders of {taken}"
        )
    return rows


def split_rows(
    measure: Measure, positions: Positions | None, model: Any, named: Mapping[str, Any], n: int
) -> list[dict[str, Any]]:
    """What a forward is given in at most ``n`` microbatches, each with the images of its rows; None
    in place of none.

    Raises:
        ConfigError: see `images_of_rows`.
    """
    rows = images_of_rows(model, named, measure)
    apart = {name: named[name] for name in _APART if named.get(name) is not None}
    if positions is not None and "position_ids" not in apart and rows:
        apart["position_ids"] = positions(model, named)
    position_ids = apart.get("position_ids")
    if position_ids is None or position_ids.ndim != 3:
        apart.pop("position_ids", None)
    cut = split((), {name: named[name] for name in named if name not in apart}, None, n)
    parts, start = [], 0
    for (_, part), size in zip(cut.inputs, cut.rows, strict=True):
        chosen = range(start, start + size) if len(cut.rows) > 1 else range(len(rows))
        parts.append({**part, **_of_rows(apart, rows, chosen)})
        start += size
    return parts


_APART = ("pixel_values", "image_grid_thw", "image_sizes", "position_ids")


def _of_rows(
    apart: Mapping[str, Any], rows: Sequence[Sequence[Image]], chosen: range
) -> dict[str, Any]:
    """What of it is of some rows in a row."""
    before = [image for row in rows[: chosen.start] for image in row]
    images = [image for row in rows[chosen.start : chosen.stop] for image in row]
    made: dict[str, Any] = {}
    for name, value in apart.items():
        if name == "position_ids":  # (kinds, rows, tokens)
            made[name] = value.narrow(1, chosen.start, len(chosen)) if value.size(1) > 1 else value
        elif not images:
            made[name] = None
        elif name == "pixel_values":
            start, length = (sum(image.lines for image in some) for some in (before, images))
            made[name] = value.narrow(0, start, length)
        else:
            made[name] = value.narrow(0, len(before), len(images))
    return made


def grid_images(model: Any, named: Mapping[str, Any]) -> list[Image]:
    """Of models that take patches: ``image_grid_thw``, (images, 3), says how many of them are each
    image's, of which a square makes one token.

    Raises:
        ConfigError: there are no sizes, or not those of the patches.
    """
    pixels, grid = named["pixel_values"], named.get("image_grid_thw")
    if grid is None:
        raise ConfigError(
            f"pixel_values has {len(pixels)} patches, but there is no image_grid_thw, which says "
            "how many of them each image has"
        )
    side = int(model.config.vision_config.spatial_merge_size)
    lines = grid.prod(dim=-1).tolist()
    for image, (_, height, width) in enumerate(grid.tolist()):
        if height % side or width % side:
            raise ConfigError(
                f"image {image} has {height} x {width} patches, of which squares of {side} x {side}"
                " make a token"
            )
    if sum(lines) != len(pixels):
        raise ConfigError(
            f"pixel_values has {len(pixels)} patches, but the {len(lines)} images of "
            f"image_grid_thw have {sum(lines)}"
        )
    return [Image(each, each // side**2) for each in lines]


def grid_positions(model: Any, named: Mapping[str, Any]) -> torch.Tensor | None:
    """What Qwen's models make of the sizes of all images of a batch, a row without any among them:
    time, height and width of each token."""
    place_ids = model.model.compute_3d_position_ids
    parameters = inspect.signature(place_ids).parameters
    cache = "cache" if "cache" in parameters else "past_key_values"  # renamed by transformers
    made: torch.Tensor | None = place_ids(
        input_ids=named["input_ids"],
        image_grid_thw=named.get("image_grid_thw"),
        video_grid_thw=None,
        inputs_embeds=None,
        attention_mask=named.get("attention_mask"),
        mm_token_type_ids=named.get("mm_token_type_ids"),
        **{cache: None},
    )
    return made
