"""What a workload may ask of a cache, whichever it is: one call for a list of requests.

A request is a number below `SideConfig.max_requests`. Its tokens are given once, untimed, with `load`; the
lengths that it has computed are the side's own business. A side keeps its requests in the form that its
scheduler would: ours in arrays, SGLang's in one object each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SideConfig:
    """Sizes of one cache, in tokens."""

    page_size: int
    window: int
    full_tokens: int
    swa_tokens: int
    max_running: int
    max_requests: int
    max_len: int


class Match(NamedTuple):
    """Lengths in tokens, one each request; branch -1 = none."""

    full_hit: Ints
    reuse: Ints
    branch: Ints


class Side(Protocol):
    """A cache under test."""

    name: str
    config: SideConfig
    batched: bool  # whether a request costs less in a batch

    def load(self, ids: Ints, tokens: Tokens, lens: Ints) -> None:
        """Give requests their tokens, [n, width]: `lens` of prompt, the rest is output. Not timed."""

    def set_lens(self, ids: Ints, lens: Ints) -> None:
        """Change the prompt lengths of loaded requests. Not timed."""

    def fill(self, ids: Ints, group: int) -> None:
        """Have the tree hold whole prompts, with one live window at their end. Not timed.

        `group` at a time: what prompts of a group do not find in the tree must differ.
        """

    def match(self, ids: Ints) -> None:
        """Match all but the last token of each request."""

    def rematch(self, ids: Ints) -> None:
        """Match requests again that were matched before and are still waiting."""

    def matched(self, ids: Ints) -> Match:
        """Return what the last `match` found. Not timed."""

    def admit(self, ids: Ints) -> None:
        """Take a row for each matched request, lock its prefix, write the prefix into the row."""

    def drop(self, ids: Ints) -> None:
        """Undo `admit` for requests that computed nothing."""

    def extend(self, ids: Ints, lens: Ints) -> None:
        """Give requests the pages for `lens` tokens, and call those computed."""

    def step(self, ids: Ints) -> None:
        """One more token for each request."""

    def commit(self, ids: Ints) -> None:
        """Hand what was computed to the tree; the requests go on."""

    def slide(self, ids: Ints) -> None:
        """Free the SWA of what fell out of the window."""

    def tick(self, ids: Ints) -> None:
        """Do what the scheduler does about the window before each decode step."""

    def finish(self, ids: Ints) -> None:
        """Hand what was computed to the tree and end the requests."""

    def evict(self, full_tokens: int, swa_tokens: int) -> tuple[int, int]:
        """Free at least so many tokens of each pool; return what was freed."""

    def free_tokens(self) -> tuple[int, int]:
        """Return free tokens (Full, SWA). Not timed."""

    def memory(self) -> dict[str, int]:
        """Return what the side itself says about its memory; may be empty. Not timed."""
