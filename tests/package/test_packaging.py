"""The repository as a package: folders, links, names, versions, and what an import brings along."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvcache
import kvcache.bench
import kvcache.kernels
import kvcache.tree
from kvcache.compiled import LEAF_MODULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PREFIX = {
    "kvcache": "kvcache",
    "kernels": "kvcache.kernels",
    "tree": "kvcache.tree",
    "perf/kernels": "kvcache.bench",
}
# links in kvcache/: where they lead
LINKS = {"kernels": "kernels", "tree": "tree", "bench": "perf/kernels"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(
    code: str, cwd: Path, *, path: list[Path] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter with `cwd` first on its path, and then `path` if it is given."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(
        (sys.executable, "-c", code),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_package_on_disk_is_listed(project: dict[str, Any]) -> None:
    on_disk = set()
    for top, name in PREFIX.items():
        for source in (ROOT / top).rglob("*.py"):
            on_disk.add(".".join((name, *source.parent.relative_to(ROOT / top).parts)))
    assert on_disk == set(project["tool"]["setuptools"]["packages"])


def test_every_listed_package_has_an_init_but_for_links(project: dict[str, Any]) -> None:
    """With one, the folder at the top would hide a foreign package of its name (PEP 420)."""
    without = {
        name
        for name in project["tool"]["setuptools"]["packages"]
        if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()
    }
    assert without == {f"kvcache.{name}" for name in LINKS}


def test_links_point_at_the_real_folders() -> None:
    for name, top in LINKS.items():
        link = ROOT / "kvcache" / name
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert link.resolve() == ROOT / top
        assert not (ROOT / top).is_symlink()


def test_imported_packages_are_those_of_the_checkout() -> None:
    for module in (kvcache, kvcache.kernels, kvcache.tree, kvcache.bench):
        (top,) = (top for top, name in PREFIX.items() if name == module.__name__)
        assert [Path(folder).resolve() for folder in module.__path__] == [ROOT / top]


def test_version_is_the_same_everywhere(project: dict[str, Any]) -> None:
    version = project["project"]["version"]
    assert kvcache.__version__ == version
    assert importlib.metadata.version("kvcache") == version
    assert re.search(rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_typed_marker_and_license_are_shipped(project: dict[str, Any]) -> None:
    assert (ROOT / "kvcache" / "py.typed").is_file()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["kvcache"]
    assert project["project"]["license"] == "Apache-2.0"
    for name in project["project"]["license-files"]:
        assert "Apache License" in (ROOT / name).read_text()


# the root of the checkout on sys.path: PYTHONPATH, `python -m`, `python -c` there


@pytest.mark.parametrize("link", LINKS)
def test_a_foreign_package_of_the_same_name_is_found_behind_the_checkout(
    link: str, tmp_path: Path
) -> None:
    folder = ROOT / LINKS[link]
    foreign = tmp_path / folder.name / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("answer = 42\n")
    done = python(
        f"import {folder.name}, kvcache.{link}\nprint({folder.name}.answer, {folder.name}.__file__)",
        cwd=folder.parent,
        path=[folder.parent, ROOT, tmp_path],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["42", str(foreign)]


# as transformers looks for the package `kernels`, and as most programs do
PROBES = """
import importlib, importlib.util
spec = importlib.util.find_spec({name!r})
assert spec is None or spec.origin is None, spec
assert getattr(importlib.import_module({name!r}), "__file__", None) is None
try:
    from {name} import get_kernel
except ImportError:
    print("not installed")
"""


@pytest.mark.parametrize("link", LINKS)
def test_a_foreign_package_that_is_not_installed_is_not_taken_for_installed(link: str) -> None:
    folder = ROOT / LINKS[link]
    done = python(PROBES.format(name=folder.name), cwd=folder.parent, path=[ROOT])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "not installed"


def test_install_adds_no_name_beside_kvcache(tmp_path: Path) -> None:
    done = python(
        "from importlib.util import find_spec\n"
        "print(*(find_spec(name) for name in ('kvcache', 'kernels', 'tree')), sep='\\n')",
        cwd=tmp_path,
        path=[],
    )
    assert done.returncode == 0, done.stderr
    found, *others = done.stdout.splitlines()
    origin = re.search(r"origin='(.*?)'", found)
    if origin is None or Path(origin[1]).resolve() != ROOT / "kvcache" / "__init__.py":
        pytest.skip("this checkout is not the one that is installed")
    assert not [spec for spec in others if str(ROOT) in spec]


def test_import_brings_neither_triton_nor_matplotlib(tmp_path: Path) -> None:
    done = python(
        "import sys, kvcache, kvcache.kernels, kvcache.tree, kvcache.bench.cli\n"
        "print(sorted({'triton', 'matplotlib'} & set(sys.modules)))",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def imported_modules(source: Path) -> set[str]:
    """Names of the modules that a source imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: imports are absolute"
            names.add(node.module or "")
            if node.module == "kvcache":
                names |= {f"kvcache.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("top", ["kernels", "tree"])
def test_lower_layers_import_only_themselves_and_the_leaf_modules(top: str) -> None:
    """The digest that names the cache files of their compiled code covers no more."""
    allowed = {f"kvcache.{leaf}" for leaf in LEAF_MODULES}
    for source in (ROOT / top).rglob("*.py"):
        ours = {name for name in imported_modules(source) if name.split(".")[0] == "kvcache"}
        own = {name for name in ours if f"{name}.".startswith(f"kvcache.{top}.")}
        assert ours - own <= allowed, source


def test_leaf_modules_import_only_each_other() -> None:
    allowed = {f"kvcache.{leaf}" for leaf in LEAF_MODULES}
    for leaf in LEAF_MODULES:
        names = imported_modules(ROOT / "kvcache" / f"{leaf}.py")
        assert {name for name in names if name.split(".")[0] == "kvcache"} <= allowed


def test_every_requirement_is_pinned(project: dict[str, Any]) -> None:
    def name_of(requirement: str) -> str:
        found = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert found
        return found[0].lower().replace("_", "-")

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+(;.*)?$", pin) for pin in pins)
    needed = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():
        needed += extra
    assert {name_of(line) for line in needed} <= {name_of(pin) for pin in pins}


def test_make_targets_exist_that_ci_calls() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    called = re.search(r"for target in (.*);", (ROOT / ".ci" / "run").read_text())
    assert called
    assert set(called[1].split()) == {"lint", "types", "test", "wheel-check"}
    assert set(called[1].split()) | {"demo", "bench", "gpu-check"} <= targets
