"""Names that signatures use for what a caller gives with a batch; kvcache/checks.py checks the values."""

from __future__ import annotations

from typing import TypeAlias

import numpy.typing as npt

# [n] distinct running rows, as `admit` gave them: an array of them, a list, whatever numpy reads as ints
Rows: TypeAlias = npt.ArrayLike

# [n] tokens, one length for each request
Lens: TypeAlias = npt.ArrayLike
