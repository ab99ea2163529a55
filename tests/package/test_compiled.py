"""`@compiled`: no edit is survived by a cache, and no cache is needed.

Each case is a small package around the real kvcache/compiled.py. It is run by a process forked from
one that has imported numba and nothing of ours: as good as a fresh interpreter, and much faster.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# the compiled function stands in top.py; what it answers is decided in other files too
SOURCES = {
    "__init__.py": "",
    "checks.py": "",
    "errors.py": "TEN_THOUSAND = 10000\nclass CacheFolderWarning(UserWarning): ...\n",
    "uncopied.py": "",
    "kernels/layout.py": "TEN = 10\n",
    "replay/__init__.py": "",
    "replay/deep/__init__.py": "HUNDRED = 100\n",
    "tree/units.py": "UNIT = 1\n",
    "tree/walk.py": (
        "from kvcache.compiled import compiled\n"
        "from kvcache.errors import TEN_THOUSAND\n"
        "from kvcache.tree.units import UNIT\n"
        "THOUSAND = 1000\n"
        "@compiled\n"
        "def walk(x):\n"
        "    return x * (UNIT + THOUSAND + TEN_THOUSAND)\n"
    ),
    "top.py": (
        "from kvcache.compiled import compiled\n"
        "from kvcache.kernels.layout import TEN\n"
        "from kvcache.replay.deep import HUNDRED\n"
        "from kvcache.tree.walk import walk\n"
        "@compiled\n"
        "def top(x):\n"
        "    return walk(x) + TEN + HUNDRED + 0\n"
    ),
}
CALL = "from kvcache.top import top\nprint(top(1))\n"
CALL_AND_COUNT_HITS = (
    CALL + "from kvcache.tree.walk import walk\n"
    "print(*(sum(function.stats.cache_hits.values()) for function in (top, walk)))\n"
)


# a line of JSON in, the exit status out
FORK_SERVER = """
import json, os, sys, traceback
from numba import config, njit

njit(lambda x: x + 1)(1)
sys.dont_write_bytecode = True
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(job["folder"])
            output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path.insert(0, job["folder"])
            os.environ.update(job["environment"])
            config.reload_config()
            exec(job["code"], {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Runner:
    """Runs code in processes forked from one that has numba ready."""

    def __init__(self) -> None:
        plain = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        self.server = subprocess.Popen(
            (sys.executable, "-c", FORK_SERVER),
            env=plain,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, code: str, folder: Path, **environment: str) -> list[str]:
        """Run `code` in `folder` and return the words it printed."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        job = {"code": code, "folder": str(folder), "environment": environment}
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        status = self.server.stdout.readline()
        output = (folder / "output").read_text()
        assert status == "0\n", output
        return output.split()


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    runner = Runner()
    yield runner
    runner.server.communicate()
    assert runner.server.returncode == 0


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that holds a small package `kvcache` around the real compiled.py."""
    for name, text in SOURCES.items():
        path = tmp_path / "kvcache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(ROOT / "kvcache" / "compiled.py", tmp_path / "kvcache")
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    """Replace text so that neither size nor modification time tells."""
    assert len(old) == len(new)
    before = path.stat()
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cache_files(folder: Path, pattern: str = "*.nb[ci]") -> list[Path]:
    return sorted((folder / "kvcache").rglob(pattern))


def forbid_caches(folder: Path) -> dict[str, str]:
    """Make every place where numba would cache unusable, for root too: a file stands in the way.

    Returns the environment to run in.
    """
    for package in {source.parent for source in (folder / "kvcache").rglob("*.py")}:
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        (package / "__pycache__").write_text("")
    (folder / "home").write_text("")
    home = str(folder / "home")
    return {"HOME": home, "XDG_CACHE_HOME": home, "NUMBA_CACHE_DIR": home}


# print each warning: its category, and its text as one word
SHOW_WARNINGS = (
    "import tempfile, warnings\n"
    "warnings.showwarning = lambda text, kind, *_: print(kind.__name__, str(text).replace(' ', '_'))\n"
)
# as a folder is that cannot be written; root may write everywhere
REFUSE_TO_WRITE = (
    "def refuse(*_, dir, **__):\n"
    "    raise PermissionError(13, 'Permission denied', dir)\n"
    "tempfile.TemporaryFile = refuse\n"
)


def told_of(folder: Path) -> list[str]:
    """What the process is told where compiled code cannot be stored."""
    text = (
        f"compiled code cannot be stored in {folder}: every process compiles it anew, for some 20 s. "
        "Make the folder writable, or set NUMBA_CACHE_DIR to one that is"
    )
    return ["CacheFolderWarning", text.replace(" ", "_")]


def test_second_process_takes_the_code_from_disk(package: Path, run: Runner) -> None:
    assert run(CALL_AND_COUNT_HITS, package) == ["11111", "0", "0"]
    # the code of the outer function brings that of the inner one along
    assert run(CALL_AND_COUNT_HITS, package) == ["11111", "1", "0"]
    inner = "from kvcache.tree.walk import walk\nprint(walk(1), *walk.stats.cache_hits.values())"
    assert run(inner, package) == ["11001", "1"]


def test_edit_of_any_file_is_seen(package: Path, run: Runner) -> None:
    assert run(CALL, package) == ["11111"]
    for file, old, new, answer in (
        ("top.py", "+ 0", "+ 5", "11116"),
        ("kernels/layout.py", "TEN = 10", "TEN = 20", "11126"),
        ("replay/deep/__init__.py", "HUNDRED = 100", "HUNDRED = 200", "11226"),
        ("tree/walk.py", "THOUSAND = 1000", "THOUSAND = 2000", "12226"),
        ("tree/units.py", "UNIT = 1", "UNIT = 2", "12227"),
        ("errors.py", "TEN_THOUSAND = 10000", "TEN_THOUSAND = 20000", "22227"),
        ("tree/units.py", "UNIT = 2", "UNIT = 1", "22226"),
    ):
        edit(package / "kvcache" / file, old, new)
        assert run(CALL_AND_COUNT_HITS, package)[:2] == [answer, "0"], file


def test_edit_outside_the_tree_leaves_its_code_in_place(package: Path, run: Runner) -> None:
    run(CALL, package)
    edit(package / "kvcache" / "kernels" / "layout.py", "TEN = 10", "TEN = 20")
    assert run(CALL_AND_COUNT_HITS, package) == ["11121", "0", "1"]


def test_code_of_other_sources_is_deleted(package: Path, run: Runner) -> None:
    run(CALL, package)
    before = cache_files(package)
    assert len(before) == 4  # index and code of two functions
    edit(package / "kvcache" / "errors.py", "10000", "20000")
    run(CALL, package)
    after = cache_files(package)
    assert len(after) == 4
    assert not set(after) & set(before)


def test_process_that_dies_between_index_and_code_leaves_no_old_code(
    package: Path, run: Runner
) -> None:
    assert run(CALL, package) == ["11111"]
    edit(package / "kvcache" / "tree" / "units.py", "UNIT = 1", "UNIT = 2")
    dies_before_code = (
        "import os\n"
        "from numba.core.caching import IndexDataCacheFile\n"
        "IndexDataCacheFile._save_data = lambda self, name, data: os._exit(0)\n"
    )
    assert run(dies_before_code + CALL, package) == []
    assert run(CALL, package) == ["11112"]


def test_damaged_cache_is_replaced(package: Path, run: Runner) -> None:
    run(CALL, package)
    for pattern, content in (("*.nbi", b""), ("*.nbi", b"no pickle"), ("*.nbc", b"no pickle")):
        damaged = cache_files(package, pattern)
        assert len(damaged) == 2
        for path in damaged:
            path.write_bytes(content)
        assert run(CALL_AND_COUNT_HITS, package) == ["11111", "0", "0"]
    assert run(CALL_AND_COUNT_HITS, package) == ["11111", "1", "0"]


def test_runs_where_no_cache_can_be_written(package: Path, run: Runner) -> None:
    environment = forbid_caches(package)
    code = SHOW_WARNINGS + CALL_AND_COUNT_HITS
    told = told_of(package / "home")
    assert run(code, package, **environment) == [*told, "11111", "0", "0"]
    assert not list(package.rglob("*.nb[ci]"))


def test_folder_that_cannot_be_written_is_named_once(package: Path, run: Runner) -> None:
    environment = forbid_caches(package)
    # numba changes the filters of warnings when it compiles: Python's own memory of them is lost
    code = SHOW_WARNINGS + CALL
    assert run(code, package, **environment) == [*told_of(package / "home"), "11111"]
    del environment["NUMBA_CACHE_DIR"]
    assert run(code, package, **environment) == [*told_of(package / "kvcache"), "11111"]
    assert run(SHOW_WARNINGS + CALL, package, NUMBA_CACHE_DIR=str(package / "new")) == ["11111"]


def test_folder_that_cannot_be_written_any_more_is_named_once(package: Path, run: Runner) -> None:
    code = SHOW_WARNINGS + CALL.replace("print", REFUSE_TO_WRITE + "print")
    assert run(code, package) == [*told_of(package / "kvcache"), "11111"]


@pytest.mark.parametrize("environment", [{}, {"NUMBA_CACHE_DIR": "filled"}], ids=["tree", "own"])
def test_filled_cache_is_read_where_it_cannot_be_written(
    package: Path, run: Runner, environment: dict[str, str]
) -> None:
    environment = {name: str(package / folder) for name, folder in environment.items()}
    run(CALL, package, **environment)
    code = SHOW_WARNINGS + REFUSE_TO_WRITE + CALL_AND_COUNT_HITS
    assert run(code, package, **environment) == ["11111", "1", "0"]
    # code of other sources is as good as none
    edit(package / "kvcache" / "tree" / "units.py", "UNIT = 1", "UNIT = 2")
    told = told_of(package / environment.get("NUMBA_CACHE_DIR", "kvcache"))
    assert run(code, package, **environment) == [*told, "11112", "0", "0"]


def test_whole_package_imports_where_no_cache_can_be_written(tmp_path: Path, run: Runner) -> None:
    shutil.copytree(
        ROOT / "kvcache", tmp_path / "kvcache", ignore=shutil.ignore_patterns("__pycache__")
    )
    environment = forbid_caches(tmp_path)
    sources = [path.relative_to(tmp_path) for path in (tmp_path / "kvcache").rglob("*.py")]
    names = sorted(".".join(path.with_suffix("").parts) for path in sources)
    assert "kvcache.tree.match" in names
    code = (
        f"{SHOW_WARNINGS}import importlib, kvcache\n"
        f"for name in {names}:\n"
        "    if not name.endswith('__main__'):\n"
        "        importlib.import_module(name.removesuffix('.__init__'))\n"
        "print(kvcache.__file__)\n"
    )
    where = str(tmp_path / "kvcache" / "__init__.py")
    assert run(code, tmp_path, **environment) == [*told_of(tmp_path / "home"), where]


def test_folder_that_goes_away_before_the_first_call_is_no_error(
    package: Path, run: Runner
) -> None:
    goes_away = (
        f"{SHOW_WARNINGS}import shutil\n"
        "from pathlib import Path\n"
        "from kvcache.tree.walk import walk\n"
        "cache = Path('kvcache/tree/__pycache__')\n"
        "shutil.rmtree(cache)\n"
        "cache.write_text('')\n"
        "print(walk(1))\n"
    )
    assert run(goes_away, package) == [*told_of(package / "kvcache"), "11001"]


def test_bounds_checks_are_not_lost_to_a_cache_without_them(package: Path, run: Runner) -> None:
    path = package / "kvcache" / "tree" / "walk.py"
    path.write_text(
        "from kvcache.compiled import compiled\n@compiled\ndef walk(x, i):\n    return x[i]\n"
    )
    code = (
        "import numpy as np\n"
        "from kvcache.tree.walk import walk\n"
        "x = np.arange(9)[2:4]\n"
        "try:\n"
        "    print(walk(x, 5))\n"
        "except IndexError:\n"
        "    print('checked')\n"
    )
    assert run(code, package) == ["7"]
    assert run(code, package, NUMBA_BOUNDSCHECK="1") == ["checked"]
    assert run(code, package) == ["7"]


def digest_of(package: Path) -> str:
    """The digest as the compiled.py of this package, wherever it stands, computes it."""
    spec = importlib.util.spec_from_file_location("compiled_elsewhere", package / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    digest = module.source_digest()
    assert isinstance(digest, str)
    return digest


def linked(package: Path) -> None:
    for top in ("kernels", "tree"):
        shutil.move(package / top, package.parent / top)
        (package / top).symlink_to(Path("..") / top)


def links_lost(package: Path) -> None:
    linked(package)
    for top in ("kernels", "tree"):
        (package / top).unlink()
        (package / top).write_text(f"../{top}")


@pytest.mark.parametrize("layout", [linked, links_lost])
def test_digest_is_the_same_in_a_checkout_and_installed(
    package: Path, layout: Callable[[Path], None]
) -> None:
    installed = digest_of(package / "kvcache")
    layout(package / "kvcache")
    assert digest_of(package / "kvcache") == installed
    edit(package / "tree" / "units.py", "UNIT = 1", "UNIT = 2")
    assert digest_of(package / "kvcache") != installed


def test_digest_tells_files_by_name(package: Path) -> None:
    before = digest_of(package / "kvcache")
    # it stays where it was in the order of names
    (package / "kvcache" / "top.py").rename(package / "kvcache" / "torn.py")
    assert digest_of(package / "kvcache") != before


def test_package_without_sources_gets_no_cache(package: Path, run: Runner) -> None:
    """Only bytecode, or a zip: nothing to tell one version from the next by."""
    zipped = shutil.make_archive(str(package / "zipped"), "zip", package, "kvcache")
    shutil.rmtree(package / "kvcache")
    run_zipped = f"import sys\nsys.path.insert(0, {zipped!r})\n" + CALL
    home = str(package / "home")
    assert run(run_zipped, package, NUMBA_CACHE_DIR=home) == ["11111"]
    assert not list(package.rglob("*.nb[ci]"))
