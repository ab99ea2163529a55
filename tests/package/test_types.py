"""Type checkers find the package, and its types, from the environment that the Makefile makes."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import numpy as np
from kvcache import CacheConfig, KeyBatch, KVCacheManager
from kvcache.kernels.layout import ROW_FIELDS
from kvcache.tree.match import NUM_RESULTS

def serve(cache: KVCacheManager, config: CacheConfig) -> None:
    batch = cache.match(KeyBatch(np.zeros(3, np.int32), [0], [3]))
    reveal_type(batch)
    reveal_type(cache.admit_as_many(batch, [3]))
    reveal_type(config.page_size + ROW_FIELDS + NUM_RESULTS)
    cache.extend(cache.admit(batch), np.array([3]))
    cache.step(object())
    cache.match([1, 2, 3])
"""
# what the package is built on takes a minute to check, and is not what is asked
SETTINGS = "[mypy]\n[mypy-torch.*,numba.*]\nfollow_imports = skip\nignore_missing_imports = True\n"


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed (make types)")
@pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(),
    reason="this is not the environment that the Makefile makes",
)
def test_mypy_finds_the_types_outside_of_the_checkout(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    environment = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        (sys.executable, "-m", "mypy", "--cache-dir", tmp_path / "cache", "program.py"),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if "program.py" in line]
    assert found[:3] == [
        'note: Revealed type is "kvcache.match_batch.MatchBatch"',
        'note: Revealed type is "int"',
        'note: Revealed type is "int"',
    ], done.stdout
    assert 'Argument 1 to "step" of "KVCacheManager" has incompatible type "object"' in found[3]
    assert 'No overload variant of "match"' in found[4]
