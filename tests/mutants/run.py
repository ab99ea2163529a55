"""Plant each bug of planted.py in a copy of the sources and see a test fail: `make mutants`.

A mutant that survives, or whose text is no longer in the sources, makes this fail. The copy runs with numba's
compiler off (NUMBA_DISABLE_JIT=1): the twins and the tree are plain Python then, and nothing is compiled.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from planted import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
_FOLDERS = ("kvcache", "kernels", "tree", "tests", "examples")


def _copy(target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for folder in _FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)


def _tests_fail(root: Path, tests: str) -> tuple[bool, str]:
    environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_DISABLE_JIT": "1"}
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-x",
        "--hypothesis-profile=mutants",
        "-W",
        "ignore",
        *shlex.split(tests),
    ]
    if sys.version_info < (3, 11):
        command.remove("-P")
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 1: tests failed. 2 to 5 (interrupted, usage, nothing collected) say nothing about the mutant
    return done.returncode == 1, (lines or done.stdout.splitlines()[-1:] or [done.stderr])[0][:150]


def _not_there(root: Path, mutants: list[Mutant]) -> list[str]:
    """Return a line for each mutant whose text does not occur exactly once."""
    counts = {m.name: (root / m.path).read_text().count(m.old) for m in mutants}
    return [
        f"{m.name}: {m.path} has {counts[m.name]} x {m.old!r}"
        for m in mutants
        if counts[m.name] != 1
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only mutants whose name contains this")
    chosen = [m for m in MUTANTS if parser.parse_args().k in m.name]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        _copy(root)
        stale = _not_there(root, chosen)
        if stale:
            raise SystemExit("\n".join(stale))
        for tests in sorted({m.tests for m in chosen}):
            failed, line = _tests_fail(root, tests)
            if failed:
                raise SystemExit(f"without a mutant, {tests} fails: {line}")
        for mutant in chosen:
            path = root / mutant.path
            text = path.read_text()
            path.write_text(text.replace(mutant.old, mutant.new))
            caught, line = _tests_fail(root, mutant.tests)
            path.write_text(text)
            survivors += not caught
            print(f"{'caught  ' if caught else 'SURVIVED'} {mutant.name:45} {line}", flush=True)
    print(f"{len(chosen) - survivors} passed, {survivors} failed")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
