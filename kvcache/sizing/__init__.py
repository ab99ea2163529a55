"""Sizing: how many pages both pools get from a model's layers and the memory there is; `kvcache size`."""

from kvcache.sizing.catalogue import ModelShape, catalogue, load_model
from kvcache.sizing.pools import PoolSizes, parse_bytes, size_pools

__all__ = ["ModelShape", "PoolSizes", "catalogue", "load_model", "parse_bytes", "size_pools"]
