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


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"])
def test_relative_links_lead_to_a_file(page: str) -> None:
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'src="([^"]+)"', text)
    broken = [link for link in links if ":" not in link and not (ROOT / link).exists()]
    assert not broken
