"""Control plane: the struct-of-arrays radix tree. Import as `kvcache.tree`, never as `tree`."""

if __name__ != "kvcache.tree":
    raise ImportError(f"import kvcache.tree, not {__name__!r} (see CONTRIBUTING.md: Packaging)")
