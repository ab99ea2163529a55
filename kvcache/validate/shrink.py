"""Shrinking: a failing program made as short as deleting and simplifying can make it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvcache.validate.program import Op, Program


def shrink(program: Program, fails: Callable[[Program], bool], most_tries: int = 4000) -> Program:
    """Return a smaller program that still fails.

    Args:
        program: One that fails.
        fails: Replays a program. Any failure counts as the same one.
        most_tries: Replays at most, so that the result depends on nothing but the program.
    """
    tries = 0
    best = program

    def attempt(candidate: Program) -> bool:
        nonlocal tries, best
        if tries >= most_tries:
            return False
        tries += 1
        if not fails(candidate):
            return False
        best = candidate
        return True

    before = None
    while before != best and tries < most_tries:
        before = best
        _delete_calls(best, attempt)
        _simplify_calls(best, attempt)
        _simplify_config(best, attempt)
    return best


def _delete_calls(program: Program, attempt: Callable[[Program], bool]) -> None:
    """Delete runs of calls, long ones first, from the end: what a call needs stands before it."""
    ops = program.ops
    size = max(1, len(ops) // 2)
    while size >= 1:
        end = len(ops)
        while end > 0:
            start = max(0, end - size)
            candidate = ops[:start] + ops[end:]
            if attempt(Program(program.config, candidate)):
                ops = candidate
            end = start
        size //= 2


def _simplify_calls(program: Program, attempt: Callable[[Program], bool]) -> None:
    ops = program.ops
    for i in reversed(range(len(ops))):
        changed = True
        while changed:
            changed = False
            candidates = [*_without_an_ask(ops, i)]
            candidates += ([*ops[:i], (ops[i][0], a), *ops[i + 1 :]] for a in _simpler_args(ops[i]))
            for candidate in candidates:
                if attempt(Program(program.config, candidate)):
                    ops = candidate
                    changed = True
                    break


def _without_an_ask(ops: list[Op], i: int) -> Iterator[list[Op]]:
    """Programs whose match `i` asks for one request less; admissions follow suit."""
    call, args = ops[i]
    if call != "match" or len(args[1]) < 2:
        return
    for k in reversed(range(len(args[1]))):
        changed: list[Op] = [*ops[:i], (call, [args[0], args[1][:k] + args[1][k + 1 :], *args[2:]])]
        for name, rest in ops[i + 1 :]:
            if name == "admit" and rest[0] == args[0]:
                index = [*range(len(args[1]))] if rest[1] is None else rest[1]
                pairs = [(n - (n > k), r) for n, r in zip(index, rest[2], strict=False) if n != k]
                rest = [rest[0], [n for n, _ in pairs], [r for _, r in pairs]]
            changed.append((name, rest))
        yield changed


# arguments whose entries belong together: one for each request
_COLUMNS = {
    "admit": [[1, 2]],
    "extend": [[0, 1]],
    "advance": [[0, 1]],
    "step": [[0]],
    "slide": [[0]],
    "abort": [[0]],
    "namespaces": [[0]],
    "commit": [[0, 1, 2]],
    "finish": [[0, 1, 2]],
    "retract": [[1, 2, 3]],
}


def _simpler_args(op: Op) -> Iterator[list[Any]]:
    """Arguments that make the call smaller, the boldest first."""
    name, args = op
    for columns in _COLUMNS.get(name, []):
        yield from _without_a_request(args, columns)
    for i, arg in enumerate(args):
        if name == "match" and i == 1:
            for k, (namespace, tokens, key_len) in enumerate(arg):
                for simpler in _simpler_request(namespace, tokens, key_len):
                    yield [*args[:i], [*arg[:k], simpler, *arg[k + 1 :]], *args[i + 1 :]]
        elif isinstance(arg, list):
            for k, value in enumerate(arg):
                for smaller in _smaller(value):
                    yield [*args[:i], [*arg[:k], smaller, *arg[k + 1 :]], *args[i + 1 :]]
        if arg is not None and i >= 2 and name in ("match", "commit", "finish", "retract"):
            default = True if isinstance(arg, bool) else None
            if arg != default and not (name == "retract" and i == 2):
                yield [*args[:i], default, *args[i + 1 :]]
        if isinstance(arg, int) and not isinstance(arg, bool):
            for smaller in _smaller(arg):
                yield [*args[:i], smaller, *args[i + 1 :]]


def _without_a_request(args: list[Any], columns: list[int]) -> Iterator[list[Any]]:
    size = len(args[columns[0]] or args[columns[-1]] or [])
    for k in reversed(range(size)):
        if size == 1:
            return
        yield [
            arg[:k] + arg[k + 1 :] if i in columns and isinstance(arg, list) else arg
            for i, arg in enumerate(args)
        ]


def _simpler_request(namespace: Any, tokens: list[int], key_len: int) -> Iterator[list[Any]]:
    if namespace is not None:
        yield [None, tokens, key_len]
    for length in (len(tokens) // 2, len(tokens) - 1):
        if 0 <= length < len(tokens):
            yield [namespace, tokens[:length], min(key_len, length)]
    if any(tokens):
        yield [namespace, [0] * len(tokens), key_len]
    for smaller in _smaller(key_len):
        yield [namespace, tokens, smaller]


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, list) and value:
            yield value[:-1]
        return
    for smaller in (0, value // 2, value - 1):
        if 0 <= smaller < value:
            yield smaller


def _simplify_config(program: Program, attempt: Callable[[Program], bool]) -> None:
    config = program.config
    if config.get("ladder") is not None:
        candidate = {**config, "ladder": None}
        config = candidate if attempt(Program(candidate, program.ops)) else config
    for name in ("branch", "hints", "bigram", "every", "value", "chunks", "window_slack"):
        if config.get(name):
            candidate = {**config, name: type(config[name])(0)}
            if attempt(Program(candidate, program.ops)):
                config = candidate
    for name, plain in (("key_dtype", "int64"), ("match_on", "host")):
        if config.get(name, plain) != plain:
            candidate = {**config, name: plain}
            config = candidate if attempt(Program(candidate, program.ops)) else config
    for name in ("every", "window", "page_size", "max_rows", "max_len", "full_pages", "swa_pages"):
        for smaller in _smaller(config.get(name)):
            candidate = {**config, name: smaller}
            if attempt(Program(candidate, program.ops)):
                config = candidate
                break
