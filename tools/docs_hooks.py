"""Hooks of `make docs`: sources for the API, and pages of what the documentation links to outside of docs/.

A link `../examples/serve.py` works where the repository is read. On the site it leads to a page made of that
file: Markdown as it is, Python as a listing, everything else as the file itself. So the site has no link
that leads nowhere, and needs no address of a repository.

kernels/ and tree/ have no __init__.py, so that a checkout on the path hides no foreign package of their
names; the reader of docstrings passes over such folders. It reads a copy in which all have one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# pages of the site that stand at the top of the repository
TOP_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# where everything else goes
FOLDER = "files"

# the copy; mkdocs.yml names it
SOURCES = ROOT / "build" / "api"

_LINK = re.compile(r"(\]\()([^)#\s]+)")
# a warning of this logger fails a strict build
_log = logging.getLogger("mkdocs.plugins.kvcache")


def site_path(path: str) -> str:
    """Return where a file of the repository lies on the site, as a source path of mkdocs."""
    if path in TOP_PAGES:
        return path
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{FOLDER}/{path}.md" if path.endswith(".py") else f"{FOLDER}/{path}"


def repository_path(src_uri: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    if src_uri in TOP_PAGES:
        return src_uri
    if src_uri.startswith(f"{FOLDER}/"):
        path = src_uri.removeprefix(f"{FOLDER}/")
        return path.removesuffix(".md") if path.endswith(".py.md") else path
    return f"docs/{src_uri}"


def links(path: str, text: str) -> dict[str, str]:
    """Return the relative links of a page to files of the repository: link -> file."""
    found = {}
    for _, link in _LINK.findall(text):
        if ":" not in link:
            found[link] = os.path.normpath(os.path.join(os.path.dirname(path), link))
    return found


def _content(path: str) -> str:
    text = (ROOT / path).read_text()
    return f"# {path}\n\n~~~~python\n{text}~~~~\n" if path.endswith(".py") else text


def on_startup(**_: Any) -> None:
    """Make the copy of the sources, before anyone asks whether the folder is there."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvcache", SOURCES / "kvcache", ignore=ignore)
    for folder in (SOURCES / "kvcache").rglob("*/"):
        (folder / "__init__.py").touch()


def on_files(files: Any, *, config: Any) -> Any:
    """Add what pages link to, and what those pages link to."""
    waiting = [*TOP_PAGES, *(repository_path(file.src_uri) for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        source, there = ROOT / path, files.get_file_from_path(site_path(path)) is not None
        if not there and path.endswith((".py", ".md")):
            files.append(File.generated(config, site_path(path), content=_content(path)))
        elif not there:
            files.append(File.generated(config, site_path(path), abs_src_path=str(source)))
        if not path.endswith(".md"):
            continue
        for target in links(path, source.read_text()).values():
            # within docs/ mkdocs itself sees to it
            if target in seen or target.startswith("docs/"):
                continue
            seen.add(target)
            if (ROOT / target).is_file():
                waiting.append(target)
            else:
                _log.warning("%s links to %s, which is no file", path, target)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    if here.endswith(".py.md"):
        return markdown
    moved = {}
    for link, target in links(repository_path(here), markdown).items():
        moved[link] = os.path.relpath(site_path(target), os.path.dirname(here) or ".")
    return _LINK.sub(lambda m: m[1] + moved.get(m[2], m[2]), markdown)
