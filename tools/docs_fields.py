"""Extension of griffe for `make docs`: the comment behind a field of a class is its description.

    page_size: int  # tokens per page, of both pools

The house rule is a comment per field; without this the site would show names and types alone.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_COMMENT = re.compile(r"\s# (.+)$")


class FieldComments(griffe.Extension):  # type: ignore[misc]  # griffe is not where mypy runs
    """Gives a field without a docstring the comment at the end of its last line."""

    def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
        """Look behind the attribute for a comment; griffe calls this for each."""
        if attr.docstring is not None or not attr.endlineno or not attr.parent.is_class:
            return
        found = _COMMENT.search(attr.lines_collection[attr.filepath][attr.endlineno - 1])
        if found:
            attr.docstring = griffe.Docstring(
                found[1], lineno=attr.endlineno, endlineno=attr.endlineno, parent=attr
            )
