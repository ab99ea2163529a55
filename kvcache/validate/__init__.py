"""Validation: the manager beside its oracle, on random programs; `kvcache validate`."""

from kvcache.validate.driver import Driver
from kvcache.validate.run import run
from kvcache.validate.sides import Failure

__all__ = ["Driver", "Failure", "run"]
