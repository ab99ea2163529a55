"""What a figure must carry: the machine it was taken on, the versions, the command."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kvcache import __version__

_PACKAGES = ("torch", "triton", "numpy", "numba")


def describe_machine(device: str) -> dict[str, Any]:
    """Return CPU, cores, memory, load, system, and the GPU if `device` is one."""
    machine: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "system": platform.platform(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
        "device": device,
    }
    if torch.device(device).type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        machine["gpu_l2_mib"] = round(getattr(properties, "L2_cache_size", 0) / 2**20, 1)
        machine["gpu_processors"] = properties.multi_processor_count
    return machine


def describe_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of what it computes with."""
    found = {"python": platform.python_version(), "kvcache": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    found["cuda"] = str(torch.version.cuda)
    return found


def command_line() -> str:
    """Return the command that runs now, the program without its folder."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def one_line(machine: dict[str, Any]) -> str:
    """Return the machine in words."""
    cpu = f"{machine['cores']} cores of {machine['cpu']}"
    return f"{machine['gpu']}, {cpu}" if "gpu" in machine else cpu


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
