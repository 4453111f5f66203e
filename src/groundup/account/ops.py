"""The operations of the model over symbolic tensors: result, what autograd saves, what backward computes.

Each function stands for the torch operation of its name and mirrors torch's derivative formula (torch's
derivatives.yaml and FunctionsManual.cpp) down to its temporaries: C++ frees those at the end of the expression, so
the backward of a division holds four matrices at once. Where a formula looks wasteful here, torch is. Of two operands,
torch makes the gradient of the second one first. A backward function holds shapes and what was kept, never an input:
that would keep its memory alive.
"""

from collections.abc import Callable, Sequence
from math import prod

from groundup.account.tape import Backward, DType, Node, Saved, Shape, Tensor


def result(name: str, shape: Shape, dtype: DType, *inputs: Tensor) -> Tensor:
    """A new tensor, written by one kernel that reads the inputs."""
    out = inputs[0].tape.empty(shape, dtype, name)
    out.tape.launch(name, (*inputs, out))
    return out


def attach(out: Tensor, node: Node | None, slot: int = 0) -> Tensor:
    if node is not None:
        out.node, out.slot, out.requires_grad = node, slot, True
    return out


def record(name: str, inputs: Sequence[Tensor], backward: Backward, outputs: int = 1) -> Node | None:
    """A node when gradients are wanted."""
    return Node(name, inputs, outputs, backward) if inputs[0].tape.records(*inputs) else None


def keep(name: str, inputs: Sequence[Tensor], *tensors: Tensor) -> list[Saved]:
    """The tensors, kept for backward where gradients are wanted; else nothing."""
    tape = inputs[0].tape
    return [tape.save(t, name) for t in tensors] if tape.records(*inputs) else []


def like(grad: Tensor, name: str, *inputs: Tensor) -> Tensor:
    """A new tensor in shape and type of `grad`, written by one kernel that reads the inputs."""
    return result(name, grad.shape, grad.dtype, *inputs)


def elementwise(name: str, a: Tensor, b: Tensor) -> Tensor:
    """A new tensor from two of shapes that go together, without a history."""
    return result(name, broadcast(a.shape, b.shape), promoted(a, b), a, b)


def unary(name: str, x: Tensor, gradient: Callable[[Tensor], Tensor], shape: Shape | None = None) -> Tensor:
    """One kernel over `x` (the result in another shape); `gradient` takes the result's to that of `x`."""
    out = result(name, x.shape if shape is None else shape, x.dtype, x)
    return attach(out, record(name, [x], lambda grad: [gradient(grad)]))


def promoted(a: Tensor, b: Tensor) -> DType:
    """torch's type promotion among the types used here."""
    for dtype in ("fp32", "bf16", "int64"):
        if dtype in (a.dtype, b.dtype):
            return dtype
    return "bool"


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of an element-wise result (equal ranks, or one shape a suffix of the other)."""
    a, b = (1,) * (len(b) - len(a)) + a, (1,) * (len(a) - len(b)) + b
    return tuple(max(x, y) for x, y in zip(a, b, strict=True))


# Views ----------------------------------------------------------------------------------------------------------


def view(x: Tensor, shape: Shape, gradient_copied: bool = False) -> Tensor:
    """The same memory in another shape. `gradient_copied`: the gradient arrives in an order that must be copied."""

    def backward(grad: Tensor) -> list[Tensor]:
        return [result("copy", x_shape, grad.dtype, grad)] if gradient_copied else [viewed(grad, x_shape)]

    x_shape = x.shape
    return attach(viewed(x, shape), record("view", [x], backward))


def viewed(x: Tensor, shape: Shape) -> Tensor:
    """A view without a history; over a larger shape it repeats its elements."""
    out = Tensor(shape, x.dtype, x.storage)
    out.view = True
    return out


def split(x: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Pieces along a dimension; backward concatenates their gradients into new memory."""
    return _parts("split", "cat", x, [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes])


def unbind_pairs(x: Tensor) -> list[Tensor]:
    """Even and odd elements of the last dimension (d_head → 2 × d_head / 2)."""
    return _parts("unbind", "stack", x, [(*x.shape[:-1], x.shape[-1] // 2)] * 2)


def _parts(name: str, inverse: str, x: Tensor, shapes: list[Shape]) -> list[Tensor]:
    x_shape, dtype = x.shape, x.dtype
    node = record(name, [x], lambda *grads: [result(inverse, x_shape, dtype, *grads)], len(shapes))
    return [attach(viewed(x, shape), node, i) for i, shape in enumerate(shapes)]


# Copies ---------------------------------------------------------------------------------------------------------


def clone(x: Tensor, shape: Shape | None = None) -> Tensor:
    """A contiguous copy (in another shape)."""
    x_shape = x.shape
    return unary("copy", x, lambda grad: viewed(grad, x_shape), shape)


def cast(x: Tensor, dtype: DType, name: str = "cast") -> Tensor:
    """`x` in another type; itself when it has that type already."""
    if x.dtype == dtype:
        return x
    before = x.dtype
    node = record(name, [x], lambda grad: [result(name, grad.shape, before, grad)])
    return attach(result(name, x.shape, dtype, x), node)


def at_least_float32(x: Tensor) -> Tensor:
    return cast(x, "fp32") if x.dtype == "bf16" else x


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Matrices below one another; the gradients are row ranges of the whole gradient, views."""
    shapes = [p.shape for p in parts]
    out = result("cat", (sum(shape[0] for shape in shapes), *shapes[0][1:]), parts[0].dtype, *parts)
    return attach(out, record("cat", parts, lambda grad: [viewed(grad, shape) for shape in shapes]))


def stack_pairs(even: Tensor, odd: Tensor) -> Tensor:
    """The inverse of `unbind_pairs`, in new memory."""
    half = even.shape
    out = result("stack", (*half[:-1], 2 * half[-1]), even.dtype, even, odd)
    return attach(out, record("stack", [even, odd], lambda grad: [viewed(grad, half), viewed(grad, half)]))


def repeat_heads(x: Tensor, group: int) -> Tensor:
    """Each key or value head `group` times (repeat_interleave over dimension 1); backward sums the group."""
    x_shape = batch, heads, seq, d_head = x.shape
    node = record("repeat", [x], lambda grad: [result("sum", x_shape, grad.dtype, grad)])
    return attach(result("copy", (batch, heads * group, seq, d_head), x.dtype, x), node)


# Element-wise ---------------------------------------------------------------------------------------------------


def add(a: Tensor, b: Tensor) -> Tensor:
    return attach(elementwise("add", a, b), record("add", [a, b], lambda grad: [grad, grad]))


def sub(a: Tensor, b: Tensor) -> Tensor:
    negated = b.requires_grad
    node = record("sub", [a, b], lambda grad: [grad, like(grad, "neg", grad) if negated else None])
    return attach(elementwise("sub", a, b), node)


def scalar(name: str, x: Tensor) -> Tensor:
    """`x` plus a number ("add") or times one ("mul"): nothing is saved."""
    return unary(name, x, lambda grad: grad if name == "add" else like(grad, name, grad))


def mul(a: Tensor, b: Tensor) -> Tensor:
    """A factor is kept where the other factor needs a gradient."""
    tape = a.tape
    recorded = tape.records(a, b)
    kept_a = tape.save(a, "mul") if recorded and b.requires_grad else None
    kept_b = tape.save(b, "mul") if recorded and a.requires_grad else None

    def backward(grad: Tensor) -> list[Tensor | None]:
        for_b = elementwise("mul", grad, kept_a.get()) if kept_a else None
        return [elementwise("mul", grad, kept_b.get()) if kept_b else None, for_b]

    return attach(elementwise("mul", a, b), record("mul", [a, b], backward))


def div(a: Tensor, b: Tensor) -> Tensor:
    """Both are kept; the divisor's gradient, -grad · (a / b) / b, comes first and makes four full-size tensors."""
    tape = a.tape
    recorded = tape.records(a, b)
    kept_b = tape.save(b, "div") if recorded else None
    kept_a = tape.save(a, "div") if recorded and b.requires_grad else None

    def backward(grad: Tensor) -> list[Tensor | None]:
        assert kept_b is not None
        divisor = kept_b.get()
        for_b = _divisor_gradient(grad, kept_a.get(), divisor) if kept_a else None
        return [like(grad, "div", grad, divisor), for_b]

    return attach(elementwise("div", a, b), record("div", [a, b], backward))


def _divisor_gradient(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    once = like(grad, "div", a, b)
    twice = like(grad, "div", once, b)
    return elementwise("mul", like(grad, "neg", grad), twice)


def square(x: Tensor) -> Tensor:
    """Keeps x; backward is torch's general power: grad · (2 · x¹)."""
    kept = keep("square", [x], x)

    def gradient(grad: Tensor) -> Tensor:
        power = like(grad, "pow", kept[0].get())
        doubled = like(grad, "mul", power)
        return elementwise("mul", grad, doubled)

    return unary("square", x, gradient)


def exp(x: Tensor) -> Tensor:
    return _keeps_result("exp", x, lambda grad, y: elementwise("mul", grad, y))


def sigmoid(x: Tensor) -> Tensor:
    return _keeps_result("sigmoid", x, lambda grad, y: like(grad, "sigmoid_backward", grad, y))


def relu(x: Tensor) -> Tensor:
    return _keeps_result("relu", x, lambda grad, y: like(grad, "threshold_backward", grad, y))


def soft_cap(x: Tensor) -> Tensor:
    """cap · tanh(x / cap)."""
    bent = _keeps_result("tanh", scalar("div", x), lambda grad, y: like(grad, "tanh_backward", grad, y))
    return scalar("mul", bent)


def rsqrt(x: Tensor) -> Tensor:
    """backward: -½ · grad · y³."""

    def gradient(grad: Tensor, y: Tensor) -> Tensor:
        half = like(grad, "mul", grad)
        return elementwise("mul", half, like(y, "pow", y))

    return _keeps_result("rsqrt", x, gradient)


def _keeps_result(name: str, x: Tensor, gradient: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    out = result(name, x.shape, x.dtype, x)
    kept = keep(name, [x], out)
    return attach(out, record(name, [x], lambda grad: [gradient(grad, kept[0].get())]))


def clamp_min(x: Tensor) -> Tensor:
    """Keeps x; backward lets the gradient through where x was above the bound."""
    kept = keep("clamp", [x], x)
    return unary("clamp", x, lambda grad: like(grad, "where", result("ge", grad.shape, "bool", kept[0].get()), grad))


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """Keeps the mask."""
    kept = keep("masked_fill", [x], mask)
    return unary("masked_fill", x, lambda grad: like(grad, "masked_fill", grad, kept[0].get()))


# Reductions -----------------------------------------------------------------------------------------------------


def amax(x: Tensor) -> Tensor:
    """Largest of the last dimension, kept as 1. Not differentiated (the model detaches it)."""
    return result("amax", (*x.shape[:-1], 1), x.dtype, x)


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Sum over the dimensions that `shape` lacks or has as 1; the gradient is a view that repeats."""
    x_shape = x.shape
    return unary("sum", x, lambda grad: viewed(grad, x_shape), shape)


def mean_last(x: Tensor) -> Tensor:
    """Mean over the last dimension, kept as 1; the gradient is divided at full size."""
    x_shape = x.shape
    return unary("mean", x, lambda grad: result("div", x_shape, grad.dtype, grad), (*x.shape[:-1], 1))


def logsumexp(x: Tensor) -> Tensor:
    """log Σ exp over the last dimension; keeps x and the result, with full-size temporaries both ways."""
    kept = keep("logsumexp", [x], x)
    top = amax(x)
    shifted = result("sub", x.shape, x.dtype, x, top)
    x.tape.launch("exp", (shifted, shifted))  # in place
    out = result("sum", x.shape[:-1], x.dtype, shifted)
    del shifted
    kept += keep("logsumexp", [x], out)

    def backward(grad: Tensor) -> list[Tensor]:
        logits = kept[0].get()
        difference = like(logits, "sub", logits, kept[1].get())
        weight = like(logits, "exp", difference)
        return [elementwise("mul", viewed(grad, (*grad.shape, 1)), weight)]

    return attach(out, record("logsumexp", [x], backward))


# Gathers --------------------------------------------------------------------------------------------------------


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table; keeps the ids; the gradient is a zero table that rows are added to."""
    tape = weight.tape
    kept = keep("index", [weight], ids)

    def backward(grad: Tensor) -> list[Tensor]:
        table = result("zeros", shape, grad.dtype, kept[0].get())
        tape.launch("index_put", (grad, grad, grad))
        return [table]

    shape = weight.shape
    out = tape.empty((*ids.shape, shape[-1]), weight.dtype, "index")
    tape.launch("index", (out, out, ids))
    return attach(out, record("index", [weight], backward))


def gather(x: Tensor, index: Tensor) -> Tensor:
    """One element of the last dimension by index; keeps x (for its shape) and the index."""
    tape = x.tape
    kept = keep("gather", [x], x, index)

    def backward(grad: Tensor) -> list[Tensor]:
        like = kept[0].get()
        out = tape.empty(like.shape, grad.dtype, "gather_backward")
        tape.launch("zeros", (out,))
        tape.launch("scatter_add", (grad, kept[1].get()))
        return [out]

    out = tape.empty(index.shape, x.dtype, "gather")
    tape.launch("gather", (index, out, out))
    return attach(out, record("gather", [x], backward))


# Matrix products ------------------------------------------------------------------------------------------------


def lowered(x: Tensor) -> Tensor:
    """A matrix product's operand under autocast."""
    return cast(x, "bf16", "autocast") if x.tape.autocast else x


def product(
    name: str, a: Tensor, b: Tensor, shape: Shape, sizes: tuple[int, int, int, int], dtype: DType | None = None
) -> Tensor:
    """A kernel that multiplies `batch` pairs of (m, k) and (k, n) matrices; `dtype`: of the result, if not theirs."""
    tape = a.tape
    tape.reserve_workspace()
    out = tape.empty(shape, dtype or a.dtype, name)
    tape.launch(name, (a, b, out), 2 * prod(sizes), sizes)
    return out


def linear(x: Tensor, weight: Tensor, name: str = "linear", wide: bool = False) -> Tensor:
    """x Wᵀ over the last dimension; keeps x and W as multiplied (under autocast: their bf16 copies).

    `wide`: the product makes W's gradient in W's own type, as kernels.linear; else autocast's in bf16 is cast.
    """
    x = lowered(x)
    source, kind = weight, weight.dtype if wide else None
    if wide and weight.tape.autocast:
        weight = result("cast", weight.shape, x.dtype, weight)
    else:
        weight = lowered(view(weight, weight.shape))  # Wᵀ: a view, and so is its gradient
        source = weight
    kept = keep(name, [x, source], x, weight)
    rows, d_in, d_out = prod(x.shape[:-1]), weight.shape[1], weight.shape[0]

    def backward(grad: Tensor) -> list[Tensor]:
        x, weight = kept[0].get(), kept[1].get()
        for_weight = product(f"{name}.dw", grad, x, weight.shape, (1, d_out, rows, d_in), kind)
        for_x = product(f"{name}.dx", grad, weight, x.shape, (1, rows, d_out, d_in))
        return [viewed(for_x, x.shape), for_weight]

    out = product(name, x, weight, (*x.shape[:-1], d_out), (1, rows, d_in, d_out))
    return attach(out, record(name, [x, source], backward))


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
