"""Microbenchmarks of the device operations. Import as `kvcache.bench`; run by `kvcache bench`."""

if __name__ != "kvcache.bench":
    raise ImportError(f"import kvcache.bench, not {__name__!r} (see CONTRIBUTING.md, Packaging)")
