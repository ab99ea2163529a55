"""Extension of griffe for `make docs`: the comment behind a field of a class is its description.

    page_size: int  # tokens per page, of both pools

The house rule is a comment per field; without this the site would show names and types alone.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_COMMENT = re.compile(r"\s# (.+)$")


class FieldComments(griffe.Extension):
    """Gives a field without a docstring the comment behind it, wherever the formatter put that."""

    def on_attribute_instance(self, *, attr: Any, **_: Any) -> None:
        """Look behind the attribute for a comment; griffe calls this for each."""
        if attr.docstring is not None or not attr.endlineno or not attr.parent.is_class:
            return
        lines = attr.lines_collection[attr.filepath][attr.lineno - 1 : attr.endlineno]
        comments = [found[1] for found in map(_COMMENT.search, lines) if found]
        if comments:
            text = " ".join(comments)
            attr.docstring = griffe.Docstring(
                text, lineno=attr.lineno, endlineno=attr.endlineno, parent=attr
            )
