"""What programs in Triton become on a GPU of NVIDIA, by Triton's own compiler and ptxas: no GPU is needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = 90
#: of a streaming multiprocessor of Hopper, for one program
SHARED_BYTES = 227 << 10


class Compiled(NamedTuple):
    """A program: shared memory in bytes, instructions of matrices; by ptxas registers and spilled bytes a thread."""

    ptx: str
    shared: int
    #: of Hopper, and of Ampere
    wgmma: int
    mma: int
    registers: int
    #: larger one of what is stored and what is loaded
    spilled: int


def compiled(program: Any, sizes: dict[str, Any], types: dict[str, str], *, capability: int = HOPPER) -> Compiled:
    """``program`` compiled for ``sizes``, its constants and options; ``types`` of the other arguments, else bfloat16.

    Pointers and integers are multiples of 16, as a launch finds those of large models: without that loads are narrow,
    and need registers that launched programs do not need.
    """
    constants = dict(sizes)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    names = program.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
    whole = [i for i, name in enumerate(names) if signature[name].startswith(("*", "i"))]
    attributes = {(i,): [["tt.divisibility", 16]] for i in whole}
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    said = _assembled(ptx)
    return Compiled(
        ptx,
        made.metadata.shared,
        ptx.count("wgmma.mma_async"),
        ptx.count("mma.sync"),
        int(_found(r"Used (\d+) registers", said)),
        max(int(_found(rf"(\d+) bytes spill {what}", said)) for what in ("stores", "loads")),
    )


def _assembled(ptx: str) -> str:
    """What ptxas says of a program."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    target = _found(r"^\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "program.ptx"
        source.write_text(ptx)
        command = [assembler, "-v", f"-arch={target}", source, "-o", source.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None, f"no {pattern} in: {text[:1000]}"
    return match[1]
