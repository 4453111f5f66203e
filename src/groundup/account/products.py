"""Matrix products over symbolic tensors, and what they keep."""

from math import prod

from groundup.account.ops import attach, cast, keep, record, view, viewed
from groundup.account.tape import Shape, Tensor


def lowered(x: Tensor) -> Tensor:
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
    x, weight = lowered(x), lowered(view(weight, weight.shape))  # Wᵀ: a view, and so is its gradient
    kept = keep(name, [x, weight], x, weight)
    rows, d_in, d_out = prod(x.shape[:-1]), weight.shape[1], weight.shape[0]

    def backward(grad: Tensor) -> list[Tensor]:
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
    a, b = lowered(a), lowered(b)
    kept = keep(name, [a, b], a, b)
    batch, m, k = prod(a.shape[:-2]), a.shape[-2], a.shape[-1]
    n = b.shape[-2] if transposed else b.shape[-1]

    def backward(grad: Tensor) -> list[Tensor]:
        a, b = kept[0].get(), kept[1].get()
        for_b = product(f"{name}.db", grad, a, b.shape, (batch, k, m, n))
        return [product(f"{name}.da", grad, b, a.shape, (batch, m, n, k)), for_b]

    out = product(name, a, b, (*a.shape[:-1], n), (batch, m, k, n))
    out = attach(out, record(name, [a, b], backward))
    return view(out, out.shape, gradient_copied)
