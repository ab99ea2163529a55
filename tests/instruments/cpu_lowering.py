"""Run a Triton kernel natively on the CPU, from the stock wheel: AMD lowering, then LLVM through llvmlite.

With one warp of one thread a program is plain sequential code, and the AMD path lowers it to plain loads
and stores (the NVIDIA path emits inline PTX). The few AMD intrinsics left are rewritten in the text of the
LLVM IR, and a loop over the grid is put around the kernel. Uses private passes of Triton (3.6.0 to 3.9.0
tried). Build time grows with the square of the block, since every lane is unrolled.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from typing import Any

import llvmlite.binding as llvm_cpu
from triton._C.libtriton import amd, ir, llvm, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

# RDNA: block atomics stay atomicrmw (CDNA adds a reduction over the wave)
_ARCH = "gfx1100"
_C_TYPES: dict[str, Any] = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
}
_GRID_LOOP = """
define void @run(i32 %lo, i32 %hi, i32 %gx, i32 %gy, i32 %gz, ARGS) {
entry:
  %n0 = zext i32 %gx to i64
  %n1 = zext i32 %gy to i64
  %n2 = zext i32 %gz to i64
  br label %lx
lx:
  %x = phi i32 [ %lo, %entry ], [ %x1, %ex ]
  br label %ly
ly:
  %y = phi i32 [ 0, %lx ], [ %y1, %ey ]
  br label %lz
lz:
  %z = phi i32 [ 0, %ly ], [ %z1, %lz ]
  call void @KERNEL(ARGS, i32 %x, i32 %y, i32 %z, i64 %n0, i64 %n1, i64 %n2)
  %z1 = add i32 %z, 1
  %cz = icmp slt i32 %z1, %gz
  br i1 %cz, label %lz, label %ey
ey:
  %y1 = add i32 %y, 1
  %cy = icmp slt i32 %y1, %gy
  br i1 %cy, label %ly, label %ex
ex:
  %x1 = add i32 %x, 1
  %cx = icmp slt i32 %x1, %hi
  br i1 %cx, label %lx, label %done
done:
  ret void
}
"""


def _with_or_without_arch(add_pass: Any, pm: Any, *args: Any) -> None:
    """Add an AMD pass that takes the architecture in newer versions of Triton only."""
    try:
        add_pass(pm, _ARCH, *args)
    except TypeError:
        add_pass(pm, *args)


def lower(source: Any) -> tuple[str, int]:
    """Lower a `triton.compiler.ASTSource` to LLVM IR for one thread; return it and its shared bytes."""
    backend = make_backend(GPUTarget("hip", _ARCH, 32))
    options = backend.parse_options({"num_warps": 1})
    object.__setattr__(options, "warp_size", 1)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(
        GPUTarget("hip", _ARCH, 32), options, functions, backend.get_module_map(), context
    )
    module = backend.make_ttir(module, {}, options)

    pm = ir.pass_manager(context)
    passes.ttir.add_convert_to_ttgpuir(pm, f"hip:{_ARCH}", 1, 1, 1)
    passes.ttgpuir.add_coalesce(pm)
    passes.ttgpuir.add_remove_layout_conversions(pm)
    passes.common.add_canonicalizer(pm)
    passes.common.add_cse(pm)
    passes.common.add_symbol_dce(pm)
    pm.run(module, "ttgir")

    pm = ir.pass_manager(context)
    passes.convert.add_scf_to_cf(pm)
    passes.convert.add_index_to_llvmir(pm)
    if hasattr(passes, "gluon") and hasattr(passes.gluon, "add_inliner"):
        passes.gluon.add_inliner(pm)
    if hasattr(amd.passes.ttgpuir, "add_allocate_shared_memory"):
        _with_or_without_arch(amd.passes.ttgpuir.add_allocate_shared_memory, pm)
    else:
        passes.ttgpuir.add_allocate_shared_memory(pm)
    passes.ttgpuir.add_allocate_global_scratch_memory(pm)
    amd.passes.ttgpuir.add_to_llvmir(pm, _ARCH, True)
    passes.common.add_canonicalizer(pm)
    passes.common.add_cse(pm)
    passes.convert.add_cf_to_llvmir(pm)
    passes.convert.add_arith_to_llvmir(pm)
    passes.common.add_canonicalizer(pm)
    passes.common.add_cse(pm)
    passes.common.add_symbol_dce(pm)
    _with_or_without_arch(amd.passes.ttgpuir.add_builtin_func_to_llvmir, pm, True)
    if hasattr(passes.convert, "add_reconcile_unrealized_casts"):
        passes.convert.add_reconcile_unrealized_casts(pm)
    pm.run(module, "llir")
    llvm.init_targets()
    return str(llvm.to_module(module, llvm.context())), module.get_int_attr("ttg.shared") or 0


def to_host(text: str, name: str, shared: int) -> tuple[str, int]:
    """Rewrite the AMD IR of kernel `name` for the CPU and add a loop over the grid as `run`.

    Returns the text and the number of the kernel's own parameters.
    """
    memory = f"@global_smem = internal global [{max(16, shared)} x i8] zeroinitializer"
    for pattern, replacement in (
        (r" addrspace\(\d\)", ""),
        (r"@global_smem = external global \[0 x i8\]", memory),
        (r' syncscope\("[^"]*"\)', ""),
        (r"call[^\n=]*@llvm\.amdgcn\.workgroup\.id\.([xyz])\(\)[^\n]*", r"add i32 %kv_\1, 0"),
        (r"call[^\n=]*@llvm\.amdgcn\.workitem\.id\.[xyz]\(\)[^\n]*", "add i32 0, 0"),
        (
            r"call[^\n=]*@__ockl_get_num_groups\(i32 (?:noundef )?(\d)\)[^\n]*",
            r"add i64 %kv_n\1, 0",
        ),
        # barriers and waits: one thread has nothing to wait for
        (r"\n[^\n]*call void (?:@llvm\.amdgcn\.[\w.]+\(|asm sideeffect \"s_)[^\n]*", ""),
        (r"\ndeclare[^\n]*@(?:llvm\.amdgcn|__ockl)[^\n]*", ""),
        # metadata and attributes
        (r", ![\w.]+ ![\d]+", ""),
        (r"\n![^\n]*", ""),
        (r"\nattributes #[^\n]*", ""),
        (r" #\d+", ""),
        (r" !dbg", ""),
    ):
        text = re.sub(pattern, replacement, text)
    found = re.search(rf"define void @{name}\(([^\n]*)\)[^\n{{]*{{", text)
    assert found is not None, f"no kernel {name} in the lowered IR"
    own = found.group(1).split(", ")
    index = [f"i32 %kv_{axis}" for axis in "xyz"] + [f"i64 %kv_n{i}" for i in range(3)]
    header = f"define internal void @{name}({', '.join(own + index)}) {{"
    text = text.replace(found.group(0), header, 1)
    args = ", ".join(f"{p.split(' ')[0]} %a{i}" for i, p in enumerate(own))
    return text + _GRID_LOOP.replace("ARGS", args).replace("KERNEL", name), len(own)


class CpuKernel:
    """A kernel compiled for this machine: `kernel(grid, *runtime_args)`, tensors or ints."""

    def __init__(self, source: Any, name: str, threads: int) -> None:
        llvm_cpu.initialize_native_target()
        llvm_cpu.initialize_native_asmprinter()
        text, shared = lower(source)
        text, num_params = to_host(text, name, shared)
        module = llvm_cpu.parse_assembly(text)
        module.verify()
        # no optimisation: with it, building a block of 256 lanes takes ten times as long
        machine = llvm_cpu.Target.from_default_triple().create_target_machine(
            opt=0, reloc="pic", codemodel="default"
        )
        self.engine = llvm_cpu.create_mcjit_compiler(module, machine)
        self.engine.finalize_object()
        types = [t for t in source.signature.values() if t != "constexpr"]
        self.num_extra = num_params - len(types)  # scratch pointers that Triton adds
        c_types = [ctypes.c_void_p if t.startswith("*") else _C_TYPES[t] for t in types]
        c_types += [ctypes.c_void_p] * self.num_extra
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * 5, *c_types)
        self.run = prototype(self.engine.get_function_address("run"))
        self.threads = threads

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        """Run all programs, split over the threads along the grid's first dimension."""
        x, y, z = grid
        values = [a.data_ptr() if hasattr(a, "data_ptr") else a for a in args]
        values += [None] * self.num_extra
        cuts = sorted({x * i // self.threads for i in range(self.threads + 1)})
        # ctypes drops the GIL: the programs of different threads run at the same time
        jobs = [
            threading.Thread(target=self.run, args=(low, high, x, y, z, *values))
            for low, high in itertools.pairwise(cuts)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
