"""The public names: each is there, none is imported before it is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache
from kvcache.cli import COMMANDS, main

HEAVY = ("numba", "numpy", "torch", "triton")


def imported_by(code: str, *argv: str) -> set[str]:
    """What of HEAVY a fresh interpreter has imported after `code`."""
    report = f"print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    whole = f"import atexit, sys\natexit.register(lambda: {report})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", whole, *argv], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["replay", "--help"]], ids=" ".join)
def test_the_command_line_imports_nothing_that_takes_time(argv: list[str]) -> None:
    run = "import kvcache.cli\nsys.exit(kvcache.cli.main(sys.argv[1:]))"
    assert imported_by(run, *argv) == set()


def test_the_package_imports_nothing_that_takes_time() -> None:
    assert imported_by("import kvcache\nkvcache.KVCacheError\ndir(kvcache)") == set()
    assert imported_by("import kvcache\nkvcache.KVCacheManager") >= {"numba", "numpy", "torch"}


def test_type_checkers_are_told_what_is_imported_later() -> None:
    told = {
        f"{node.module}.{alias.name}"
        for block in ast.parse(Path(kvcache.__file__).read_text()).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    later = {
        f"kvcache.{module}.{name}" for module, names in kvcache._NAMES.items() for name in names
    }
    assert told == later
    assert {name.split(".")[-1] for name in told} | {"__version__"} == set(kvcache.__all__)


def test_every_public_name_is_there() -> None:
    names = {name: getattr(kvcache, name) for name in kvcache.__all__}
    assert names.keys() <= set(dir(kvcache))
    starred: dict[str, object] = {}
    exec("from kvcache import *", starred)
    assert starred.items() >= names.items()
    for name, value in names.items():
        if name not in ("Lens", "Rows"):  # aliases
            assert getattr(value, "__name__", name) == name


def test_a_module_of_public_names_is_an_attribute() -> None:
    code = "import kvcache\nprint(kvcache.errors.KVCacheError, kvcache.device.views.Views)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "<class 'kvcache.errors.KVCacheError'> <class 'kvcache.device.views.Views'>\n"
    )


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'kvcache' has no attribute 'Manager'$"):
        kvcache.Manager  # noqa: B018
    with pytest.raises(ImportError):
        exec("from kvcache import Manager")


def test_help_says_what_each_subcommand_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    for name, (_, summary) in COMMANDS.items():
        assert f"{name} {summary}" in words
