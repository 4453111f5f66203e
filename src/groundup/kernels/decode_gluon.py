"""One token through a whole model in one launch: the kernel of decode.py, in Gluon.

As many programs as the GPU has multiprocessors stay for the whole step. Each owns some rows of every matrix. What one
program makes and all need (the residual stream, queries, the feed-forward's hidden values) goes through global memory
as words of 32 bits: above a bf16, below the number of the step. A reader asks for its words until they carry the
number, so there is no barrier and nothing to clear: five exchanges a layer. A program asks for its next weights before
it waits, and for those after them to be in L2.

Gluon, and not Triton, for the layouts: a warp reads whole rows, so that a product ends in shuffles, and Triton's
compiler would move the weights to where the activations are.
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from groundup.kernels import decode
from groundup.kernels.decode_words import SINGLE, VECTOR, WARPS, collect, operands, publish, waiting, waiting_parts
from groundup.kernels.linear_hopper import SIGMOID

COLUMNS = gl.constexpr(decode.COLUMNS)
"""Columns of a matrix that a warp reads in one row at once, 16 bytes a thread."""
TILE = gl.constexpr(gl.BlockedLayout([1, 1, 8], [1, 1, 32], [decode.WARPS, 1, 1], [2, 1, 0]))
"""Of weights, (rows, pieces, COLUMNS)."""
ROWS_OF_TILE = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, TILE.value)))
PIECES = gl.constexpr(gl.SliceLayout(0, TILE.value))
"""(pieces, COLUMNS): what multiplies a tile."""
SUMS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(1, TILE.value)))
"""(rows,): the product."""
LINES_OF_ROWS = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [decode.WARPS, 1], [1, 0]))
ROWS_OF_LINES = gl.constexpr(gl.SliceLayout(1, LINES_OF_ROWS.value))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CUBE = gl.constexpr(gl.BlockedLayout([decode.WARPS, 1], [1, 32], [1, decode.WARPS], [0, 1]))
NONE = gl.constexpr(2147483647)
NAN = gl.constexpr(0x7FF8000000000000)
"""A float64 that is no number."""
LOG2E = gl.constexpr(1.4426950408889634)
THREE = gl.constexpr(
    "{ .reg .pred late; .reg .b64 a; AGAIN: ld.relaxed.gpu.global.b64 $0, [$3]; ld.relaxed.gpu.global.b64 $1, [$4]; "
    "ld.relaxed.gpu.global.b64 $2, [$5]; shr.u64 a, $0, 32; setp.ne.b64 late, a, $6; shr.u64 a, $1, 32; "
    "setp.ne.or.b64 late, a, $6, late; shr.u64 a, $2, 32; setp.ne.or.b64 late, a, $6, late; @late bra AGAIN; }"
)
"""Three words of 64 bits once their upper halves are $6."""
INTO_L2 = gl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@gluon.jit
def columns_of(PIECES_OF_K: gl.constexpr):
    """(PIECES_OF_K, COLUMNS): the columns of a tile."""
    c = gl.arange(0, PIECES_OF_K, gl.SliceLayout(1, PIECES)) * COLUMNS
    return c.expand_dims(1) + gl.arange(0, COLUMNS, gl.SliceLayout(0, PIECES)).expand_dims(0)


@gluon.jit
def gains(GAIN, n, PIECES_OF_K: gl.constexpr):
    """A norm's n gains, as PIECES."""
    k = columns_of(PIECES_OF_K)
    return gl.load(GAIN + k, mask=k < n, other=0.0)


@gluon.jit
def pointer(TABLE, index, like):
    """The matrix whose address is TABLE[index]."""
    return gl.multiple_of(gl.load(TABLE + index).to(like.dtype, bitcast=True), 16)


@gluon.jit
def tile_of(rows, wanted, K, PIECES_OF_K: gl.constexpr):
    """A TILE: rows of a matrix of K columns, given pointers (ROWS_OF_TILE) to their begins; zeros where not wanted."""
    k = columns_of(PIECES_OF_K).expand_dims(0)
    where = rows.expand_dims(1).expand_dims(2) + k
    # Read once: past L1, where pointers and gains stay.
    return gl.load(where, mask=wanted.expand_dims(1).expand_dims(2) & (k < K), other=0.0, cache_modifier=".cg")


@gluon.jit
def times_pieces(tile, x):
    products = tile.to(gl.float32) * x.expand_dims(0)
    return gl.convert_layout(gl.sum(gl.sum(products, 1), 1), SUMS, assert_trivial=True)


@gluon.jit
def times(tile, x, shared):
    """tile (rows, pieces, COLUMNS) times the vector x: SUMS, in float32."""
    shared.store(x.to(shared.dtype).reshape([tile.shape[1], tile.shape[2]]))
    return times_pieces(tile, shared.load(PIECES).to(gl.float32))


@gluon.jit
def normed(x, gain, shared, n, eps):
    """The vector x as PIECES times the gains, and the number that then makes it its RMSNorm.

    Every warp sums all squares by itself: no other has to be waited for.
    """
    shared.store(x.to(shared.dtype).reshape([gain.shape[0], gain.shape[1]]))
    x = shared.load(PIECES).to(gl.float32)
    return x * gain.to(gl.float32), gl.rsqrt(gl.sum(gl.sum(x * x, 0), 0) * (1.0 / n) + eps)


@gluon.jit
def silu(x):
    return x * gl.inline_asm_elementwise(SIGMOID, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def prefetch(where):
    gl.inline_asm_elementwise(INTO_L2, "=r,l", [where.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def into_l2(FIRST, n, MOST: gl.constexpr):
    """Have n ≤ MOST elements from FIRST on fetched into L2, if they are not there; lines of 128 bytes."""
    LINES: gl.constexpr = gl.constexpr(triton.next_power_of_2((MOST + 63) // 64))
    i = gl.arange(0, LINES, SINGLE) * 64
    prefetch(FIRST + gl.where(i < n, i, 0))


@gluon.jit
def rows_into_l2(rows, K, LINES: gl.constexpr):
    """`into_l2` for rows (ROWS_OF_LINES) of K elements."""
    k = gl.arange(0, LINES, gl.SliceLayout(0, LINES_OF_ROWS)).expand_dims(0) * 64
    prefetch(rows.expand_dims(1) + gl.where(k < K, k, 0))


@gluon.jit
def in_two_halves(first, R: gl.constexpr, LAYOUT: gl.constexpr):
    """Row numbers from `first` on for a tile of R: even ones above odd ones, so that a pair meets in one thread."""
    j = gl.arange(0, R, LAYOUT)
    return first + 2 * (j % (R // 2)) + j // (R // 2)


@gluon.jit
def wide_rows(w1, w3, first, F_R: gl.constexpr, K, LAYOUT: gl.constexpr):
    """Pointers to F_R rows of the gate's matrix, above as many of w3; and the rows' numbers."""
    both = gl.arange(0, 2 * F_R, LAYOUT)
    f = first + both % F_R
    return gl.where(both < F_R, w1 + f * K, w3 + f * K), f


@gluon.jit
def qkv_rows(TABLE, layer, r, K, Q_ROWS: gl.constexpr, KV_ROWS: gl.constexpr, like):
    """Pointers to rows r of the queries', keys' and values' matrices, one under the other."""
    q, k = pointer(TABLE, layer * 9 + 1, like), pointer(TABLE, layer * 9 + 2, like)
    v = pointer(TABLE, layer * 9 + 3, like)
    later = gl.where(r < Q_ROWS + KV_ROWS, k + (r - Q_ROWS) * K, v + (r - Q_ROWS - KV_ROWS) * K)
    return gl.where(r < Q_ROWS, q + r * K, later)


@gluon.jit
def in_pairs(y):
    """The two of each pair, where y has all first ones before all second ones."""
    return y.reshape([2, y.shape[0] // 2]).permute([1, 0]).split()


@gluon.jit
def attend(
    QKV, PARTS, KEYS, VALUES, k, v, shared, outs, tops, totals, head, split, place, length, scale, epoch,
    Q_ROWS: gl.constexpr, KV_ROWS: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """One head over every SPLITS-th piece of keys: publish its output and the logarithm of its weights' sum.

    k, v (warps, C, d): the first piece, as the cache has it; the newest position comes from QKV, and into the cache.
    Each warp has an online softmax (Milakov & Gimelshein 2018) of its own; they are joined through shared memory.
    """
    C: gl.constexpr = k.shape[1]
    HEAD: gl.constexpr = k.shape[2]
    KV: gl.constexpr = k.type.layout
    OF_HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, KV))
    OF_KEYS: gl.constexpr = gl.SliceLayout(2, KV)
    i = gl.arange(0, HEAD, OF_HEAD)
    kv = head // GROUP
    # Query, key, value, and the value once more: three vectors are no power of two.
    j = gl.arange(0, 4 * HEAD, SINGLE)
    begins = gl.where(j < HEAD, head * HEAD, gl.where(j < 2 * HEAD, Q_ROWS + kv * HEAD, Q_ROWS + KV_ROWS + kv * HEAD))
    asked = (QKV + begins + j % HEAD).to(gl.int64)
    shared.store(gl.inline_asm_elementwise(
        waiting(1), operands(1, 1), [asked, epoch], dtype=gl.float32, is_pure=False, pack=1
    ))  # fmt: skip
    q = shared.slice(0, HEAD).load(OF_HEAD) * (scale * LOG2E)
    k_new = shared.slice(HEAD, HEAD).load(OF_HEAD).to(k.dtype)
    v_new = shared.slice(2 * HEAD, HEAD).load(OF_HEAD).to(k.dtype)
    base = kv * length * HEAD
    m = gl.full([WARPS], float("-inf"), gl.float32, gl.SliceLayout(1, OF_KEYS))
    total = gl.zeros([WARPS], gl.float32, gl.SliceLayout(1, OF_KEYS))
    out = gl.zeros([WARPS, HEAD], gl.float32, gl.SliceLayout(1, KV))
    for first in range(split * WARPS * C, place + 1, SPLITS * WARPS * C):
        at = key_places(first, C, KV)
        if first > split * WARPS * C:
            where = at.expand_dims(2) * HEAD + i.expand_dims(0).expand_dims(0)
            k = gl.load(KEYS + base + where, mask=(at < place).expand_dims(2), other=0.0)
            v = gl.load(VALUES + base + where, mask=(at < place).expand_dims(2), other=0.0)
        if (first <= place) & (place < first + WARPS * C):
            newest = (at == place).expand_dims(2)
            k = gl.where(newest, k_new.expand_dims(0).expand_dims(0), k)
            v = gl.where(newest, v_new.expand_dims(0).expand_dims(0), v)
        scores = gl.sum(k.to(gl.float32) * q.expand_dims(0).expand_dims(0), 2)
        scores = gl.where(at <= place, scores, float("-inf"))
        # A warp may have no key at all: its weights are 0 then, and not NaN.
        top = gl.maximum(gl.maximum(m, gl.max(scores, 1)), -1e30)
        p = gl.exp2(scores - top.expand_dims(1))
        decay = gl.exp2(m - top)
        total = total * decay + gl.sum(p, 1)
        added = gl.sum(p.expand_dims(2) * v.to(gl.float32), 1)
        out = out * gl.convert_layout(decay, gl.SliceLayout(1, out.type.layout)).expand_dims(1) + added
        m = top
    outs.store(out)
    tops.store(m)
    totals.store(total)
    WARP: gl.constexpr = gl.SliceLayout(1, CUBE)
    m = tops.load(WARP)
    top = gl.max(m, 0)
    weight = gl.exp2(m - top)
    total = gl.sum(totals.load(WARP) * weight, 0)
    out = gl.sum(outs.load(CUBE) * weight.expand_dims(1), 0) / total
    i_out = gl.arange(0, HEAD, gl.SliceLayout(0, CUBE))
    publish(PARTS, i_out, out, i_out >= 0, epoch)
    lse = top + gl.log2(total)
    rounded = lse.to(gl.bfloat16).to(gl.float32)
    two = gl.arange(0, 2, SINGLE)
    publish(PARTS + HEAD, two, gl.where(two == 0, rounded, lse - rounded), two >= 0, epoch)
    if ((place // (WARPS * C)) % SPLITS == split) & (head % GROUP == 0):
        gl.store(KEYS + base + place * HEAD + i, k_new)
        gl.store(VALUES + base + place * HEAD + i, v_new)


@gluon.jit
def key_places(first, C: gl.constexpr, KV: gl.constexpr):
    """(WARPS, C): the positions of a piece of keys that begins at `first`."""
    OF_KEYS: gl.constexpr = gl.SliceLayout(2, KV)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, OF_KEYS)).expand_dims(1)
    return first + warp * C + gl.arange(0, C, gl.SliceLayout(0, OF_KEYS)).expand_dims(0)


@gluon.jit
def heads_outputs(
    PARTS, n_splits, epoch, HEADS: gl.constexpr, HEAD: gl.constexpr, HP: gl.constexpr, SP: gl.constexpr
):  # fmt: skip
    """All heads' outputs (HP · HEAD,) from those of the splits: PARTS (splits, heads, HEAD + 4), see `attend`."""
    LANES: gl.constexpr = min(HEAD // 4, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout([SP, 1, 4], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 0, 1])
    s = gl.arange(0, SP, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))).expand_dims(1).expand_dims(2)
    h = gl.arange(0, HP, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))).expand_dims(0).expand_dims(2)
    i = gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))).expand_dims(0).expand_dims(1)
    there = (s < n_splits) & (h < HEADS) & (i >= 0)
    row = PARTS + (s * HEADS + h) * (HEAD + 4)
    PACK: gl.constexpr = 4 * SP
    out, lse = gl.inline_asm_elementwise(
        waiting_parts(PACK), operands(2 * PACK, PACK),
        [gl.where(there, (row + i).to(gl.int64), 0), gl.where(there, (row + HEAD).to(gl.int64), 0), epoch],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=PACK,
    )  # fmt: skip
    lse = gl.where(there, lse, float("-inf"))
    weight = gl.where(there, gl.exp2(lse - gl.max(lse, 0).expand_dims(0)), 0.0)
    whole = gl.maximum(gl.sum(weight, 0), 1e-30)  # 0 for the heads that are padding
    return (gl.sum(out * weight, 0) / whole).reshape([HP * HEAD])


@gluon.jit
def choose_token(CHOICES, STATE, place, length, epoch, PROGRAMS: gl.constexpr, PP: gl.constexpr):
    """The likeliest of the programs' tokens and the place after it into STATE, for the next step."""
    i = gl.arange(0, PP, SINGLE)
    there = i < PROGRAMS
    mine = CHOICES + 1 + gl.where(there, i, 0) * 3
    step = epoch.to(gl.int64)
    best, ids, bad = gl.inline_asm_elementwise(
        THREE, "=&l,=&l,=&l,l,l,l,l", [mine.to(gl.int64), (mine + 1).to(gl.int64), (mine + 2).to(gl.int64), step],
        dtype=(gl.int64, gl.int64, gl.int64), is_pure=False, pack=1,
    )  # fmt: skip
    best = gl.where(there, best.to(gl.int32).to(gl.float32, bitcast=True), float("-inf"))
    ids = ids.to(gl.int32)
    bad = bad.to(gl.int32)
    chosen = gl.min(gl.where(there & (best == gl.max(best, 0)), ids, NONE), 0)
    finite = gl.max(gl.where(there, bad, 0), 0) == 0
    gl.store(STATE, gl.where(finite, chosen, 0).to(gl.int64))
    gl.store(STATE + 1, gl.minimum(place + 1, length - 1).to(gl.int64))
    gl.store(STATE + 2, gl.where(finite, 0, NAN).to(gl.int64))
    gl.store(CHOICES, step + 1)


@gluon.jit
def head_rows(HEAD_W, first, V, D, DC: gl.constexpr, R: gl.constexpr):
    """Rows first … first + R of the output head."""
    r = first + gl.arange(0, R, ROWS_OF_TILE)
    return tile_of(HEAD_W + r.to(gl.int64) * D, r < V, D, DC)


@gluon.jit
def head_into_l2(HEAD_W, first, V, D, R: gl.constexpr):
    """`into_l2` for rows first … first + R of the output head, or its last ones."""
    into_l2(HEAD_W + gl.minimum(first, V - R).to(gl.int64) * D, R * D, R * D)


@gluon.jit
def all_logits(
    HEAD_W, LOGITS, CHOICE, tile, x, scale_x, first, limit, V, D, softcap, epoch,
    PROGRAMS: gl.constexpr, DC: gl.constexpr, R: gl.constexpr, SOFTCAP: gl.constexpr,
):  # fmt: skip
    """This program's logits, tiles of R rows by turns, and the best of them to CHOICE; tile: the first weights."""
    best = gl.full([R], float("-inf"), gl.float32, SUMS)
    ids = gl.full([R], NONE, gl.int32, SUMS)
    bad = gl.zeros([R], gl.int32, SUMS)
    for row in range(first, V, PROGRAMS * R):
        following = head_rows(HEAD_W, row + PROGRAMS * R, V, D, DC, R)
        r = row + gl.arange(0, R, SUMS)
        y = times_pieces(tile, x) * scale_x
        if SOFTCAP:
            y = softcap * (1 - 2 / (1 + gl.exp(2 * y / softcap)))
        gl.store(LOGITS + r, y, mask=r < V)
        # Not equal to itself: NaN.
        bad = bad | ((r < limit) & ((y != y) | (gl.abs(y) == float("inf")))).to(gl.int32)
        better = (r < limit) & (y > best)
        best = gl.where(better, y, best)
        ids = gl.where(better, r, ids)
        tile = following
    top = gl.max(best, 0)
    chosen = gl.min(gl.where(best == top, ids, NONE), 0)
    i = gl.arange(0, 4, SINGLE)
    three = gl.where(i == 0, top.to(gl.int32, bitcast=True), gl.where(i == 1, chosen, gl.max(bad, 0)))
    gl.store(CHOICE + i, (epoch.to(gl.int64) << 32) | (three.to(gl.int64) & 0xFFFFFFFF), mask=i < 3)


@gluon.jit(do_not_specialize=["limit", "length"])
def decode_kernel(
    TABLE, EMBEDDING, HEAD_W, COS, SIN, KEYS, VALUES, WORDS, CHOICES, LOGITS, STATE, limit, length, eps, scale, softcap,
    LAYERS: gl.constexpr, D: gl.constexpr, F: gl.constexpr, V: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, HEAD: gl.constexpr, PROGRAMS: gl.constexpr, SPLITS: gl.constexpr, C: gl.constexpr,
    DC: gl.constexpr, FC: gl.constexpr, HP: gl.constexpr, SP: gl.constexpr, PP: gl.constexpr,
    QKV_R: gl.constexpr, QKV_N: gl.constexpr, D_R: gl.constexpr, D_N: gl.constexpr, F_R: gl.constexpr,
    F_N: gl.constexpr, V_R: gl.constexpr, LINES: gl.constexpr, ROPE: gl.constexpr,
    SOFTCAP: gl.constexpr, STRIDE: gl.constexpr,
):  # fmt: skip
    """TABLE (LAYERS, 9): addresses of a layer's gain, q, k, v, output, gain, w1, w3, w2; then the last norm's gain.

    WORDS: STRIDE for each layer: what the programs exchange. CHOICES: the number of the step, then each program's best
    logit, its id, and 1 where a logit was not finite. STATE: see DecodeKernel. X_N rows of a matrix belong to a
    program, in a tile of X_R.
    """
    Q_ROWS: gl.constexpr = HEADS * HEAD
    KV_ROWS: gl.constexpr = KV_HEADS * HEAD
    ROWS: gl.constexpr = Q_ROWS + 2 * KV_ROWS
    PARTS_AT: gl.constexpr = ROWS
    MIDDLE_AT: gl.constexpr = PARTS_AT + SPLITS * HEADS * (HEAD + 4)
    HIDDEN_AT: gl.constexpr = MIDDLE_AT + D
    AFTER_AT: gl.constexpr = HIDDEN_AT + F
    gl.static_assert(AFTER_AT + D == STRIDE)
    KV: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 256 // HEAD, HEAD // 8], [WARPS, 1, 1], [2, 1, 0])

    pid = gl.program_id(0)
    token = gl.load(STATE)
    place = gl.load(STATE + 1).to(gl.int32)
    epoch = gl.load(CHOICES).to(gl.int32)

    # Rows of q, k, v, and the angles of their pairs.
    r = in_two_halves(pid * QKV_N, QKV_R, ROWS_OF_TILE)
    r_there = (r < (pid + 1) * QKV_N) & (r < ROWS)
    qkv = tile_of(qkv_rows(TABLE, 0, r, D, Q_ROWS, KV_ROWS, EMBEDDING), r_there, D, DC)
    r_lines = pid * QKV_N + gl.arange(0, QKV_R, ROWS_OF_LINES)
    r_lines = gl.minimum(r_lines, gl.minimum((pid + 1) * QKV_N, ROWS) - 1)
    PAIRS: gl.constexpr = in_pairs(gl.arange(0, QKV_R, SUMS))[0].type.layout
    pair = pid * QKV_N + 2 * gl.arange(0, QKV_R // 2, PAIRS)
    pair_there = (pair < (pid + 1) * QKV_N) & (pair < ROWS)
    cos = gl.full([QKV_R // 2], 1.0, gl.float32, PAIRS)
    sin = gl.zeros([QKV_R // 2], gl.float32, PAIRS)
    if ROPE:
        turns = pair_there & (pair < Q_ROWS + KV_ROWS)
        angle = place * (HEAD // 2) + pair % HEAD // 2
        cos = gl.load(COS + angle, mask=turns, other=1.0)
        sin = gl.load(SIN + angle, mask=turns, other=0.0)
    # Rows of what ends in the residual stream.
    d = pid * D_N + gl.arange(0, D_R, ROWS_OF_TILE)
    d_there = (d < (pid + 1) * D_N) & (d < D)
    own = pid * D_N + gl.arange(0, D_R, SUMS)
    own_there = (own < (pid + 1) * D_N) & (own < D)
    # The first row, for what is asked into L2; behind the last matrix there may be nothing to read.
    d_first = gl.minimum(pid * D_N, D - D_N)
    f_first = gl.minimum(pid * F_N, F - F_N)
    # Rows of the feed-forward.
    HIDDEN: gl.constexpr = in_pairs(gl.arange(0, 2 * F_R, SUMS))[0].type.layout
    hid = pid * F_N + gl.arange(0, F_R, HIDDEN)
    hid_there = (hid < (pid + 1) * F_N) & (hid < F)
    # The piece of the keys.
    head = pid % HEADS
    split = pid // HEADS
    n_splits = gl.minimum((place + C) // C, SPLITS)
    keys_at = (head // (HEADS // KV_HEADS)) * length * HEAD
    at = key_places(split * C, C // WARPS, KV)
    key_there = ((at < place) & (split < SPLITS)).expand_dims(2)
    i = gl.arange(0, HEAD, gl.SliceLayout(0, gl.SliceLayout(0, KV))).expand_dims(0).expand_dims(0)
    key_where = keys_at + at.expand_dims(2) * HEAD + i
    n_held = gl.where(split < SPLITS, gl.minimum(gl.maximum(place - split * C, 0), C) * HEAD, 0)
    piece_at = gl.where(split < SPLITS, keys_at + split * C * HEAD, 0)
    layer_size = gl.to_tensor(KV_HEADS * HEAD).to(gl.int64) * length

    shared = gl.allocate_shared_memory(gl.bfloat16, [DC, COLUMNS], FLAT)
    shared_head = gl.allocate_shared_memory(gl.float32, [4 * HEAD], LINE)
    outs = gl.allocate_shared_memory(gl.float32, [WARPS, HEAD], FLAT)
    tops = gl.allocate_shared_memory(gl.float32, [WARPS], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [WARPS], LINE)
    shared_wide = gl.allocate_shared_memory(gl.bfloat16, [FC, COLUMNS], FLAT)
    i = gl.arange(0, DC * COLUMNS, VECTOR)
    x = gl.load(EMBEDDING + token * D + i, mask=i < D, other=0.0).to(gl.float32)
    mine = gl.load(EMBEDDING + token * D + own, mask=own_there, other=0.0).to(gl.float32)
    gain = gains(pointer(TABLE, 0, EMBEDDING), D, DC)
    first = pid * V_R
    k = gl.load(KEYS + key_where, mask=key_there, other=0.0)
    v = gl.load(VALUES + key_where, mask=key_there, other=0.0)
    out_w = tile_of(pointer(TABLE, 4, EMBEDDING) + d * Q_ROWS, d_there, Q_ROWS, DC)
    into_l2(pointer(TABLE, 6, EMBEDDING) + f_first * D, F_N * D, F_N * D)
    into_l2(pointer(TABLE, 7, EMBEDDING) + f_first * D, F_N * D, F_N * D)
    into_l2(pointer(TABLE, 8, EMBEDDING) + d_first * F, D_N * F, D_N * F)
    for layer in range(LAYERS):
        LAYER = WORDS + layer * STRIDE
        LAYER_KEYS = KEYS + layer * layer_size
        LAYER_VALUES = VALUES + layer * layer_size
        following = gl.minimum(layer + 1, LAYERS - 1)

        # Queries, keys, values of all heads.
        x, scale_x = normed(x, gain, shared, D, eps)
        even, odd = in_pairs(times_pieces(qkv, x) * scale_x)
        publish(LAYER, pair, even * cos - odd * sin, pair_there, epoch)
        publish(LAYER + 1, pair, even * sin + odd * cos, pair_there, epoch)
        w1, w3 = pointer(TABLE, layer * 9 + 6, EMBEDDING), pointer(TABLE, layer * 9 + 7, EMBEDDING)
        rows, f = wide_rows(w1, w3, pid * F_N, F_R, D, ROWS_OF_TILE)
        wide = tile_of(rows, (f < (pid + 1) * F_N) & (f < F), D, DC)

        # Attention: a head and a piece of the keys each.
        if split < n_splits:
            piece = split * HEADS + head
            attend(
                LAYER, LAYER + PARTS_AT + piece * (HEAD + 4), LAYER_KEYS, LAYER_VALUES, k, v, shared_head, outs, tops,
                totals, head, split, place, length, scale, epoch, Q_ROWS, KV_ROWS, HEADS // KV_HEADS, SPLITS,
            )  # fmt: skip
        gain = gains(pointer(TABLE, layer * 9 + 5, EMBEDDING), D, DC)
        if layer + 1 < LAYERS:
            rows_into_l2(qkv_rows(TABLE, following, r_lines, D, Q_ROWS, KV_ROWS, EMBEDDING), D, LINES)
        else:
            head_into_l2(HEAD_W, first, V, D, V_R)

        # The heads' outputs mixed, onto the residual stream.
        heads = heads_outputs(LAYER + PARTS_AT, n_splits, epoch, HEADS, HEAD, HP, SP)
        mine += times(out_w, heads, shared)
        publish(LAYER + MIDDLE_AT, own, mine, own_there, epoch)
        down = tile_of(pointer(TABLE, layer * 9 + 8, EMBEDDING) + d * F, d_there, F, FC)
        if layer + 1 < LAYERS:
            into_l2(LAYER_KEYS + layer_size + piece_at, n_held, C * HEAD)
            into_l2(LAYER_VALUES + layer_size + piece_at, n_held, C * HEAD)
            into_l2(pointer(TABLE, following * 9 + 4, EMBEDDING) + d_first * Q_ROWS, D_N * Q_ROWS, D_N * Q_ROWS)
        else:
            head_into_l2(HEAD_W, first + PROGRAMS * V_R, V, D, V_R)

        # Feed-forward.
        x, scale_x = normed(collect(LAYER + MIDDLE_AT, D, epoch, DC * COLUMNS), gain, shared, D, eps)
        gate, up = in_pairs(times_pieces(wide, x) * scale_x)
        publish(LAYER + HIDDEN_AT, hid, silu(gate) * up, hid_there, epoch)
        gain = gains(pointer(TABLE, layer * 9 + 9, EMBEDDING), D, DC)
        qkv = tile_of(qkv_rows(TABLE, following, r, D, Q_ROWS, KV_ROWS, EMBEDDING), r_there, D, DC)
        if layer + 1 < LAYERS:
            into_l2(pointer(TABLE, following * 9 + 6, EMBEDDING) + f_first * D, F_N * D, F_N * D)
            into_l2(pointer(TABLE, following * 9 + 7, EMBEDDING) + f_first * D, F_N * D, F_N * D)
        else:
            head_into_l2(HEAD_W, first + 2 * PROGRAMS * V_R, V, D, V_R)
        x = collect(LAYER + HIDDEN_AT, F, epoch, FC * COLUMNS)
        mine += times(down, x, shared_wide)
        publish(LAYER + AFTER_AT, own, mine, own_there, epoch)
        if layer + 1 < LAYERS:
            into_l2(pointer(TABLE, following * 9 + 8, EMBEDDING) + d_first * F, D_N * F, D_N * F)
        k = gl.load(KEYS + following * layer_size + key_where, mask=key_there, other=0.0)
        v = gl.load(VALUES + following * layer_size + key_where, mask=key_there, other=0.0)
        out_w = tile_of(pointer(TABLE, following * 9 + 4, EMBEDDING) + d * Q_ROWS, d_there, Q_ROWS, DC)
        x = collect(LAYER + AFTER_AT, D, epoch, DC * COLUMNS)

    tile = head_rows(HEAD_W, first, V, D, DC, V_R)
    x, scale_x = normed(x, gain, shared, D, eps)
    all_logits(
        HEAD_W, LOGITS, CHOICES + 1 + pid * 3, tile, x, scale_x, first, limit, V, D, softcap, epoch,
        PROGRAMS, DC, V_R, SOFTCAP,
    )  # fmt: skip
    if pid == 0:
        choose_token(CHOICES, STATE, place, length, epoch, PROGRAMS, PP)
