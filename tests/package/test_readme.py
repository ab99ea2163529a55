"""README.md does what it says: its Python blocks run, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_python_blocks_run_as_one_program(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks, "README.md has no ```python block"
    program = tmp_path / "quick_start.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(
        (sys.executable, program), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "AGENTS.md",
    "perf/peers/README.md",
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
)


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_a_file(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text)
    folder = (ROOT / page).parent
    broken = [link for link in links if ":" not in link and not (folder / link).exists()]
    assert not broken


def test_pages_are_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    missing = [p for p in PAGES if p.startswith("docs/") and p.removeprefix("docs/") not in nav]
    assert not missing


def test_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:kvcache|tree|kernels|tests)/[\w/]+\.py)`", text))
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_functions_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+\.py)` \(((?:`\w+`(?:, )?)+)\)", text)
    assert len(named) > 5
    for path, functions in named:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"def {name}\(", source), f"{path}: {name}"
