"""Check everything on a machine with a GPU, in under 8 minutes; run by `make gpu-check`.

Parts: what is installed, the tests that need a GPU, `kvcache validate` there, compute-sanitizer where it is
found, the benchmarks, and the number goals. Each has its own time; what fails or runs out of it does not stop
the others. All output goes below one folder: $OUT if that is set, else perf/results/gpu/<name of the GPU>/.
Without a GPU the parts that need one are skipped by name, and the folder is build/gpu-check/.

Exit status: 0 if nothing failed, 1 if a part failed or a goal was missed.

Where `make` cannot install (no network), run `python3 tools/gpu_check.py` with any Python that has torch,
triton, numba, numpy, tqdm, pytest, hypothesis and llvmlite (PYTHONPATH may name a folder with some of them):
kvcache itself need not be installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gpu_goals

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "triton", "numba", "numpy", "tqdm", "pytest", "hypothesis", "llvmlite")
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
MOST_SECONDS = 470

_SIZES = ("--quick", "--batch", "1", "16", "256", "1024", "--tokens", "2048")
_LONG = ("--batch", "1024", "--tokens", "16384")
# runs of `kvcache bench` by the name of their JSON: seconds, arguments
BENCH_RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "p64": (50, (*_SIZES, "--page-size", "64")),
    "slots": (13, ("translate", "fill_indices", "--page-size", "64", *_LONG)),
    "pages": (13, ("fill_table", "apply", "--page-size", "1", *_LONG)),
    "match": (13, ("match", "--page-size", "64", "--batch", "256", "--tokens", "4096")),
    "compare": (13, ("match", "--page-size", "64", *_LONG)),
    "p1": (45, (*_SIZES, "--page-size", "1")),
    "p16_p256": (55, (*_SIZES, "--page-size", "16", "256")),
}
# without a GPU nothing is lent for a time, and the machine may be a slow one
_PATIENCE_WITHOUT_GPU = 6


class Check(NamedTuple):
    """Where and with what the parts run."""

    out: Path
    gpu: str | None  # its name; None: there is none
    sanitizer: str | None  # path of compute-sanitizer


class Outcome(NamedTuple):
    """How a part ended."""

    part: str
    status: str  # PASSED, FAILED, SKIPPED
    seconds: float
    note: str  # why, or what it found


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        name: What is checked.
        seconds: After so long it is stopped, which is a failure.
        command: Arguments of Python; gets the Check.
        needs: What must be there: "gpu", "sanitizer".
        variables: Environment variables on top of ours.
        prefix: Arguments of compute-sanitizer, if that runs it.
    """

    name: str
    seconds: int
    command: Callable[[Check], Iterable[str]]
    needs: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    prefix: tuple[str, ...] = ()


def _pytest(*args: str) -> Callable[[Check], tuple[str, ...]]:
    """Run pytest on test files, which are named from tests/ on."""
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
    files = tuple(str(ROOT / "tests" / a) if a.endswith(".py") else a for a in args)
    return lambda check: (*options, f"--rootdir={ROOT}", *files)


def _bench(name: str) -> Callable[[Check], tuple[str, ...]]:
    """Run `kvcache bench` on the GPU; its JSON is <name>.json, plots are below bench/<name>/."""

    def command(check: Check) -> tuple[str, ...]:
        out = ("--json", str(check.out / f"{name}.json"))
        plots = ("--out", str(check.out / "bench" / name)) if name.startswith("p") else ()
        return ("-m", "kvcache", "bench", *BENCH_RUNS[name][1], "--device", "cuda", *out, *plots)

    return command


def _bench_cpu(check: Check) -> tuple[str, ...]:
    out = str(check.out / "cpu.json")
    return ("-m", "kvcache", "bench", "--quick", "--device", "cpu", "--json", out)


def _validate(check: Check) -> tuple[str, ...]:
    return ("-m", "kvcache", "validate", "--device", "cuda", "--seconds", "8")


_GPU, _SANITIZER = ("gpu",), ("gpu", "sanitizer")
_SHORT = _pytest("kernels/test_kernels_gpu.py", "-k", "test_short")
_TOOL = ("--error-exitcode", "9", "--target-processes", "all", "--tool")
_INTERPRETED = (("TRITON_INTERPRET", "1"),)
# every tensor is an allocation of its own: an access beyond its end is then seen
_NO_CACHING = (("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"),)

PARTS = (
    Part("bytes moved, interpreted", 25, _pytest("interp/test_traffic.py"), (), _INTERPRETED),
    Part("benchmarks, CPU twins", 15, _bench_cpu),
    Part("kernels against twins", 75, _pytest("kernels/test_kernels_gpu.py"), _GPU),
    Part("scheduler calls never wait", 40, _pytest("device/test_scheduler_calls_gpu.py"), _GPU),
    Part("graph capture of the decode step", 20, _pytest("device/test_decode_graph_gpu.py"), _GPU),
    Part("match on the device", 15, _pytest("device/test_device_match_gpu.py"), _GPU),
    Part("manager beside its oracle", 20, _validate, _GPU),
    *(
        Part(f"benchmarks, {name}", seconds, _bench(name), _GPU)
        for name, (seconds, _) in BENCH_RUNS.items()
    ),
    Part("compute-sanitizer memcheck", 30, _SHORT, _SANITIZER, _NO_CACHING, (*_TOOL, "memcheck")),
    Part("compute-sanitizer racecheck", 25, _SHORT, _SANITIZER, (), (*_TOOL, "racecheck")),
)


def find_gpu() -> str | None:
    """Return the name of the GPU that torch can use, None without one."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def output_folder(gpu: str | None) -> Path:
    """Return the folder for all output: $OUT, or one named after the GPU."""
    given = os.environ.get("OUT")
    if given:
        return Path(given).resolve()
    if gpu is None:
        return ROOT / "build" / "gpu-check"
    return ROOT / "perf" / "results" / "gpu" / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def missing(part: Part, check: Check) -> str | None:
    """Return why a part is skipped, None if it can run."""
    if "gpu" in part.needs and check.gpu is None:
        return "no CUDA or HIP device"
    if "sanitizer" in part.needs and check.sanitizer is None:
        return "no compute-sanitizer on the PATH"
    return None


def run_part(part: Part, check: Check, work: Path, seconds: float) -> Outcome:
    """Run one part, its output into <part>.log; whatever happens is its outcome."""
    why = missing(part, check)
    if why is not None:
        return Outcome(part.name, SKIPPED, 0.0, why)
    program = (check.sanitizer, *part.prefix) if part.prefix and check.sanitizer else ()
    command = [*program, sys.executable, *part.command(check)]
    log = check.out / (re.sub(r"[^a-z0-9]+", "-", part.name.lower()) + ".log")
    # a link to the package alone: with the root on the path `import kernels` would find our folder
    paths = [str(work), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **dict(part.variables), "PYTHONPATH": os.pathsep.join(paths)}
    start = time.monotonic()
    patience = _PATIENCE_WITHOUT_GPU if check.gpu is None else 1
    limit = min(float(part.seconds * patience), seconds)
    with log.open("w") as file:
        print("$", *command, file=file, flush=True)
        done = subprocess.Popen(
            command, cwd=work, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status: int | None = done.wait(limit)
        except subprocess.TimeoutExpired:
            # what it started goes too; it must not use the device under the parts to come
            os.killpg(done.pid, signal.SIGKILL)
            done.wait()
            status = None
    took = time.monotonic() - start
    last = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
    if status is None:
        return Outcome(part.name, FAILED, took, f"stopped after {limit:.0f} s; {log.name}")
    if status != 0:
        return Outcome(part.name, FAILED, took, f"exit status {status}: {last}; {log.name}")
    last = last.strip("= ")
    if "gpu" in part.needs and re.search(r"\d skipped", last):
        return Outcome(part.name, FAILED, took, f"tests were skipped: {last}; {log.name}")
    return Outcome(part.name, PASSED, took, last)


def run_all(check: Check, parts: Iterable[Part]) -> list[Outcome]:
    """Run the parts in turn; say how each ended."""
    found = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "kvcache").symlink_to(ROOT / "kvcache")
        for part in parts:
            left = MOST_SECONDS - (time.monotonic() - start)
            outcome = run_part(part, check, work, left)
            print(
                f"{outcome.status:8}{outcome.seconds:6.1f} s  {part.name}: {outcome.note}",
                flush=True,
            )
            found.append(outcome)
    return found


def environment(check: Check) -> dict[str, Any]:
    """Return what is installed, and what nvidia-smi says."""
    found: dict[str, Any] = {"python": sys.version, "gpu": check.gpu, "sanitizer": check.sanitizer}
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            found[name] = "not installed"
        else:
            from importlib.metadata import version

            found[name] = version(name)
    for command in (("nvidia-smi",), ("git", "rev-parse", "HEAD"), ("lscpu",)):
        if shutil.which(command[0]):
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
            )
            found[" ".join(command)] = done.stdout.strip().splitlines()
    return found


def judge_goals(check: Check) -> list[gpu_goals.Result]:
    """Return how the goals came out in what the benchmarks wrote; nothing without a GPU."""
    if check.gpu is None:
        return []
    reports = {}
    for name in BENCH_RUNS:
        path = check.out / f"{name}.json"
        if path.exists():
            reports[name] = json.loads(path.read_text())
    return gpu_goals.judge_all(reports)


def summary(
    check: Check, outcomes: Iterable[Outcome], goals: list[gpu_goals.Result], seconds: float
) -> str:
    """Return the report in Markdown."""
    lines = [f"# gpu-check: {check.gpu or 'no GPU'}", "", f"{seconds:.0f} s in all.", ""]
    lines += ["| part | | seconds | |", "| --- | --- | --- | --- |"]
    for part, status, took, note in outcomes:
        lines.append(f"| {part} | {status} | {took:.1f} | {note.replace('|', ' ')} |")
    lines += ["", "## Number goals", ""]
    lines.append(gpu_goals.as_markdown(goals) if goals else "skipped: no CUDA or HIP device")
    lines += [
        "",
        "Bytes of a pass within 1.5x of the least: the part `bytes moved, interpreted`.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the check; returns the exit status."""
    if sys.argv[1:]:
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    start = time.monotonic()
    gpu = find_gpu()
    check = Check(output_folder(gpu), gpu, shutil.which("compute-sanitizer"))
    check.out.mkdir(parents=True, exist_ok=True)
    for old in check.out.glob("*.json"):
        old.unlink()  # of an earlier run: its figures must not pass for those of this one
    installed = environment(check)
    (check.out / "environment.json").write_text(json.dumps(installed, indent=1) + "\n")
    print(f"GPU: {gpu or 'none'}; output: {check.out}", flush=True)
    outcomes = [Outcome("environment", PASSED, time.monotonic() - start, f"GPU: {gpu or 'none'}")]
    lacking = [name for name in NEEDED if installed[name] == "not installed"]
    if lacking:
        outcomes[0] = Outcome("environment", FAILED, 0.0, f"not installed: {', '.join(lacking)}")
        print(f"{FAILED}: {outcomes[0].note}", flush=True)
    outcomes += run_all(check, PARTS)
    goals = judge_goals(check)
    seconds = time.monotonic() - start
    text = summary(check, outcomes, goals, seconds)
    (check.out / "summary.md").write_text(text)
    found = {
        "gpu": gpu,
        "seconds": round(seconds, 1),
        "parts": [outcome._asdict() for outcome in outcomes],
        "goals": [goal._asdict() for goal in goals],
    }
    (check.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{text}", flush=True)
    failed = any(o.status == FAILED for o in outcomes) or any(not goal.holds for goal in goals)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
