"""Programs: a configuration and calls as plain data, to be replayed, shrunk and printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# (method of Driver, its arguments): strings, ints, lists, None
Op = tuple[str, list[Any]]


@dataclass
class Program:
    """A configuration (arguments of `Driver`) and the calls, in order."""

    config: dict[str, Any]
    ops: list[Op] = field(default_factory=list)

    def script(self, failure: str) -> str:
        """Return a Python script that makes the calls and ends in the failure."""
        config = ", ".join(f"{name}={value!r}" for name, value in self.config.items())
        lines = [
            "from kvcache.validate import Driver",
            "",
            *(f"# {line}" for line in failure.splitlines()),
            f"d = Driver({config})",
        ]
        for name, args in self.ops:
            given = list(args)
            while given and given[-1] is None:
                given.pop()
            lines.append(f"d.{name}({', '.join(map(repr, given))})")
        return "\n".join(lines) + "\n"
