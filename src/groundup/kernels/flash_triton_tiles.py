"""The parts that the attention kernels in Triton share: which keys a query sees, loading a tile, RoPE, the softcap.

Every mask here (causal, sliding window, documents) gives query i an interval of keys [lo(i), hi(i)), and both ends
grow with i. So a tile of queries visits the tiles of keys between the first row's lo and the last row's hi, and those
between the last row's lo and the first row's hi are seen whole: only the tiles at the two edges compare indices. The
mirror image holds for a tile of keys and its queries.
"""

# The bodies are in Triton's language, which a Python type checker cannot read.
# pyrefly: ignore-errors
import triton
import triton.language as tl


@triton.jit
def longest_first(pid, n_tiles, heads_a_group, REVERSE: tl.constexpr):
    """(tile, head) of a program: heads in groups whose keys and values fit in L2, within one the longest work first.

    Causal: the last tile of queries and the first tile of keys have most to do.
    """
    a_group = heads_a_group * n_tiles
    within = pid % a_group
    tile = within // heads_a_group
    if REVERSE:
        tile = n_tiles - 1 - tile
    return tile, pid // a_group * heads_a_group + within % heads_a_group


@triton.jit
def keys_of(i, n_q, n_k, window, LO, HI, row, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Interval [lo, hi) of keys that query i sees; `row` is where this sequence starts in the tables LO and HI."""
    i = tl.minimum(i, n_q - 1)
    if DOCUMENTS:
        return tl.load(LO + row + i), tl.load(HI + row + i)
    lo = i * 0
    hi = i * 0 + n_k
    if CAUSAL:
        hi = tl.maximum(i + 1 + n_k - n_q, 0)
    if WINDOW:
        lo = tl.maximum(i + 1 + n_k - n_q - window, 0)
    return lo, hi


@triton.jit
def queries_of(j, n_q, n_k, window, LO, HI, row, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Interval [lo, hi) of queries that see key j: the inverse of `keys_of`."""
    j = tl.minimum(j, n_k - 1)
    if DOCUMENTS:
        return tl.load(LO + row + j), tl.load(HI + row + j)
    lo = j * 0
    hi = j * 0 + n_q
    if CAUSAL:
        lo = tl.maximum(j - n_k + n_q, 0)
    if WINDOW:
        hi = tl.maximum(tl.minimum(j - n_k + n_q + window, n_q), 0)
    return lo, hi


@triton.jit
def edges(lo_first, lo_last, hi_first, hi_last, BLOCK: tl.constexpr):
    """(start, whole_from, whole_to, end) of a walk in steps of BLOCK: masked, whole, masked."""
    start = lo_first // BLOCK * BLOCK
    end = tl.maximum(hi_last, start)
    whole_from = tl.minimum(tl.maximum(tl.cdiv(lo_last, BLOCK) * BLOCK, start), tl.cdiv(end, BLOCK) * BLOCK)
    whole_to = tl.maximum(hi_first // BLOCK * BLOCK, whole_from)
    return start, whole_from, whole_to, end


@triton.jit
def part_of(walk, PART: tl.constexpr):
    """(first, end) of part 0, 1 or 2 of what `edges` gives."""
    start, whole_from, whole_to, end = walk
    if PART == 0:
        return start, tl.minimum(whole_from, end)
    if PART == 1:
        return whole_from, whole_to
    return whole_to, end


@triton.jit
def load_tile(X, batch, head, row, ROWS: tl.constexpr, WIDTH: tl.constexpr, UPCAST: tl.constexpr):
    """(ROWS, WIDTH) of a (batch, head, row, width) descriptor; what lies outside reads as 0.

    UPCAST: the interpreter multiplies bfloat16 as bit patterns, so there tiles go to float32.
    """
    tile = tl.reshape(X.load([batch, head, row, 0]), [ROWS, WIDTH])
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_tile(X, batch, head, row, tile, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse of `load_tile`: rows and columns outside are not written."""
    X.store([batch, head, row, 0], tl.reshape(tile.to(X.dtype), [1, 1, ROWS, WIDTH]))


@triton.jit
def turned_back(x, COS, SIN, row, n_rows, half, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """x (ROWS, WIDTH) of positions `row` on with its pairs (2i, 2i + 1) turned by minus RoPE's angles.

    Tables (n_rows, half) in float32. Neighbouring columns are a thread's own, so nothing moves between threads.
    """
    i = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair = tl.arange(0, WIDTH // 2)[None, :]
    inside = (i < n_rows) & (pair < half)
    cos = tl.load(COS + i * half + pair, mask=inside, other=1.0)
    sin = tl.load(SIN + i * half + pair, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), [ROWS, WIDTH])


@triton.jit
def capped(s, cap_in, cap_out):
    """cap · tanh(s · scale / cap) in base 2: cap_in = 2 log2(e) scale / cap, cap_out = cap log2(e).

    tanh(x) = 1 - 2 / (1 + exp(2x)) neither overflows nor needs a library that the interpreter lacks.
    """
    return cap_out - 2 * cap_out / (1 + tl.math.exp2(s * cap_in))
