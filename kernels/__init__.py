"""Data plane: one device operation a file. Import as `kvcache.kernels`, never as `kernels`."""

if __name__ != "kvcache.kernels":
    raise ImportError(f"import kvcache.kernels, not {__name__!r} (see CONTRIBUTING.md: Packaging)")
