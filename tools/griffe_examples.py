"""Tells the documentation's site how to read this project's sources: `Example:` heads what griffe
expects below `Examples:`, and a default that has a private name is shown as its value."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the heading, so that what is below it is shown as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Shows readers no name that they cannot use."""
        for parameter in func.parameters:
            name = str(parameter.default)
            known = func.module.members.get(name) if name.startswith("_") else None
            if isinstance(known, griffe.Attribute) and known.value is not None:
                parameter.default = known.value
