"""The kernels of groundup.kernels over symbolic tensors: what one launch reads and writes, and what it keeps.

They keep what their backward computes the rest from: a norm its input and one number a row, SwiGLU its input, RoPE
nothing, attention q, k, v (or the projection that holds them), the output and the logsumexp, the loss its own
gradients. The few rows of padding that some vocabularies get are left out.
"""

from math import prod

from groundup.account.ops import attach, cast, keep, lowered, product, record, result, view
from groundup.account.tape import ITEMSIZE, Tensor

CHUNK_BYTES = 126 << 20
"""Least memory for the logits that the loss holds at once, as kernels/linear_cross_entropy.py."""


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Keeps x and the rows' factors. The parts of the weight's gradient (a few MB) are left out."""
    tape = x.tape
    out, factor = tape.empty(x.shape, x.dtype, "norm"), tape.empty((prod(x.shape[:-1]),), "fp32", "rstd")
    tape.launch("norm", (x, weight, out, factor))
    kept = keep("norm", [x, weight], x, weight, factor)

    def backward(grad: Tensor) -> list[Tensor]:
        x, weight, factor = (t.get() for t in kept)
        d_x, d_weight = tape.empty(x.shape, x.dtype, "norm.dx"), tape.empty(weight.shape, weight.dtype, "norm.dw")
        tape.launch("norm_backward", (x, grad, factor, d_x, d_weight))
        return [d_x, d_weight]

    return attach(out, record("norm", [x, weight], backward))


def swiglu(gate_up: Tensor) -> Tensor:
    """Keeps its input, which is both halves."""
    tape = gate_up.tape
    kept = keep("swiglu", [gate_up], gate_up)

    def backward(grad: Tensor) -> list[Tensor]:
        gate_up = kept[0].get()
        d_gate_up = tape.empty(gate_up.shape, gate_up.dtype, "swiglu.d")
        tape.launch("swiglu_backward", (grad, gate_up, d_gate_up))
        return [d_gate_up]

    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return attach(result("swiglu", shape, gate_up.dtype, gate_up), record("swiglu", [gate_up], backward))


def rope(q: Tensor, k: Tensor) -> list[Tensor]:
    """Both in one launch; keeps the table of angles alone, which is a buffer."""
    tape = q.tape

    def turned(*pair: Tensor) -> list[Tensor]:
        out = [tape.empty(t.shape, t.dtype, "rope") for t in pair]
        tape.launch("rope", (*pair, *out))
        return out

    node = record("rope", [q, k], turned, 2)
    return [attach(t, node, i) for i, t in enumerate(turned(q, k))]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal FlashAttention-2 (Dao 2023): keeps q, k, v, the output and a float32 logsumexp a row, no scores.

    It skips the key blocks after a query block, so half of the N² products are executed; backward executes five
    products where forward executes two, since it makes the scores again. k and v may have fewer heads than q.
    """
    q, k, v = lowered(q), lowered(k), lowered(v)
    tape = q.tape
    batch, heads, seq, d_head = q.shape
    sizes = (batch * heads, seq, d_head, seq)
    out = tape.empty(q.shape, q.dtype, "flash")
    logsumexp = tape.empty(q.shape[:-1], "fp32", "logsumexp")
    tape.launch("flash", (q, k, v, out, logsumexp), 2 * prod(sizes), sizes)
    kept = keep("flash", [q, k, v], q, k, v, out, logsumexp)

    def backward(grad: Tensor) -> list[Tensor]:
        q, k, v, out, logsumexp = (t.get() for t in kept)
        delta = result("rowsum", logsumexp.shape, "fp32", grad, out)
        grads = [tape.empty(t.shape, t.dtype, f"flash.d{name}") for name, t in zip("qkv", (q, k, v), strict=True)]
        tape.launch("flash_backward", (q, k, v, grad, logsumexp, delta, *grads), 5 * prod(sizes), sizes)
        return grads

    return attach(out, record("flash", [q, k, v], backward))


def rotary_attention(qkv: Tensor, n_heads: int, turned: bool) -> Tensor:
    """RoPE and causal attention of a projection (batch, seq, all heads, d_head), which is turned in place: keeps the
    projection, the output and the logsumexp; the gradient is one tensor, turned back in place."""
    tape = qkv.tape
    batch, seq, heads, d_head = qkv.shape
    sizes = (batch * n_heads, seq, d_head, seq)

    def turn(whole: Tensor) -> None:
        pair = Tensor((batch, seq, (heads + n_heads) // 2, d_head), whole.dtype, whole.storage)
        tape.launch("rope", (pair, pair))

    if turned:
        turn(qkv)
    shape = (batch, seq, n_heads, d_head)
    out = tape.empty(shape, qkv.dtype, "flash")
    logsumexp = tape.empty((batch, n_heads, seq), "fp32", "logsumexp")
    tape.launch("flash", (qkv, out, logsumexp), 2 * prod(sizes), sizes)
    kept = keep("flash", [qkv], qkv, out, logsumexp)

    def backward(grad: Tensor) -> list[Tensor]:
        qkv, out, logsumexp = (t.get() for t in kept)
        delta = result("rowsum", logsumexp.shape, "fp32", grad, out)
        d_qkv = tape.empty(qkv.shape, qkv.dtype, "flash.dqkv")
        tape.launch("flash_backward", (qkv, grad, logsumexp, delta, d_qkv), 5 * prod(sizes), sizes)
        if turned:
            turn(d_qkv)
        return [d_qkv]

    return attach(out, record("flash", [qkv], backward))


def chunk_rows(n_tokens: int, vocab: int, width: int, item: int, weight_item: int) -> int:
    """Tokens in a chunk of the loss, as the function of this name in kernels/linear_cross_entropy.py."""
    parts = 4 if weight_item >= 4 else 8 if n_tokens >= 1 << 15 else 0
    share = n_tokens * vocab * item // parts if parts else 0
    budget = max(CHUNK_BYTES, vocab * width * 4 * 55 // 256, min(share, 1 << 30))
    return min(n_tokens, max(128, budget // (vocab * item) // 16 * 16))


def linear_cross_entropy(x: Tensor, weight: Tensor) -> Tensor:
    """Logits, loss and both gradients chunk by chunk; the backward only scales what was kept."""
    tape = x.tape
    needed = tape.records(x, weight)
    x = lowered(x)
    (*_, width), (vocab, _), dtype = x.shape, weight.shape, x.dtype
    rows = prod(x.shape[:-1])
    x = view(x, (rows, width))
    head = cast(weight.detach(), dtype)
    losses = tape.empty((rows,), "fp32", "losses")
    d_x = tape.empty(x.shape, dtype, "dx") if needed else None
    d_weight = tape.empty(weight.shape, "fp32", "dw") if needed else None
    chunk = chunk_rows(rows, vocab, width, ITEMSIZE[dtype], ITEMSIZE[weight.dtype])
    for first in range(0, rows, chunk):
        _loss_chunk(x, head, d_x, d_weight, min(chunk, rows - first))
    del head
    loss = result("sum", (), "fp32", losses)
    if d_x is None or d_weight is None:
        return loss
    if d_weight.dtype != weight.dtype and d_weight.numel < 1 << 20:
        d_weight = result("cast", weight.shape, weight.dtype, d_weight)
    # A large one stays within the memory of the float32 one.
    d_weight.dtype = weight.dtype
    kept = [tape.save(t, "loss") for t in (d_x, d_weight, result("count", (), "fp32", loss))]

    def backward(grad: Tensor) -> list[Tensor]:
        grads = [t.get() for t in kept][:2]
        for gradient in grads:
            tape.launch("mul", (gradient, gradient))
        return grads

    return attach(loss, record("loss", [x, weight], backward))


def _loss_chunk(x: Tensor, head: Tensor, d_x: Tensor | None, d_weight: Tensor | None, rows: int) -> None:
    """A chunk's logits, which become their own gradient in place, and what they add to both gradients."""
    tape, (vocab, width) = x.tape, head.shape
    part = Tensor((rows, width), x.dtype, x.storage)
    logits = product("logits", part, head, (rows, vocab), (1, rows, width, vocab))
    tape.launch("loss", (logits, logits))
    if d_x is not None and d_weight is not None:
        out = Tensor(part.shape, d_x.dtype, d_x.storage)
        tape.launch("logits.dx", (logits, head, out), 2 * rows * width * vocab, (1, rows, vocab, width))
        sizes = (1, vocab, rows, width)
        tape.launch("logits.dw", (logits, part, d_weight, d_weight), 2 * rows * width * vocab, sizes)
