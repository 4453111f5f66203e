"""Compile a Triton kernel for a Hopper GPU where there is none, and read ptxas' report."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232_448
"""Bytes of shared memory a block may have on sm_90."""


@dataclass(frozen=True)
class Report:
    registers: int
    spills: int
    shared: int
    serialized: bool
    ptx: str


def compile_kernel(
    kernel, signature: dict, constexprs: dict, source=None, aligned=(), target=TARGET, **options
) -> Report:
    """`signature`: argument → Triton type ("*bf16", "tensordesc<bf16[1, 1, 64, 64]>", "i32", "fp32").

    `aligned`: integers that are multiples of 16; pointers always are, as torch's allocations.
    """
    source = source or triton.compiler.ASTSource
    full = {name: "constexpr" if name in constexprs else signature[name] for name in kernel.arg_names}
    multiples = [i for i, name in enumerate(kernel.arg_names) if name in aligned or full[name].startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in multiples}
    done = triton.compile(source(kernel, full, constexprs, attributes), target=target, options=options)
    ptx = done.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        name = f"sm_{target.arch}{'a' * (target.arch == 90)}"
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={name}", str(path), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", log))
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    serialized = "serialized" in log
    return Report(registers, spills, done.metadata.shared, serialized, ptx)
