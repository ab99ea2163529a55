"""Imports go one way: no module comes back to itself, type checking included; rooms know what is below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"kvcache": "kvcache", "kernels": "kvcache.kernels", "tree": "kvcache.tree"}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            # links in kvcache/ lead to folders that are walked by themselves
            if folder == "kvcache" and parts[0] in ("kernels", "tree", "bench"):
                continue
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports_of(path: Path) -> set[str]:
    """Modules that a module names at its top, `if TYPE_CHECKING` included; not what functions import."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    found = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {n if n in MODULES else str(node.module) for n in names}
        nodes.extend(ast.iter_child_nodes(node))
    return found & set(MODULES)


GRAPH = {name: imports_of(path) for name, path in MODULES.items()}
# `kvcache` itself only passes names on, when they are asked for
GRAPH["kvcache"] = set()


def test_no_module_comes_back_to_itself() -> None:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for other in sorted(GRAPH[name]):
            visit(other, [*path, name])
        done.add(name)

    for name in sorted(GRAPH):
        visit(name, [])
    assert len(done) > 80


@pytest.mark.parametrize(
    ("room", "never"),
    [
        (
            "kvcache.tree",
            ("kvcache.kernels", "kvcache.device", "kvcache.manager", "kvcache.oracle"),
        ),
        (
            "kvcache.kernels",
            ("kvcache.tree", "kvcache.device", "kvcache.manager", "kvcache.oracle"),
        ),
        ("kvcache.device", ("kvcache.manager", "kvcache.core", "kvcache.oracle", "kvcache.replay")),
        ("kvcache.oracle", ("kvcache.tree", "kvcache.kernels", "kvcache.device", "kvcache.rows")),
        ("kvcache.manager", ("kvcache.oracle", "kvcache.replay", "kvcache.validate")),
    ],
)
def test_a_room_knows_only_what_is_below_it(room: str, never: tuple[str, ...]) -> None:
    inside = [name for name in GRAPH if name == room or name.startswith(f"{room}.")]
    assert inside
    for name in inside:
        above = [x for x in GRAPH[name] if any(x == n or x.startswith(f"{n}.") for n in never)]
        assert not above, f"{name} imports {above}"
