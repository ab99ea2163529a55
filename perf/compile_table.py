"""What every kernel compiles to for four GPUs, without one: `python perf/compile_table.py` (a minute or two).

Registers, spills, shared memory, barriers, and loads and stores of 16 bytes a thread, at the specialisations
of tests/kernels/compile_cases.py; and how many variants a kernel has over all sizes. Writes the figures of
the Triton that runs it into perf/results/compile.json, beside those of other versions, and from it
compile.md. tests/aot fails where a kernel compiles to something worse than what stands there for the
running version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "perf" / "results"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]

Figures = dict[str, int]
COLUMNS = {
    "registers": "registers",
    "spills": "spills",
    "shared": "shared memory, bytes",
    "barriers": "barriers",
}


def measure() -> dict[str, Any]:
    """Compile everything for every target."""
    from compile_cases import KERNELS, SWEEPS, compile_kernel, count_variants
    from instruments.aot import TARGETS

    kernels: dict[str, dict[str, Figures]] = {}
    for name in KERNELS:
        kernels[name] = {target: compile_kernel(name, target).figures() for target in TARGETS}
        print(name, flush=True)
    return {"kernels": kernels, "variants": {op: count_variants(op) for op in SWEEPS}}


def _table(kernels: dict[str, dict[str, Figures]], target: str) -> list[str]:
    lines = [
        f"| kernel | {' | '.join(COLUMNS.values())} | 16-byte loads of all | 16-byte stores of all |",
        f"| --- {'| ---: ' * len(COLUMNS)}| ---: | ---: |",
    ]
    for name, by_target in kernels.items():
        found = by_target[target]
        cells = [str(found[column]) for column in COLUMNS]
        cells += [f"{found[f'wide_{kind}']} of {found[kind]}" for kind in ("loads", "stores")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def render(results: dict[str, Any]) -> str:
    """Return compile.md."""
    lines = [
        "# What the kernels compile to",
        "",
        "Written by `perf/compile_table.py` under each version of Triton (`.venv/bin/python` and, after",
        "`make test-triton-old`, `.venv-triton-old/bin/python`), on a machine without a GPU. tests/aot fails",
        "where something is worse than here.",
        "",
        "Registers are those of a thread (AMD: vector registers). Spills: spilled registers, spill",
        "instructions and bytes of stack, added up. Loads and stores are instructions of PTX or of AMD's",
        "assembly: how many move 16 bytes a thread, of how many there are. The flags in brackets:",
        "`tests/kernels/compile_cases.py`.",
    ]
    for version, found in results.items():
        lines += ["", f"## Triton {version}"]
        targets = next(iter(found["kernels"].values()))
        for target in targets:
            lines += ["", f"### {target}", "", *_table(found["kernels"], target)]
        lines += ["", "### Variants over all sizes (sm_90)", ""]
        lines += ["| kernel | variants |", "| --- | ---: |"]
        lines += [f"| {op} | {count} |" for op, count in found["variants"].items()]
    return "\n".join(lines) + "\n"


def summary(results: dict[str, Any]) -> str:
    """Return the table of docs/benchmarks.md: the most of each kernel at any flags, on sm_90, by version."""
    lines = [
        f"| {' / '.join(results)} | registers | spills | barriers | 16-byte loads, stores | variants |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for op in next(iter(results.values()))["variants"]:
        cells: dict[str, list[str]] = {}
        for found in results.values():
            named = [by for name, by in found["kernels"].items() if name.split(" (")[0] == op]
            most = {key: max(by["sm_90"][key] for by in named) for key in named[0]["sm_90"]}
            for column in ("registers", "spills", "barriers"):
                cells.setdefault(column, []).append(str(most[column]))
            cells.setdefault("wide", []).append(f"{most['wide_loads']}, {most['wide_stores']}")
            cells.setdefault("variants", []).append(str(found["variants"][op]))
        lines.append(f"| `{op}` | {' | '.join(' / '.join(cell) for cell in cells.values())} |")
    return "\n".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    path = RESULTS / "compile.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # the kernels have no floats
        import triton

        results[triton.__version__] = measure()
    results = dict(sorted(results.items()))
    path.write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "compile.md").write_text(render(results))
    print(
        f"{summary(results)}\n\nwrote {path} and compile.md beside it; docs/benchmarks.md shows this table"
    )


if __name__ == "__main__":
    main()
