"""Images and videos beside rows of tokens: which are which row's, and microbatches that have them.

A processor lines up the images of all rows, whatever their numbers. Each makes a number of tokens,
for which its row has as many placeholders; so rows take images in order until their placeholders
are filled. Videos are lined up apart, with placeholders of their own.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError
from ..microbatch import split


class Sight(NamedTuple):
    """Names one kind of what is seen as a forward's arguments do."""

    name: str
    pixels: str
    sizes: str
    placeholder: str  # in the config: the id of its tokens
    each: str  # what else there may be one of for each


IMAGES = Sight("images", "pixel_values", "image_grid_thw", "image_token_id", "image_sizes")
VIDEOS = Sight(
    "videos", "pixel_values_videos", "video_grid_thw", "video_token_id", "second_per_grid_ts"
)
SIGHTS = (IMAGES, VIDEOS)  # in the order in which models run their tower
_REMEDY = (
    "give both as the processor made them of one row, and leave rows whole (max_length=None) if "
    "they were cut to a length"
)


class Image(NamedTuple):
    """Says how much of a batch is one image's or video's: ``lines`` along dim 0 of its pixels, and
    ``tokens`` in its row."""

    lines: int
    tokens: int


Measure = Callable[[Any, Mapping[str, Any], Sight], list[Image]]
"""``(model, named, sight)``: the images of what a forward is given, which has their pixels."""


Positions = Callable[[Any, Mapping[str, Any]], torch.Tensor | None]
"""``(model, named)``: (kinds, rows, tokens), or None where the model's forward makes them."""


def images_of_rows(
    model: Any, named: Mapping[str, Any], measure: Measure, sight: Sight
) -> list[list[Image]]:
    """Returns the images of each row, or the videos.

    Raises:
        ConfigError: they and placeholders differ, or there is no telling.
    """
    images = [] if named.get(sight.pixels) is None else measure(model, named, sight)
    ids = named.get("input_ids")
    if ids is None:
        if images:
            raise ConfigError(
                f"{len(images)} {sight.name} came with inputs_embeds, which do not say whose they "
                "are; give input_ids"
            )
        return []
    rows: list[list[Image]] = []
    placeholder = getattr(model.config, sight.placeholder)
    for row, wanted in enumerate((ids == placeholder).sum(dim=1).tolist()):
        taken = sum(map(len, rows))
        end, found = taken, 0
        while found < wanted and end < len(images):
            found += images[end].tokens
            end += 1
        if found != wanted:
            raise ConfigError(
                f"row {row} has {wanted} placeholders of {sight.name}, but the {end - taken} "
                f"{sight.name} from number {taken} on, which are the row's, make {found} tokens; "
                f"{_REMEDY}"
            )
        rows.append(images[taken:end])
    taken = sum(map(len, rows))
    if taken != len(images):
        raise ConfigError(
            f"there are {len(images)} {sight.name}, but all rows up to the last, {len(rows) - 1}, "
            f"have placeholders of {taken}; {_REMEDY}"
        )
    return rows


def split_rows(
    measure: Measure,
    positions: Positions | None,
    sights: Sequence[Sight],
    model: Any,
    named: Mapping[str, Any],
    n: int,
) -> list[dict[str, Any]]:
    """Returns what a forward is given in at most ``n`` microbatches, each with the images and
    videos of its rows; None in place of none.

    Raises:
        ConfigError: see `images_of_rows`.
    """
    rows = {sight: images_of_rows(model, named, measure, sight) for sight in sights}
    count = len(rows[sights[0]])
    names = ("position_ids", *(name for sight in sights for name in _apart(sight)))
    apart = {name: named[name] for name in names if named.get(name) is not None}
    if positions is not None and "position_ids" not in apart and count:
        apart["position_ids"] = positions(model, named)
    position_ids = apart.get("position_ids")
    if position_ids is None or position_ids.ndim != 3:
        apart.pop("position_ids", None)
    cut = split((), {name: named[name] for name in named if name not in apart}, None, n)
    parts, start = [], 0
    for (_, part), size in zip(cut.inputs, cut.rows, strict=True):
        chosen = range(start, start + size) if len(cut.rows) > 1 else range(count)
        parts.append({**part, **_of_rows(apart, rows, chosen)})
        start += size
    return parts


def _apart(sight: Sight) -> tuple[str, ...]:
    return sight.pixels, sight.sizes, sight.each


def _of_rows(
    apart: Mapping[str, Any], rows: Mapping[Sight, Sequence[Sequence[Image]]], chosen: range
) -> dict[str, Any]:
    """What of it is of some rows in a row."""
    made: dict[str, Any] = {}
    if "position_ids" in apart:  # (kinds, rows, tokens)
        value = apart["position_ids"]
        made["position_ids"] = (
            value.narrow(1, chosen.start, len(chosen)) if value.size(1) > 1 else value
        )
    for sight, of_rows in rows.items():
        before = [image for row in of_rows[: chosen.start] for image in row]
        images = [image for row in of_rows[chosen.start : chosen.stop] for image in row]
        for name in apart.keys() & set(_apart(sight)):
            start, end = len(before), len(before) + len(images)
            if name == sight.pixels:
                start = sum(image.lines for image in before)
                end = start + sum(image.lines for image in images)
            made[name] = apart[name][start:end] if images else None
    return made


def grid_images(model: Any, named: Mapping[str, Any], sight: Sight) -> list[Image]:
    """Of models that take patches: ``image_grid_thw``, (images, 3), says how many of them are each
    image's, of which a square makes one token. A video has as many times the patches of one image
    as it has frames, or pairs of them.

    Raises:
        ConfigError: there are no sizes, or not those of the patches.
    """
    pixels, grid = named[sight.pixels], named.get(sight.sizes)
    one = sight.name.removesuffix("s")
    if grid is None:
        raise ConfigError(
            f"{sight.pixels} has {len(pixels)} patches, but there is no {sight.sizes}, which says "
            f"how many of them each {one} has; hand on what the processor returns of it"
        )
    side = int(model.config.vision_config.spatial_merge_size)
    lines = grid.prod(dim=-1).tolist()
    for image, (_, height, width) in enumerate(grid.tolist()):
        if height % side or width % side:
            raise ConfigError(
                f"{one} {image} has {height} x {width} patches, of which squares of {side} x "
                f"{side} make a token; scale it to sides of a multiple of {side} patches, as the "
                "model's processor does"
            )
    if sum(lines) != len(pixels):
        raise ConfigError(
            f"{sight.pixels} has {len(pixels)} patches, but the {len(lines)} {sight.name} of "
            f"{sight.sizes} have {sum(lines)}; hand on what the processor returns of both, for the "
            f"same {sight.name}"
        )
    return [Image(each, each // side**2) for each in lines]


def grid_positions(model: Any, named: Mapping[str, Any]) -> torch.Tensor | None:
    """Computes what Qwen's models make of the sizes of all images and videos of a batch, a row
    without any among them: time, height and width of each token."""
    place_ids = model.model.compute_3d_position_ids
    parameters = inspect.signature(place_ids).parameters
    cache = "cache" if "cache" in parameters else "past_key_values"  # renamed by transformers
    paces = [VIDEOS.each] if VIDEOS.each in parameters else []  # Qwen2.5-VL's alone
    made: torch.Tensor | None = place_ids(
        input_ids=named["input_ids"],
        image_grid_thw=named.get("image_grid_thw"),
        video_grid_thw=named.get("video_grid_thw"),
        inputs_embeds=None,
        attention_mask=named.get("attention_mask"),
        mm_token_type_ids=named.get("mm_token_type_ids"),
        **{cache: None},
        **{name: named.get(name) for name in paces},
    )
    return made
