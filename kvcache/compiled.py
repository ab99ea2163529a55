"""`@compiled`: numba's njit with a disk cache that no edit can outlive.

numba keys its cache on the file that defines a function, so a change in a helper of another file
is missed; and it writes the index of a cache before the code, so a run that is stopped in between
leaves an index of the new sources that names the code of the old ones. Here a digest of all sources
that the code can depend on is part of the name of every cache file: code of other sources is never
looked at, and it is deleted when new code is stored. Where no cache can be read or written, the
function is compiled in memory.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import config, njit
from numba.core.caching import FunctionCache, IndexDataCacheFile

_F = TypeVar("_F", bound=Callable[..., Any])

# what file names keep of the digest
_DIGEST_CHARS = 16
_CACHE_FILE = re.compile(r"-([0-9a-f]{16})b?(\.\d+\.nbc|\.nbi)$")

# all that kernels/ and tree/ may import of the rest (tests/package/test_packaging.py sees to it)
LEAF_MODULES = ("checks", "compiled", "errors", "uncopied")
_CLOSED_PACKAGES = (["kvcache", "kernels"], ["kvcache", "tree"])


@functools.cache
def source_digest(part: str = "") -> str:
    """Return the SHA-256 over names and contents of the Python sources of a part of the package.

    Works in a checkout and in an installed package alike. In a checkout `kernels` and `tree` are
    links, or, where the links got lost (a downloaded .zip), folders beside the package.

    Args:
        part: "kernels" or "tree": that folder and the leaf modules, which is all that its code can
            depend on. Default: the whole package with every sub-package.

    Raises:
        OSError: The sources cannot be read, as in a zipped package.
    """
    root = Path(__file__).parent
    folders = {"": root}
    for name in ("kernels", "tree"):
        inside = root / name
        folders[name] = inside if inside.is_dir() else root.parent / name
    sources = {f"{name}.py": root / f"{name}.py" for name in LEAF_MODULES}
    for name in [part] if part else folders:
        for path in folders[name].rglob("*.py"):
            sources[(Path(name) / path.relative_to(folders[name])).as_posix()] = path
    digest = hashlib.sha256()
    for name in sorted(sources):
        content = sources[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


class _SourceCache(FunctionCache):
    """The disk cache of one function: its files are named after the digest of the sources."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        package = function.__module__.split(".")[:2]
        digest = source_digest(package[1] if package in _CLOSED_PACKAGES else "")
        self._short_digest = digest[:_DIGEST_CHARS]
        # code with bounds checks has files of its own: numba does not tell them apart
        checks = "b" if getattr(config, "BOUNDSCHECK", None) else ""
        self._cache_file = IndexDataCacheFile(
            cache_path=self._cache_path,
            filename_base=f"{self._impl.filename_base}-{self._short_digest}{checks}",
            source_stamp=digest,
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the code stored for `sig`, or None if there is none or it cannot be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            # damaged files raise whatever pickle and LLVM think fit; a damaged index would also
            # stop the next save
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store the code of `sig` and delete that of other sources; a full disk is no error."""
        with suppress(OSError):
            super().save_overload(sig, data)
            for path in Path(self._cache_path).iterdir():
                found = _CACHE_FILE.search(path.name)
                if found and found[1] != self._short_digest:
                    path.unlink(missing_ok=True)


def _compile(function: _F, forceinline: bool) -> _F:
    dispatcher: Any = njit(nogil=True, forceinline=forceinline)(function)
    # RuntimeError, OSError: no cache can be written, or no source read; the others: numba changed
    with suppress(RuntimeError, OSError, AttributeError, TypeError):
        dispatcher._cache = _SourceCache(function)
    return cast(_F, dispatcher)


def compiled(function: _F) -> _F:
    """Compile `function` to machine code on its first call; it runs without the GIL.

    There are no bounds checks (NUMBA_BOUNDSCHECK=1 turns them on for debugging).
    """
    return _compile(function, False)


def inlined(function: _F) -> _F:
    """`compiled`, and compiled functions that call it get its code in place of a call.

    For what runs once for every node or page: an array is seven words, so a call with five arrays costs
    more than such a function does.
    """
    return _compile(function, True)
