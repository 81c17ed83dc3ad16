"""The page that everybody reads first stays short, and the pages behind it can be read in a
terminal."""

from pathlib import Path

import pytest
import shape

DOCS = Path(__file__).parents[2] / "docs"
ARCHITECTURE = DOCS / "architecture.md"


def test_architecture_is_read_in_ten_minutes() -> None:
    page = ARCHITECTURE.read_text()
    assert len(page.split()) <= 1_500
    assert 0 < len(shape.terms(page)) <= 20


def test_stories_name_files_that_there_are() -> None:
    told = shape.stories(ARCHITECTURE.read_text())
    assert [story.name for story in told] == ["One weight", "One gradient", "One microbatch"]
    files = {file for story in told for file in story.files}
    assert not [file for file in files if not (DOCS.parent / "src/roundpipe" / file).is_file()]


@pytest.mark.parametrize(
    "page", [ARCHITECTURE, *sorted((DOCS / "internals").glob("*.md"))], ids=lambda page: page.stem
)
def test_pages_keep_to_100_columns(page: Path) -> None:
    wide = [line for line in shape.outside_tables(page.read_text()) if len(line) > shape.COLUMNS]
    assert not wide
