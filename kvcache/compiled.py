"""`@compiled`: numba's njit with a disk cache that no edit can outlive.

numba keys its cache on the file that defines a function, so a change in a helper of another file
is missed; and it writes the index of a cache before the code, so a run that is stopped in between
leaves an index of the new sources that names the code of the old ones. Here a digest of all sources
that the code can depend on is part of the name of every cache file: code of other sources is never
looked at, and it is deleted when new code is stored. A cache that was filled before, as in a container
image, is read where it cannot be written. Where there is none, functions are compiled in memory, and the
process is told once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import config, njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

from kvcache.errors import CacheFolderWarning

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


def _digest_of(function: Callable[..., Any]) -> str:
    package = function.__module__.split(".")[:2]
    return source_digest(package[1] if package in _CLOSED_PACKAGES else "")


def _given_folder() -> str:
    """Return what NUMBA_CACHE_DIR says, "" if it is not set."""
    return str(getattr(config, "CACHE_DIR", ""))


def cache_folder(function: Any) -> Path | None:
    """Return the folder that holds the cache of a compiled function, None if there is none."""
    path = function.stats.cache_path
    return None if path is None else Path(path)


# once: Python's own memory of warnings is lost with every change of a filter, and numba changes them
@functools.cache
def _warn_of_folder() -> None:
    folder = _given_folder() or Path(__file__).parent
    warnings.warn(
        f"compiled code cannot be stored in {folder}: every process compiles it anew, for some 20 s. Make "
        "the folder writable, or set NUMBA_CACHE_DIR to one that is",
        CacheFolderWarning,
        stacklevel=2,
    )


# numba's names for these differ between versions
_LOCATORS: list[Any] = list(CompileResultCacheImpl._locator_classes)
_InTree = next(x for x in _LOCATORS if x.__name__.endswith("InTreeCacheLocator"))


class _FilledFolder(_InTree):  # type: ignore[misc, valid-type]
    """A folder that holds the code of a function; that it cannot be written does not matter."""

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Any:
        """Return the place of the code, or None if there is none."""
        found = cls(py_func, py_file)
        folders = [found.get_cache_path()]
        if _given_folder():
            inside = cls.get_suitable_cache_subpath(py_file)
            folders.insert(0, os.path.join(_given_folder(), inside))
        digest = _digest_of(py_func)[:_DIGEST_CHARS]
        index = f"{Path(py_file).stem}.{py_func.__qualname__}-*-{digest}*.nbi"
        for folder in folders:
            if any(Path(folder).glob(index)):
                found._cache_path = folder
                return found
        return None


class _Places(CompileResultCacheImpl):
    """Where code may be: as numba has it, and before the user's home a folder that is filled."""

    # numba has no annotation there, and reads it only
    _locator_classes = [*_LOCATORS[:2], _FilledFolder, *_LOCATORS[2:]]  # noqa: RUF012


class _SourceCache(FunctionCache):
    """The disk cache of one function: its files are named after the digest of the sources."""

    _impl_class = _Places

    def __init__(self, function: Callable[..., Any]) -> None:
        digest = _digest_of(function)  # raises OSError where there are no sources
        super().__init__(function)
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
        try:
            super().save_overload(sig, data)
        except OSError:
            _warn_of_folder()
            return
        with suppress(OSError):
            for path in Path(self._cache_path).iterdir():
                found = _CACHE_FILE.search(path.name)
                if found and found[1] != self._short_digest:
                    path.unlink(missing_ok=True)


def _compile(function: _F, forceinline: bool) -> _F:
    # without memory of its own, code counts no references: twelve atomic operations a call with six arrays
    options: dict[str, Any] = {"nogil": True, "forceinline": forceinline, "_nrt": False}
    dispatcher: Any = njit(**options)(function)
    # OSError: no source can be read; the others: numba changed
    with suppress(OSError, AttributeError, TypeError):
        try:
            dispatcher._cache = _SourceCache(function)
        except RuntimeError:  # no folder can be written
            _warn_of_folder()
    return cast(_F, dispatcher)


def compiled(function: _F) -> _F:
    """Compile `function` to machine code on its first call; it runs without the GIL, and makes no arrays.

    There are no bounds checks (NUMBA_BOUNDSCHECK=1 turns them on for debugging).
    """
    return _compile(function, False)


def inlined(function: _F) -> _F:
    """`compiled`, and compiled functions that call it get its code in place of a call.

    For what runs once for every node or page: an array is seven words, so a call with five arrays costs
    more than such a function does.
    """
    return _compile(function, True)
