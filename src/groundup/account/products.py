"""Matrix products and attention over symbolic tensors: the operations that multiply, and what they keep."""

from math import prod

from groundup.account.ops import attach, cast, record, result, view, viewed
from groundup.account.tape import Shape, Tensor


def _lowered(x: Tensor) -> Tensor:
    """A matrix product's operand under autocast."""
    return cast(x, "bf16", "autocast") if x.tape.autocast else x


def product(name: str, a: Tensor, b: Tensor, shape: Shape, sizes: tuple[int, int, int, int]) -> Tensor:
    """A kernel that multiplies `batch` pairs of (m, k) and (k, n) matrices."""
    tape = a.tape
    tape.reserve_workspace()
    out = tape.empty(shape, a.dtype, name)
    tape.launch(name, (a, b, out), 2 * prod(sizes), sizes)
    return out


def linear(x: Tensor, weight: Tensor, name: str = "linear") -> Tensor:
    """x Wᵀ over the last dimension; keeps x and W as multiplied (under autocast: their bf16 copies)."""
    x, weight = _lowered(x), _lowered(view(weight, weight.shape))  # Wᵀ: a view, and so is its gradient
    tape = x.tape
    recorded = tape.records(x, weight)
    kept = (tape.save(x, name), tape.save(weight, name)) if recorded else None
    rows, d_in, d_out = prod(x.shape[:-1]), weight.shape[1], weight.shape[0]

    def backward(grad: Tensor) -> list[Tensor]:
        assert kept is not None
        x, weight = kept[0].get(), kept[1].get()
        for_weight = product(f"{name}.dw", grad, x, weight.shape, (1, d_out, rows, d_in))
        for_x = product(f"{name}.dx", grad, weight, x.shape, (1, rows, d_out, d_in))
        return [viewed(for_x, x.shape), for_weight]

    out = product(name, x, weight, (*x.shape[:-1], d_out), (1, rows, d_in, d_out))
    return attach(out, record(name, [x, weight], backward))


def bmm(a: Tensor, b: Tensor, name: str, transposed: bool, gradient_copied: bool = False) -> Tensor:
    """a b (or a bᵀ where `transposed`) for (batch, heads, rows, columns); keeps both.

    `gradient_copied`: the gradient arrives in an order that must be copied first.
    """
    a, b = _lowered(a), _lowered(b)
    tape = a.tape
    kept = (tape.save(a, name), tape.save(b, name)) if tape.records(a, b) else None
    batch, m, k = prod(a.shape[:-2]), a.shape[-2], a.shape[-1]
    n = b.shape[-2] if transposed else b.shape[-1]

    def backward(grad: Tensor) -> list[Tensor]:
        assert kept is not None
        a, b = kept[0].get(), kept[1].get()
        for_b = product(f"{name}.db", grad, a, b.shape, (batch, k, m, n))
        return [product(f"{name}.da", grad, b, a.shape, (batch, m, n, k)), for_b]

    out = product(name, a, b, (*a.shape[:-1], n), (batch, m, k, n))
    out = attach(out, record(name, [a, b], backward))
    return view(out, out.shape, gradient_copied)


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal FlashAttention-2 (Dao 2023): keeps q, k, v, the output and a float32 logsumexp a row, no scores.

    It skips the key blocks after a query block, so half of the N² products are executed; backward executes five
    products where forward executes two, since it makes the scores again. k and v may have fewer heads than q.
    """
    tape = q.tape
    batch, heads, seq, d_head = q.shape
    sizes = (batch * heads, seq, d_head, seq)
    out = tape.empty(q.shape, q.dtype, "flash")
    logsumexp = tape.empty(q.shape[:-1], "fp32", "logsumexp")
    tape.launch("flash", (q, k, v, out, logsumexp), 2 * prod(sizes), sizes)
    kept = [tape.save(t, "flash") for t in (q, k, v, out, logsumexp)] if tape.records(q, k, v) else []

    def backward(grad: Tensor) -> list[Tensor]:
        grad = result("copy", grad.shape, grad.dtype, grad)
        q, k, v, out, logsumexp = (t.get() for t in kept)
        delta = result("rowsum", logsumexp.shape, "fp32", grad, out)
        grads = [tape.empty(t.shape, t.dtype, f"flash.d{name}") for name, t in zip("qkv", (q, k, v), strict=True)]
        tape.launch("flash_backward", (q, k, v, grad, logsumexp, delta, *grads), 5 * prod(sizes), sizes)
        return grads

    return attach(out, record("flash", [q, k, v], backward))
