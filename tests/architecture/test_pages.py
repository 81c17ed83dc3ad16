"""The page that everybody reads first stays short, and the pages behind it can be read in a
terminal."""

import re
from pathlib import Path

import pytest
import shape

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ARCHITECTURE, CONTRIBUTING = DOCS / "architecture.md", ROOT / "CONTRIBUTING.md"
GUIDE = [
    *sorted((DOCS / "guide").glob("*.md")),
    # The reference's page is settings of what reads docstrings, one line each.
    *(page for page in sorted(DOCS.glob("*.md")) if page.name not in ("api.md", "architecture.md")),
]
README = ROOT / "README.md"


def test_architecture_is_read_in_ten_minutes() -> None:
    page = ARCHITECTURE.read_text()
    assert len(page.split()) <= 1_500
    assert 0 < len(shape.terms(page)) <= 20


def test_stories_name_files_that_there_are() -> None:
    told = shape.stories(ARCHITECTURE.read_text())
    assert [story.name for story in told] == ["One weight", "One gradient", "One microbatch"]
    files = {file for story in told for file in story.files}
    assert not [file for file in files if not (DOCS.parent / "src/roundpipe" / file).is_file()]


@pytest.mark.parametrize("page", [ARCHITECTURE, CONTRIBUTING], ids=lambda page: page.stem)
def test_every_room_is_listed(page: Path) -> None:
    top = (ROOT / "src/roundpipe").iterdir()
    rooms = [path.name for path in top if path.is_dir() or path.name in ("config.py", "errors.py")]
    listed = page.read_text()
    missing = [room for room in rooms if f"`{room}`" not in listed and room != "__pycache__"]
    assert not missing


@pytest.mark.parametrize(
    "page",
    [README, ARCHITECTURE, CONTRIBUTING, *GUIDE, *sorted((DOCS / "internals").glob("*.md"))],
    ids=lambda page: page.stem,
)
def test_pages_keep_to_100_columns(page: Path) -> None:
    wide = [line for line in shape.outside_tables(page.read_text()) if len(line) > shape.COLUMNS]
    assert not [line for line in wide if not line.startswith("#")]  # a heading cannot be wrapped


def test_links_of_the_readme_lead_somewhere() -> None:
    """Those of the other pages are checked by `make docs`."""
    links = re.findall(r"\]\(([^)#]+)", README.read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).is_file()]


@pytest.mark.parametrize(
    "page",
    sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("[a-z]*/README.md")]),
    ids=lambda page: page.stem,
)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """CONTRIBUTING sent its readers to a folder of tests that had another name by then."""
    named = re.findall(
        r"\b((?:benchmarks|docs|examples|notebooks|src|tests|tools)/[\w./*-]*\w)", page.read_text()
    )
    assert not [name for name in named if not any(ROOT.glob(name))]
