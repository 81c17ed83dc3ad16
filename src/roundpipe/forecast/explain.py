"""``python -m roundpipe explain``: the troubleshooting guide in a terminal, without a network. Its
pages come with the package, in ``share/doc/roundpipe-hf`` of the environment."""

import re
import textwrap
from importlib import metadata
from pathlib import Path

from ..errors import ConfigError

_GUIDE, _DISTRIBUTION = "troubleshooting.md", "roundpipe-hf"
_HEADING = re.compile(r"^#{2,3} (.+)$", flags=re.MULTILINE)
_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", flags=re.MULTILINE)
_NOT_ROWS = {"symptom", "text", "---"}
_WIDTH = 100


def explain(text: str) -> str:
    """Returns what the guide has about an error's name, a piece of an error's text, a whole one,
    or a word of a symptom; without a text all of it."""
    folder = pages()
    guide = (folder / _GUIDE).read_text(encoding="utf-8")
    found = _section(guide, text) or "\n\n".join(_rows(guide, text)) if text else guide
    if not found:
        raise ConfigError(
            f"the guide has nothing about {text!r}. Give an error's name, such as ConfigError, or "
            f"a few words of its text; all of the guide is in {folder / _GUIDE}"
        )
    return f"{found.strip()}\n\nPages that are named are in {folder}"


def pages() -> Path:
    """Returns the folder of the documentation: a clone's own, or the one that was installed."""
    clone = Path(__file__).parents[3] / "docs"
    if (clone / _GUIDE).is_file():
        return clone
    try:
        installed = metadata.files(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        installed = []
    for file in installed:
        if file.name == _GUIDE and (path := Path(str(file.locate()))).is_file():
            return path.resolve().parent
    raise ConfigError(f"the documentation is not installed: reinstall {_DISTRIBUTION}'s wheel")


def _section(guide: str, name: str) -> str:
    """The section under that heading, up to the next."""
    headings = list(_HEADING.finditer(guide))
    ends = [heading.start() for heading in headings[1:]] + [len(guide)]
    for heading, end in zip(headings, ends, strict=True):
        if _plain(heading.group(1)) == _plain(name):
            return guide[heading.start() : end]
    return ""


def _rows(guide: str, text: str) -> list[str]:
    """Those of the guide's tables that a text is in, or whose text is in it: people paste a whole
    message as well as a few words of it."""
    wanted = text.lower()
    return [
        textwrap.fill(f"{what}: {advice}", _WIDTH, subsequent_indent="    ", break_long_words=False)
        for what, advice in _ROW.findall(guide)
        if what not in _NOT_ROWS and (wanted in what.lower() or what.strip("`").lower() in wanted)
    ]


def _plain(heading: str) -> str:
    return heading.lower().replace(" ", "-")
