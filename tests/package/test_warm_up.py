"""After warm_up nothing is compiled, and nothing is loaded, whatever is called.

Each case is a process of its own: in one that has made other calls nothing would be left to compile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.checks import INT64, as_int_array
from kvcache.cli import main

ROOMS = [str(Path(__file__).parents[1] / room) for room in ("", "manager")]
CALLS = 5000

CODE = """
import importlib, json, pkgutil, sys, types
sys.path[:0] = json.loads(sys.argv[1])
import numba.core.event as event
import kvcache
from numba.core.dispatcher import Dispatcher
from random_calls import Caller

SIZES = dict(page_size=4, full_pages=40, max_rows=6, max_len=64, max_namespaces=4)

def cache_of(window, bigram):
    checkpoints = kvcache.parse_checkpoints("branch,hints,every=12")
    pool = 0 if window is None else 24
    config = kvcache.CacheConfig(
        window=window, swa_pages=pool, bigram=bigram, checkpoints=checkpoints, **SIZES)
    return kvcache.KVCacheManager(config)

def functions_in(modules):
    for module in modules:
        for value in vars(module).values():
            members = vars(value).values() if isinstance(value, type) else [value]
            for x in members:
                x = getattr(x, "fget", x)
                if isinstance(x, types.FunctionType) and x.__module__ == module.__name__:
                    yield x

def called_from_python():
    "Compiled functions that the library's Python code names."
    modules = [
        importlib.import_module(m.name)
        for part in (kvcache, kvcache.device, kvcache.kernels, kvcache.tree)
        for m in pkgutil.iter_modules(part.__path__, part.__name__ + ".")
        if not m.ispkg and not m.name.endswith("__main__")
    ]
    for function in functions_in(modules):
        names = function.__code__.co_names
        scope = [function.__globals__.get(name) for name in names]
        for module in [x for x in scope if isinstance(x, types.ModuleType)]:
            if module.__name__.startswith("kvcache."):
                scope += [getattr(module, name, None) for name in names]
        yield from (x for x in scope if isinstance(x, Dispatcher))

window, others, calls = json.loads(sys.argv[2])
warm = cache_of(window, False)
before = warm.stats()
warm.warm_up()
assert warm.stats() == before
missing = {x.py_func.__name__ for x in called_from_python() if not x.signatures}
with event.install_recorder("numba:compile") as compiled, event.install_recorder(
    "numba:compiler_lock"
) as loaded:
    callers = [Caller(warm, "first"), *(Caller(cache_of(*x), str(x)) for x in others)]
    for caller in callers:
        caller.run(calls // len(callers))
    late = [e.data["dispatcher"].py_func.__name__ for _, e in compiled.buffer if e.is_start]
print(json.dumps({
    "compiled": late,
    "loads": len(loaded.buffer),
    "missing": sorted(missing),
    "calls": sum((c.calls for c in callers), type(callers[0].calls)()),
    "refused": sum(c.refused.total() for c in callers),
    "evicted": [c.cache.stats().evicted_full_pages for c in callers],
}))
"""


compiles = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT", "0") != "0", reason="numba's compiler is off"
)


def outcome(window: int | None, others: list[tuple[int | None, bool]]) -> dict[str, Any]:
    argv = [sys.executable, "-c", CODE, json.dumps(ROOMS), json.dumps([window, others, CALLS])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@compiles
@pytest.mark.slow  # where the code is not on disk yet, all of it is compiled here
@pytest.mark.parametrize("window", [6, None])
def test_nothing_is_compiled_or_loaded_after_warm_up(window: int | None) -> None:
    """Of a windowed cache it covers all others: flags are arguments of compiled code, no types."""
    others = [(None, False), (6, True), (None, True)] if window else [(None, True)]
    report = outcome(window, others)
    assert report["compiled"] == []
    assert report["loads"] == 0
    calls = report["calls"]
    assert sum(calls.values()) >= CALLS
    assert min(calls[name] for name in ("match", "admit", "commit", "retract", "finish")) > 30
    assert min(calls[name] for name in ("decode", "token_slots", "drop_namespace", "flush")) > 5
    assert 0 < report["refused"] < CALLS / 4
    assert min(report["evicted"]) > 0
    if window:
        assert report["missing"] == []


@compiles
@pytest.mark.slow
def test_the_command_compiles_and_says_where_the_code_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["compile", "--device", "cpu", "--page-size", "4", "--window", "8", "--bigram"]
    assert main(argv) == 0
    took, where = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"cpu: \d+ functions compiled by numba, the others loaded; \d+\.\d s", took)
    assert any(Path(where.removeprefix("stored in ")).rglob("*.first_bad_span-*.nbc")), where
    # all of it again, and nothing is left to compile
    assert main(["compile", "--device", "cpu", "--window", "none"]) == 0
    assert "cpu: 0 functions" in capsys.readouterr().out
    monkeypatch.setattr("kvcache.compiled.cache_folder", lambda function: None)
    assert main(argv) == 1
    assert capsys.readouterr().err == "nothing is stored: no folder can be written\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page-size", "0"], "page_size must be in [1, 1048576], got 0"),
        (["--window", "wide"], "invalid int or none value: 'wide'"),
        (["--device", "abacus"], "device must be cpu, cuda or cuda:N, got 'abacus'"),
    ],
)
@compiles
def test_the_command_refuses_impossible_flags(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["compile", *options])
    except SystemExit as stop:  # argparse
        status = int(str(stop.code))
    assert status == 2
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True)


def test_compiled_code_gets_one_kind_of_array() -> None:
    """numba compiles anew for what is read-only, strided or unaligned."""
    plain = np.arange(4)
    read_only = np.arange(4)
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"?" + plain.tobytes(), np.int64, offset=1)
    for given in (read_only, unaligned, np.repeat(plain, 2)[::2], [0, 1, 2, 3]):
        array = as_int_array("x", given, dtype=INT64)
        assert array.tolist() == [0, 1, 2, 3]
        assert array.flags.carray
    assert as_int_array("x", plain, dtype=INT64) is plain
