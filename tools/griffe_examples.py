"""What the documentation's site needs to know of this project's docstrings: `Example:` heads what
griffe expects below `Examples:`."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the heading, so that what is below it is shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
