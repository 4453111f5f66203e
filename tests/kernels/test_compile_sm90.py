"""The performance guard: what the table names compiles for a Hopper GPU, without one, into what was measured.

One kernel of each kind by default; every tile of the table with -m slow.
"""

import json
import re
from importlib.resources import files

import pytest

pytest.importorskip("triton")

from sm90 import SHARED_LIMIT, TARGET, compile_kernel
from triton.backends.compiler import GPUTarget

from groundup.kernels.flash_triton import Tile, shared_bytes

TABLE = json.loads(files("groundup.kernels").joinpath("flash_tiles.json").read_text())
FIRST = [("forward", "16", "64"), ("keys", "16", "64"), ("keys", "16", "128"), ("queries", "16", "64")]
ALL = [(k, b, d, i) for k, rows in TABLE.items() for b, row in rows.items() for d in row for i in range(len(row[d]))]
SPILLS = {
    ("keys", "32", "64", 0): 3500,
    ("queries", "32", "64", 0): 104,
    ("forward", "32", "128", 0): 2400,
    ("forward", "32", "128", 1): 2400,
    ("keys", "32", "128", 0): 15400,
    ("queries", "32", "128", 0): 8900,
    ("forward", "32", "256", 0): 3000,
    ("keys", "32", "256", 0): 17500,
    ("queries", "32", "256", 0): 12000,
    ("forward", "16", "256", 2): 48,
    ("keys", "16", "256", 1): 3200,
    ("queries", "16", "256", 1): 2000,
}
"""Bytes recorded for tiles in float32, whose products are split in three, and for the smallest in 16 bits; all others
at most 16."""
NARROW = [key for key in SPILLS if key[1] == "16"]
"""Tiles of 32 rows and columns, which wgmma does not take: for GPUs with little shared memory."""


def signature(kernel: str, kind: str, d: int, block_q: int, block_k: int) -> dict[str, str]:
    def tile(rows):
        return f"tensordesc<{kind}[1, 1, {rows}, {d}]>"

    numbers = dict.fromkeys(["n_q", "n_k", "n_heads", "n_kv_heads", "heads_a_group", "window", "half"], "i32")
    floats = dict.fromkeys(["cap_in", "factor", "scale"], "fp32")
    pointers = dict.fromkeys(["LSE", "D_LSE", "LSE2", "DELTA", "COS", "SIN"], "*fp32") | {"LO": "*i32", "HI": "*i32"}
    of_queries = dict.fromkeys(["Q", "OUT", "D_OUT", "D_Q"], tile(block_q))
    return numbers | floats | pointers | of_queries | dict.fromkeys(["K", "V", "D_K", "D_V_OUT"], tile(block_k))


def compile_tile(kernel: str, bits: str, d: str, tile: list, even: bool, target=TARGET):
    """`even`: lengths of whole tiles, and a backward that turns by RoPE's angles, as in training."""
    from groundup.kernels.flash_triton_backward import keys_kernel, queries_kernel
    from groundup.kernels.flash_triton_forward import forward_kernel

    block_q, block_k, warps, stages = tile
    constants = {
        "GROUP": 1, "D": int(d), "D_V": int(d), "BLOCK_Q": block_q, "BLOCK_K": block_k, "CAUSAL": True, "WINDOW": False,
        "DOCUMENTS": False, "SOFTCAP": False, "EVEN": even, "UPCAST": False,
        "PRECISION": "tf32" if bits == "16" else "tf32x3",
    }  # fmt: skip
    constants |= {"keys": {"SQUARE": even, "TURN": even}, "queries": {"HAS_D_LSE": False, "TURN": even}}.get(kernel, {})
    function = {"forward": forward_kernel, "keys": keys_kernel, "queries": queries_kernel}[kernel]
    kind = "bf16" if bits == "16" else "fp32"
    types = signature(kernel, kind, int(d), block_q, block_k)
    return compile_kernel(function, types, constants, num_warps=warps, num_stages=stages, target=target)


def check(kernel: str, bits: str, d: str, index: int, even: bool):
    tile = TABLE[kernel][bits][d][index]
    report = compile_tile(kernel, bits, d, tile, even)
    assert report.shared <= min(SHARED_LIMIT, shared_bytes(kernel, Tile(*tile), int(d), int(bits) // 8))
    assert report.spills <= SPILLS.get((kernel, bits, d, index), 16), report.spills
    if (bits, d) == ("32", "256"):
        # wgmma of two warp groups over tiles of 16 columns reads outside memory (Triton 3.6).
        assert "wgmma" not in report.ptx
    if bits == "16" and (kernel, bits, d, index) not in NARROW:
        assert "wgmma.mma_async" in report.ptx
        assert "cp.async.bulk.tensor" in report.ptx
        assert not report.serialized


@pytest.mark.parametrize("line", FIRST)
def test_the_tiles_of_training(line):
    check(*line, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("line", ALL)
def test_every_tile_of_the_table(line):
    check(*line, False)


@pytest.mark.slow
@pytest.mark.parametrize("line", [x for x in ALL if x[3] == 0 and (x[1] == "16" or x[2] == "64")])
def test_first_tiles_of_even_lengths(line):
    check(*line, True)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", TABLE)
def test_float32_fits_in_the_shared_memory_of_an_rtx_3090(kernel: str):
    """Before Hopper a product in three parts takes its operands from shared memory: what stays is held twice."""
    for tile in TABLE[kernel]["32"]["64"]:
        report = compile_tile(kernel, "32", "64", tile, False, GPUTarget("cuda", 86, 32))
        assert report.shared <= shared_bytes(kernel, Tile(*tile), 64, 4)


ROPE = {"ROWS": 32, "BLOCK": 32}


@pytest.mark.parametrize("query", ["*bf16", "*fp32"])
def test_rope_takes_queries_and_keys_of_two_types(query: str):
    """The sums of dQ come in float32 from the Hopper backward, beside keys in bf16."""
    from groundup.kernels.elementwise_triton import rope_kernel

    types = dict.fromkeys(["K", "OUT_Q", "OUT_K"], "*bf16") | {"Q": query, "COS": "*fp32", "SIN": "*fp32"}
    types = dict.fromkeys(rope_kernel.arg_names, "i32") | types | {"factor": "fp32"}
    report = compile_kernel(rope_kernel, types, ROPE | {"BACK": True, "VALUES": False}, num_warps=4)
    assert report.spills == 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
def test_the_loss_of_a_row_loads_wide(padded: bool, softcap: bool, pieces: bool):
    from groundup.kernels.linear_cross_entropy import LOSS_BLOCK, LOSS_WARPS
    from groundup.kernels.linear_cross_entropy_triton import loss_kernel

    types = {"LOGITS": "*bf16", "TARGETS": "*i64", "LOSSES": "*fp32", "N_VALID": "*fp32"}
    types |= {"z_loss": "fp32", "softcap": "fp32", "LAST": "*bf16"}
    types |= dict.fromkeys(["apart", "piece", "columns", "vocab"], "i32")
    constants = {
        "BLOCK": LOSS_BLOCK,
        "PIECES": pieces,
        "PADDED": padded,
        "SOFTCAP": softcap,
        "GRADS": True,
        "DIVIDE": True,
    }
    report = compile_kernel(loss_kernel, types, constants, aligned=("apart", "piece", "columns"), num_warps=LOSS_WARPS)
    assert report.spills <= 16
    assert "ld.global.v4" in report.ptx


@pytest.mark.parametrize("asked", [False, True])
def test_adamw_moves_vectors(asked: bool):
    from groundup.kernels.adamw_triton import adamw_kernel

    pointers = {
        "TABLE": "*i64",
        "OF_TENSOR": "*i32",
        "START": "*i64",
        "SIZES": "*i64",
        "SKIP": "*u8",
        "FACTOR": "*fp32",
    }
    types = dict.fromkeys(adamw_kernel.arg_names, "fp32") | pointers
    constants = {"BLOCK": 2048, "BF16_GRADIENTS": False, "COPIES": False, "ALIGNED": True, "ASKED": asked}
    constants |= {"SCALED": asked}
    report = compile_kernel(adamw_kernel, types, constants, num_warps=4)
    assert report.spills == 0
    assert report.ptx.count("ld.global.v4") >= 16


@pytest.mark.parametrize("weight", ["bf16", "fp32"])
@pytest.mark.parametrize("width", [1024, 2048, 4096, 8192])
def test_the_norm_s_forward_leaves_room_for_all_warps(width: int, weight: str):
    """Reading x twice is worth it at 32 registers a thread: 64 warps a multiprocessor."""
    from groundup.kernels.rms_norm_triton import block_of, forward_kernel, forward_row_kernel

    wide = weight == "fp32"
    block, rows, warps, whole = block_of(width, 2, 4 if wide else 2, False)
    assert whole == (not wide or width > 1024)
    kernel = forward_row_kernel if whole else forward_kernel
    types = dict.fromkeys(kernel.arg_names, "i32") | {"X": "*bf16", "OUT": "*bf16", "RSTD": "*fp32", "eps": "fp32"}
    types |= {"RESIDUAL_X": "*bf16", "TOTAL": "*bf16", "WEIGHT": f"*{weight}"}
    constants = {"WIDTH": width} if whole else {"BLOCK": block, "ROWS": rows, "RESIDUAL": False}
    strides = {"width", "x_stride", "residual_stride"} & types.keys()
    report = compile_kernel(kernel, types, constants, aligned=strides, num_warps=warps)
    assert report.spills == 0
    if whole:
        assert report.registers <= 32
        # 16 elements a thread, 16 bytes a load: x twice, the weight.
        assert report.ptx.count(".v4.b32 {") == (8 if wide else 6)


@pytest.mark.parametrize("limit", [SHARED_LIMIT, 166_912, 101_376])
@pytest.mark.parametrize(
    ("kind", "block", "extra"),
    [("fp32", 16384, False), ("fp32", 16384, True), ("bf16", 16384, True), ("fp32", 8192, True), ("bf16", 1024, True)],
)
def test_the_norm_s_backward_fits_in_shared_memory(kind: str, block: int, extra: bool, limit: int):
    """Limits of an H200, an A100 and an RTX 3090."""
    from groundup.kernels.rms_norm_triton import backward_block_of, backward_kernel

    loaded = (4 if kind == "fp32" else 2) * (3 if extra else 2)
    columns, rows, warps, _, stages = backward_block_of(block, loaded, limit)
    assert columns == block
    types = dict.fromkeys(backward_kernel.arg_names, "i32") | dict.fromkeys(["X", "D_OUT", "EXTRA_GRAD"], f"*{kind}")
    types |= dict.fromkeys(["WEIGHT", "RSTD", "PARTS"], "*fp32") | {"D_X": f"*{kind}"}
    strides = ("width", "x_stride", "d_stride", "extra_stride")
    constants = {"BLOCK": block, "ROWS": rows, "EXTRA": extra, "STAGES": stages}
    report = compile_kernel(backward_kernel, types, constants, aligned=strides, num_warps=warps)
    assert report.shared <= limit
    if limit == SHARED_LIMIT and (kind, block) != ("fp32", 16384):
        assert stages == 3
        assert 2 * block * rows * loaded <= report.shared


def gluon_descriptor(kind, item: str, *shape: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for(list(shape), kind)
    return f"tensordesc<{item}[{', '.join(map(str, shape))}],{layout!r}>"


@pytest.mark.slow
@pytest.mark.parametrize(("d", "spills"), [(64, 0), (128, 16)])
def test_hopper_forward(d: int, spills: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from groundup.kernels.flash_hopper import FORWARD
    from groundup.kernels.flash_hopper_forward import forward_kernel

    def tile(rows):
        return gluon_descriptor(gl.bfloat16, "bf16", 1, 1, rows, d)

    numbers = ["n_q", "n_k", "n_heads", "n_draws", "heads_a_group", "out_batch", "out_head", "out_row"]
    types = dict.fromkeys(numbers, "i32") | {"Q": tile(64), "K": tile(128), "V": tile(128), "OUT": "*bf16"}
    types |= {"LSE": "*fp32", "COUNTER": "*i32", "factor": "fp32"}
    constants = {"GROUP": 1, "D": d, "CAUSAL": True, "EVEN": True} | FORWARD[d]
    strides = ("out_batch", "out_head", "out_row")
    report = compile_kernel(forward_kernel, types, constants, GluonASTSource, aligned=strides, num_warps=4)
    assert report.shared <= SHARED_LIMIT
    assert report.spills <= spills
    assert not report.serialized


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "causal", "even", "group", "spills"),
    [
        (64, True, True, 1, 0),
        (64, False, True, 1, 0),
        (64, True, False, 4, 24),
        (128, True, True, 1, 0),
        (128, False, True, 1, 0),
        (128, True, False, 1, 8),
        (128, True, True, 4, 32),
    ],
)
def test_hopper_backward(d: int, causal: bool, even: bool, group: int, spills: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from groundup.kernels.flash_hopper import BACKWARD
    from groundup.kernels.flash_hopper_backward import backward_kernel

    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    strides = ("kv_batch", "kv_head_stride", "kv_row")
    types = dict.fromkeys(["n_q", "n_k", "n_padded", "n_kv_heads", "heads_a_group", *strides], "i32")
    types |= dict.fromkeys(["Q", "K", "V", "D_OUT"], gluon_descriptor(gl.bfloat16, "bf16", 1, 1, 64, d))
    types |= dict.fromkeys(["LSE2", "DELTA"], f"tensordesc<fp32[64],{flat!r}>")
    types |= {"D_Q": gluon_descriptor(gl.float32, "fp32", 1, 1, 64, 64), "D_K": "*bf16", "D_V": "*bf16"}
    types |= {"scale": "fp32"}
    constants = {"GROUP": group, "D": d, "CAUSAL": causal, "EVEN": even} | BACKWARD[d]
    report = compile_kernel(backward_kernel, types, constants, GluonASTSource, aligned=strides, num_warps=4)
    assert report.shared <= SHARED_LIMIT
    assert report.spills <= spills
    assert not report.serialized
    assert "cp.reduce.async.bulk.tensor" in report.ptx


@pytest.mark.parametrize("first", [-64, -63, -37, -1, 0, 1, 20, 63, 64])
def test_the_hopper_backward_s_mask(first: int):
    """Its PTX, executed for each thread on ones: they stay where query >= key + first."""
    from groundup.kernels.flash_hopper_backward import MASK, MASK_OPERANDS

    assert MASK_OPERANDS.value == ",".join(["=f"] * 32 + ["f"] * 32 + ["r"] * 32)
    prefix, suffix = "{ .reg .pred hidden; ", " }"
    assert MASK.value.startswith(prefix)
    assert MASK.value.endswith(suffix)
    lines = MASK.value[len(prefix) : -len(suffix)].split(";")
    for thread in range(128):
        # The accumulator of wgmma m64n64 (PTX manual): element e of a thread is at this key (row) and query (column).
        keys = [thread // 32 * 16 + thread % 32 // 4 + e % 4 // 2 * 8 for e in range(32)]
        queries = [thread % 4 * 2 + e // 4 * 8 + e % 2 for e in range(32)]
        apart = [k + first - q for k, q in zip(keys, queries, strict=True)]
        registers, hidden = [float("nan")] * 32 + [1.0] * 32 + [float(a) for a in apart], False
        for line in filter(None, map(str.strip, lines)):
            operation, *operands = line.removeprefix("@hidden ").replace("$", "").replace(",", "").split()
            if operation == "setp.gt.s32":
                hidden = registers[int(operands[1])] > int(operands[2])
            elif not line.startswith("@hidden ") or hidden:
                assert operation == "mov.f32"
                registers[int(operands[0])] = 0.0 if operands[1] == "0f00000000" else registers[int(operands[1])]
        assert registers[:32] == [float(a <= 0) for a in apart]


@pytest.mark.parametrize(("epilogue", "head"), [(0, 64), (1, 64), (1, 128), (2, 64)])
def test_fused_products_stay_in_registers(epilogue: int, head: int):
    """Of linear_hopper.py: with a residual, RoPE, SwiGLU."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from groundup.kernels.fused_linear import FIXED
    from groundup.kernels.linear_hopper import linear_kernel

    def tile(height):
        return gluon_descriptor(gl.bfloat16, "bf16", height, 64)

    types = dict.fromkeys(["m_tiles", "n_tiles", "steps", "seq", "turned"], "i32") | {"W": tile(128), "W_UP": tile(128)}
    types |= dict.fromkeys(["X", "R", "OUT", "OUT_UP", "HIDDEN"], tile(64)) | {"COS": "*fp32", "SIN": "*fp32"}
    constants = {"EPILOGUE": epilogue, "HEAD": head, **FIXED}
    report = compile_kernel(linear_kernel, types, constants, GluonASTSource, num_warps=4)
    assert report.shared <= SHARED_LIMIT
    assert report.spills == 0
    assert not report.serialized
    # A layout that had to change would go through shared memory or between lanes, besides what is stored.
    assert report.ptx.count("stmatrix") == (48 if epilogue == 2 else 32)
    assert report.ptx.count("st.shared") <= 2
    assert report.ptx.count("shfl") <= 1


@pytest.mark.parametrize("d_ff", [2752, pytest.param(2048, marks=pytest.mark.slow)])
def test_the_product_before_swiglu_s_backward(d_ff: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from groundup.kernels.fused_linear import BACKWARD
    from groundup.kernels.swiglu_backward_hopper import swiglu_backward_kernel

    types = dict.fromkeys(["m", "tiles", "tile_columns", "steps"], "i32") | {"GATE_UP": "*i32", "GRAD": "*i32"}
    types |= {"D_Y": gluon_descriptor(gl.bfloat16, "bf16", 64, 64), "W": gluon_descriptor(gl.bfloat16, "bf16", 64, 128)}
    report = compile_kernel(swiglu_backward_kernel, types, {"F": d_ff, **BACKWARD}, GluonASTSource, num_warps=4)
    assert report.shared <= SHARED_LIMIT
    assert report.spills == 0
    assert not report.serialized
    # Gate, up and their gradients move 16 bytes a thread.
    assert report.ptx.count("ld.global.") == report.ptx.count("ld.global.v4.b32")
    assert report.ptx.count("st.global.") == report.ptx.count("st.global.v4.b32")


def test_element_wise_kernels_move_vectors():
    """A mask i < n lets vectors through only where the compiler knows that 16 divides n, which it is told by value."""
    from groundup.kernels.flash_triton_backward import scale_kernel
    from groundup.kernels.linear_cross_entropy_triton import scale_in_place_kernel

    for kernel, types, block in (
        (scale_kernel, {"X": "*fp32", "OUT": "*bf16", "scale": "fp32", "n": "i32"}, 4096),
        (scale_in_place_kernel, {"X": "*bf16", "FACTOR": "*fp32", "n": "i32"}, 8192),
    ):
        assert not next(p for p in kernel.params if p.name == "n").do_not_specialize
        ptx = compile_kernel(kernel, types, {"BLOCK": block}, aligned=("n",), num_warps=4).ptx
        assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize(("name", "spills"), [("gpt2-124m", 96), ("stories-17m", 0)])
def test_a_token_s_step(name: str, spills: int):
    """It needs nearly all registers: every program holds its next weights while it waits."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from groundup.config.sizes import size
    from groundup.kernels.decode import WARPS, sizes
    from groundup.kernels.decode_gluon import decode_kernel

    config = size(name).resolve()
    types = dict.fromkeys(["EMBEDDING", "HEAD_W", "KEYS", "VALUES"], "*bf16")
    types |= dict.fromkeys(["COS", "SIN", "LOGITS"], "*fp32") | dict.fromkeys(["TABLE", "CHOICES", "STATE"], "*i64")
    types |= {"WORDS": "*i32", "limit": "i32", "length": "i32", "eps": "fp32", "scale": "fp32", "softcap": "fp32"}
    constants = sizes(config, config.context_length, 132)
    report = compile_kernel(decode_kernel, types, constants, GluonASTSource, num_warps=WARPS)
    assert report.spills <= spills
    # Two blocks' worth of shared memory and more: one block a multiprocessor, and all of them at once.
    assert report.shared <= SHARED_LIMIT
    assert re.search(r"ld\.global[^;]*\.v4", report.ptx)
    assert "ld.relaxed.gpu.global.v4.b32" in report.ptx
