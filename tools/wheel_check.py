"""Build the wheel, install it beside packages that are called `kernels` and `tree`, import all.

Run by `make wheel-check`. The wheel is built from the source archive, which has no symlinks. Torch,
numba and numpy are taken from the environment this runs in; the rest goes into a fresh one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

import kvcache
from kvcache.compiled import source_digest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "kvcache": "kvcache",
    "kernels": "kvcache/kernels",
    "tree": "kvcache/tree",
    "perf/kernels": "kvcache/bench",
}

# Hugging Face `kernels` and `dm-tree`, with what importing them takes (they bring far more along)
NEIGHBOURS = (
    "kernels==0.17.2",
    "huggingface_hub==2.4.0",
    "h11==0.16.0",
    "httpcore2==2.14.0",
    "httpx2==2.14.0",
    "idna==3.20",
    "PyYAML==6.0.4",
    "tomli==2.5.0",
    "truststore==0.10.5",
    "dm-tree==0.1.10",
)

IMPORTS = """
import sys
from pathlib import Path
import kernels, tree
import kvcache, kvcache.bench, kvcache.kernels, kvcache.sizing, kvcache.tree
from kvcache.compiled import source_digest

site = Path(sys.argv[1])
for module in (kvcache, kvcache.bench, kvcache.kernels, kvcache.tree, kernels, tree):
    folder = site / module.__name__.replace(".", "/")
    assert [Path(path) for path in module.__path__] == [folder], module.__path__
assert hasattr(kernels, "get_kernel") and hasattr(tree, "map_structure")
assert kvcache.__version__ == sys.argv[2], kvcache.__version__
assert kvcache.sizing.load_model("gpt-oss-120b").window == 128
digests = [source_digest(part) for part in ("kernels", "tree")]
assert digests == sys.argv[3:], "the installed sources differ from the checkout"
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run `command` and return what it printed; stop the check with its output if it fails."""
    # PYTHONPATH would put other sources before the installed ones
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}exit status {done.returncode}")
    return done.stdout


def check_contents(wheel: Path) -> None:
    """Stop unless the wheel holds every source of the checkout as it is, and nothing beside them."""
    data = ("kvcache/py.typed", "kvcache/sizing/models.json")
    expected = {name: ROOT / name for name in data}
    for folder, prefix in FOLDERS.items():
        for source in (ROOT / folder).rglob("*.py"):
            expected[f"{prefix}/{source.relative_to(ROOT / folder).as_posix()}"] = source
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    found = {name for name in names if ".dist-info/" not in name}
    if found != expected.keys():
        missing, more = sorted(expected.keys() - found), sorted(found - expected.keys())
        sys.exit(f"missing {missing}, unexpected {more}")
    for name, source in expected.items():
        if archive.read(name) != source.read_bytes():
            sys.exit(f"{name} differs from {source}")
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        sys.exit("the wheel has no LICENSE")


def main() -> None:
    """Run the check; exits with a message at the first fault."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        print("building", flush=True)
        run(sys.executable, "-m", "build", "--outdir", work)
        (wheel,) = work.glob("*.whl")
        check_contents(wheel)

        print(f"installing {wheel.name} beside {NEIGHBOURS[0]} and {NEIGHBOURS[-1]}", flush=True)
        venv.create(work / "venv", with_pip=False, symlinks=True)
        python = work / "venv" / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
        run(*pip, "install", "--quiet", "--no-deps", wheel, *NEIGHBOURS)
        site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
        # only now: pip would take the kvcache of this environment for an installed one
        (site / "torch_and_numba.pth").write_text(sysconfig.get_path("purelib") + "\n")

        print("importing", flush=True)
        # from another folder: at the root of the checkout `kvcache` would be that of the checkout
        digests = [source_digest(part) for part in ("kernels", "tree")]
        run(python, "-c", IMPORTS, site, kvcache.__version__, *digests, cwd=Path("/"))
        version = run(work / "venv" / "bin" / "kvcache", "--version", cwd=Path("/")).strip()
        if version != f"kvcache {kvcache.__version__}":
            sys.exit(f"`kvcache --version` printed {version!r}")
    print("wheel ok")


if __name__ == "__main__":
    main()
