"""Set SGLang up in .venv-peers, then run bench.py there: what `make bench-peers` does.

Needs CPython 3.11 on Linux x86-64 with glibc 2.34 or newer (the wheel holds a compiled core) and an index to
install from. Where that is missing it says so and ends with status 0: there is nothing to compare with.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-peers"
STAMP = VENV / ".installed"
SGLANG = "sglang==0.5.20"
INPUTS = (
    ROOT / "pyproject.toml",
    ROOT / "constraints.txt",
    HERE / "requirements.txt",
    HERE / "run.py",
)
GLIBC = (2, 34)


class CannotRun(Exception):
    """This machine has no peer to compare with."""


def interpreter() -> str:
    """Return a CPython 3.11, or raise CannotRun where the wheel cannot be loaded."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise CannotRun(
            f"{SGLANG} has a compiled core for Linux x86-64 only, "
            f"this is {platform.system()} {platform.machine()}"
        )
    name, number = platform.libc_ver()
    if name == "glibc" and tuple(int(x) for x in number.split(".")[:2]) < GLIBC:
        raise CannotRun(f"{SGLANG} needs glibc {GLIBC[0]}.{GLIBC[1]}, this is {number}")
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        raise CannotRun(
            f"{SGLANG} needs CPython 3.11 (make bench-peers PYTHON=/path/to/python3.11)"
        )
    return found


def digest() -> str:
    """Return what the environment was made from."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in INPUTS)).hexdigest()


def install(pip_args: list[str]) -> Path:
    """Make or renew the environment; return its Python."""
    python = VENV / "bin" / "python"
    if STAMP.exists() and STAMP.read_text() == digest():
        return python
    base = interpreter()
    print(f"installing {SGLANG} into {VENV.name} (some minutes the first time)", flush=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *pip_args]
    steps = (
        [base, "-m", "venv", str(VENV)],
        # torch, triton, numba and matplotlib as in .venv, and kvcache itself
        [*pip, "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[plot]"],
        # pinned one by one: left to itself, pip brings CUDA kernels and another torch
        [*pip, "--no-deps", "-r", str(HERE / "requirements.txt"), SGLANG],
    )
    for step in steps:
        done = subprocess.run(step, check=False)
        if done.returncode != 0:
            raise CannotRun(f"'{shlex.join(step)}' failed with status {done.returncode}")
    check = [
        str(python),
        "-c",
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import sglang_side",
    ]
    done = subprocess.run(check, check=False, capture_output=True, text=True, cwd="/")
    if done.returncode != 0:
        raise CannotRun(f"{SGLANG} was installed but cannot be imported:\n{done.stderr[-2000:]}")
    STAMP.write_text(digest())
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pip-args", default="", help="further options for pip")
    parser.add_argument("bench_args", nargs="*", help="after --: options of bench.py")
    args = parser.parse_args()
    try:
        python = install(shlex.split(args.pip_args))
    except CannotRun as why:
        print(f"bench-peers skipped: {why}")
        return
    sys.exit(
        subprocess.run(
            [str(python), str(HERE / "bench.py"), *args.bench_args], check=False
        ).returncode
    )


if __name__ == "__main__":
    main()
