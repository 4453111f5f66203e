"""How the programs of one launch pass each other numbers: the words of decode_gluon.py.

A word of 32 bits is a bf16 above and the low half of the step's number below. Readers ask until every word carries the
number; all words of a thread are on their way at once, and only those asked for in vain are wasted.
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from groundup.kernels import decode

WARPS = gl.constexpr(decode.WARPS)
VECTOR = gl.constexpr(gl.BlockedLayout([4], [32], [decode.WARPS], [0]))
"""Of activations: 16 bytes a thread."""
SINGLE = gl.constexpr(gl.BlockedLayout([1], [32], [decode.WARPS], [0]))


@triton.constexpr_function
def asking(vectors):
    """PTX that asks for words until all carry the step STEP; at the address 0 nothing is asked for and all is 0.

    `vectors` lists (address operand, names of 1, 2 or 4 words).
    """
    words = [name for _, names in vectors for name in names]
    first, loads, checks = "", "", ""
    for i in range(len(vectors)):
        address, names = vectors[i]
        kind, group = ("", names[0]) if len(names) == 1 else (f".v{len(names)}", "{" + ", ".join(names) + "}")
        first += f"setp.ne.b64 there{i}, {address}, 0; " + "".join(f"and.b32 {n}, STEP, 0xffff; " for n in names)
        loads += f"@there{i} ld.relaxed.gpu.global{kind}.b32 {group}, [{address}]; "
    for name in words:
        checks += f"cvt.u16.u32 low, {name}; setp.ne.or.b16 late, low, step, late; "
    there = ", ".join(f"there{i}" for i in range(len(vectors)))
    return (
        f".reg .pred late, {there}; .reg .b16 low, step; .reg .b32 {', '.join(words)}; cvt.u16.u32 step, STEP; "
        f"{first}AGAIN: setp.ne.b16 late, step, step; {loads}{checks}@late bra AGAIN; "
    )


@triton.constexpr_function
def waiting(n):
    """PTX: n words from $n on as floats in $0 …, once all carry the number $2n; four neighbours share an address."""
    size = min(n, 4)
    names = [f"word{i}" for i in range(n)]
    ask = asking([(f"${n + i}", names[i : i + size]) for i in range(0, n, size)]).replace("STEP", f"${2 * n}")
    return "{ " + ask + "".join(f"and.b32 ${i}, word{i}, 0xffff0000; " for i in range(n)) + "}"


@triton.constexpr_function
def operands(n, pack):
    """Constraints of `waiting`: results, which are written while the addresses still count, addresses, numbers."""
    return ",".join(["=&r"] * n + ["l"] * n + ["r"] * pack)


@triton.constexpr_function
def waiting_parts(n):
    """PTX: `waiting` for n words (addresses from $2n on) and, into $n …, the sum of two at $3n …, one for four."""
    vectors = [(f"${2 * n + i}", [f"word{j}" for j in range(i, i + 4)]) for i in range(0, n, 4)]
    vectors += [(f"${3 * n + i}", [f"high{i}", f"rest{i}"]) for i in range(0, n, 4)]
    ask = asking(vectors).replace("STEP", f"${4 * n}")
    done = "".join(f"and.b32 ${i}, word{i}, 0xffff0000; " for i in range(n))
    for i in range(0, n, 4):
        done += f"and.b32 high{i}, high{i}, 0xffff0000; and.b32 rest{i}, rest{i}, 0xffff0000; "
        done += f"add.f32 ${n + i}, high{i}, rest{i}; " + "".join(
            f"mov.b32 ${n + i + j}, ${n + i}; " for j in (1, 2, 3)
        )
    return "{ " + ask + done + "}"


@gluon.jit
def publish(WORDS, index, x, wanted, epoch):
    """Give floats x, rounded to bf16, to all programs, as WORDS[index]."""
    bits = x.to(gl.bfloat16).to(gl.float32).to(gl.int32, bitcast=True)
    gl.store(WORDS + index, bits | (epoch & 0xFFFF), mask=wanted)


@gluon.jit
def collect(WORDS, n, epoch, LENGTH: gl.constexpr):
    """(LENGTH,) floats, the first n of them published in order, zeros behind; waits for them."""
    PACK: gl.constexpr = max(4, LENGTH // (32 * WARPS))
    i = gl.arange(0, LENGTH, VECTOR)
    where = gl.where(i < n, (WORDS + i).to(gl.int64), 0)
    return gl.inline_asm_elementwise(
        waiting(PACK), operands(PACK, PACK), [where, epoch], dtype=gl.float32, is_pure=False, pack=PACK
    )
