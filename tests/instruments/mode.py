"""Which of Triton's two modes this process is in: it is fixed when triton is first imported."""

from __future__ import annotations


def interpreter_is_on() -> bool:
    """Whether triton was imported under TRITON_INTERPRET=1 (imports it if nobody has)."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(tl.sum, InterpretedFunction)
