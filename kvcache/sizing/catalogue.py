"""Shapes of models: layers of each kind, and what a token takes in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kvcache.checks import check_int
from kvcache.errors import InvalidInputError

# bytes of an element; per-tensor scales of fp8 are left out
KV_BYTES = {"fp8": 1, "bf16": 2, "fp16": 2}

_MOST = 2**20  # layers, heads, dimensions
_KIND_KEYS = {"layers", "kv_heads", "head_dim", "latent_dim"}
_MODEL_KEYS = {"name", "window", "full", "swa", "source"}


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind, full or sliding-window."""

    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    latent_dim: int = (
        0  # elements of the one latent that keys and values share (MLA); 0: kv_heads it is
    )

    def token_bytes(self, kv: str, tp: int = 1) -> int:
        """Return the bytes of a token in all layers on one of `tp` ranks.

        Ranks share the heads; where they are more than heads, each holds one. A latent is on every rank.

        Raises:
            InvalidInputError: `kv` is none of KV_BYTES, or heads and ranks do not divide.
        """
        if kv not in KV_BYTES:
            raise InvalidInputError(f"kv must be one of {', '.join(KV_BYTES)}, got {kv!r}")
        check_int("tp", tp, low=1, high=_MOST)
        if self.latent_dim:
            return self.layers * self.latent_dim * KV_BYTES[kv]
        if max(tp, self.kv_heads) % min(tp, self.kv_heads):
            raise InvalidInputError(
                f"tp must divide kv_heads ({self.kv_heads}) or be a multiple of it, got {tp}"
            )
        heads = max(1, self.kv_heads // tp)
        return self.layers * 2 * heads * self.head_dim * KV_BYTES[kv]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the size of the pools depends on."""

    name: str
    window: int | None  # tokens that a sliding-window layer attends to; None: all layers are full
    full: Layers
    swa: Layers | None  # None if and only if window is None
    source: str = ""  # where the numbers are from

    def full_token_bytes(self, kv: str, tp: int = 1) -> int:
        """Return the bytes of a token in the Full pool of one of `tp` ranks."""
        return self.full.token_bytes(kv, tp)

    def swa_token_bytes(self, kv: str, tp: int = 1) -> int:
        """Return the bytes of a token in the SWA pool of one of `tp` ranks; 0 without one."""
        return self.swa.token_bytes(kv, tp) if self.swa is not None else 0


def catalogue() -> dict[str, ModelShape]:
    """Return the models that are known by name, in the order of the file."""
    text = resources.files("kvcache.sizing").joinpath("models.json").read_text(encoding="utf-8")
    return {name: _shape(name, found, name) for name, found in json.loads(text).items()}


def load_model(name_or_path: str) -> ModelShape:
    """Return a model of the catalogue, or of a JSON file.

    The file holds an object like those of kvcache/sizing/models.json: `window`, `full` and `swa`, both with
    `layers` and either `kv_heads` and `head_dim` or `latent_dim`; `name` and `source` are free. Without
    sliding-window layers `window` and `swa` are left out.

    Raises:
        InvalidInputError: No such model or file, or the file says something else.

    Example:
        >>> load_model("gpt-oss-120b").full_token_bytes("bf16")
        36864
    """
    path = Path(name_or_path)
    if path.suffix != ".json" and len(path.parts) == 1 and not path.is_file():
        models = catalogue()
        if name_or_path not in models:
            raise InvalidInputError(
                f"model must be one of {', '.join(models)}, or a JSON file, got {name_or_path!r}"
            )
        return models[name_or_path]
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # no UTF-8, no JSON
        raise InvalidInputError(f"{path}: must be JSON: {error}") from error
    return _shape(str(path), found, path.stem)


def _shape(where: str, found: Any, name: str) -> ModelShape:
    given = _object(where, found, _MODEL_KEYS)
    for key in ("name", "source"):
        if not isinstance(given.get(key, ""), str):
            raise InvalidInputError(f"{where}: {key} must be a string, got {given[key]!r}")
    window, swa = given.get("window"), given.get("swa")
    if (window is None) != (swa is None):
        lacks = "window" if window is None else "swa"
        raise InvalidInputError(f"{where}: window and swa must be given together, got no {lacks}")
    if window is not None:
        check_int(f"{where}: window", window, low=1, high=2**30)
    return ModelShape(
        name=given.get("name", name),
        window=window,
        full=_layers(f"{where}: full", given.get("full")),
        swa=None if swa is None else _layers(f"{where}: swa", swa),
        source=given.get("source", ""),
    )


def _layers(where: str, found: Any) -> Layers:
    given = _object(where, found, _KIND_KEYS)
    needed = (
        ("layers", "latent_dim") if "latent_dim" in given else ("layers", "kv_heads", "head_dim")
    )
    for key in needed:
        if key not in given:
            raise InvalidInputError(f"{where}.{key} must be given")
    for key in given:
        if key not in needed:
            raise InvalidInputError(f"{where}: {key} must be left out beside latent_dim")
        check_int(f"{where}.{key}", given[key], low=1, high=_MOST)
    return Layers(**given)


def _object(where: str, found: Any, keys: set[str]) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise InvalidInputError(f"{where} must be an object, got {found!r}")
    for key in found:
        if key not in keys:
            raise InvalidInputError(
                f"{where}: keys must be of {', '.join(sorted(keys))}, got {key!r}"
            )
    return found
