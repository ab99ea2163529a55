"""Compile kernels for GPUs that are not there, through the wrappers, and read what came out.

A wrapper is called with CPU tensors under a driver that compiles and does not run, so that each kernel is
compiled at the specialisation that a GPU would give it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget

from instruments.recording import RecordingDriver, driven_by
from kvcache.kernels.launch import Kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes."""

    registers: int  # per thread (AMD: vector registers)
    spills: int  # spilled registers, spill instructions and bytes of stack or scratch, added up
    shared: int  # bytes
    barriers: int
    loads: Counter[str]  # instructions by kind: PTX, or AMD assembly
    stores: Counter[str]

    def figures(self) -> dict[str, int]:
        """Numbers by name; a wide load or store moves 16 bytes a thread, or more."""
        return {
            "registers": self.registers,
            "spills": self.spills,
            "shared": self.shared,
            "barriers": self.barriers,
            "wide_loads": _wide(self.loads),
            "loads": self.loads.total(),
            "wide_stores": _wide(self.stores),
            "stores": self.stores.total(),
        }


def _wide(instructions: Counter[str]) -> int:
    found = 0
    for name, times in instructions.items():
        vector = re.search(r"\.v(\d)\.[a-z](\d+)$", name) or re.search(r"dword(x)(\d)$", name)
        if vector is not None:
            lanes = 32 if vector[1] == "x" else int(vector[1])
            found += times * (lanes * int(vector[2]) >= 128)
    return found


def compiled_variants(kernel: Kernel, target: GPUTarget, call: Callable[[], None]) -> list[Any]:
    """Run `call`, which launches `kernel`, under a driver for `target`; return what was compiled.

    The kernel is decorated anew, since Triton caches by device and not by target.
    """
    with pytest.MonkeyPatch.context() as patch, driven_by(RecordingDriver(target)):
        patch.setattr("kvcache.kernels.launch.takes_kernel", lambda tensor: True)
        patch.setattr(kernel, "_jit", kernel.decorate())
        # which of the two a build of torch is for decides about launch options
        patch.setattr("torch.version.hip", "7.0" if target.backend == "hip" else None)
        call()
        return list(kernel._jit.device_caches[0][0].values())


def resources(binary: Any) -> Resources:
    """Read registers, spills and memory instructions of a compiled kernel."""
    return _amd(binary) if "amdgcn" in binary.asm else _nvidia(binary)


def _tool(name: str, *args: str) -> str:
    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *args], capture_output=True, text=True, check=True).stdout


def _nvidia(binary: Any) -> Resources:
    ptx = binary.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        # spill instructions need a stack; the disassembler takes a second
        sass = "" if "STACK:0" in usage else _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, _, local = (int(x) for x in found.groups())
    # ptxas reports spills as STACK; LOCAL stays 0
    spills = stack + local + len(re.findall(r"\b(?:STL|LDL)\b", sass))
    return Resources(
        registers=registers,
        spills=spills,
        shared=binary.metadata.shared,
        barriers=len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?sync", ptx)),
        loads=Counter(re.findall(r"\bld\.global[\w:.]*", ptx)),
        stores=Counter(re.findall(r"\bst\.global[\w:.]*", ptx)),
    )


def _amd(binary: Any) -> Resources:
    text = binary.asm["amdgcn"]

    def number(field: str) -> int:
        found = re.search(rf"\.{field}:?\s+(\d+)", text)
        assert found is not None, field
        return int(found.group(1))

    return Resources(
        registers=number("vgpr_count"),
        spills=number("vgpr_spill_count")
        + number("sgpr_spill_count")
        + number("private_segment_fixed_size"),
        shared=number("group_segment_fixed_size"),
        barriers=len(re.findall(r"\bs_barrier\b", text)),
        loads=Counter(re.findall(r"\b(?:global|buffer|flat)_load_\w+", text)),
        stores=Counter(re.findall(r"\b(?:global|buffer|flat)_store_\w+", text)),
    )
