"""Builds the sides that take part."""

from __future__ import annotations

from collections.abc import Sequence

from ours_side import OursSide
from side import Side, SideConfig

CORES = ("python", "rust")


class Makers:
    """Call it for one cache of every kind with the same sizes.

    Args:
        cores: SGLang's tree cores that take part.
        ours: Whether kvcache does.
    """

    def __init__(self, cores: Sequence[str] = CORES, *, ours: bool = True) -> None:
        self._cores = cores
        self._ours = ours

    def __call__(self, config: SideConfig) -> list[Side]:
        return [*self.looping(config), *self.batched(config)]

    def looping(self, config: SideConfig) -> list[Side]:
        """SGLang only; the wheel is imported when it is first needed."""
        if not self._cores:
            return []
        from sglang_side import SGLangSide

        return [SGLangSide(config, core) for core in self._cores]

    def batched(self, config: SideConfig) -> list[Side]:
        """Ours only."""
        return [OursSide(config)] if self._ours else []
