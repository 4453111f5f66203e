"""The operations of the model over symbolic tensors: result, what autograd saves, what backward computes.

Each function stands for the torch operation of its name and mirrors torch's derivative formula (torch's
derivatives.yaml and FunctionsManual.cpp) down to its temporaries: C++ frees those at the end of the expression, so
the backward of a division holds four matrices at once. Where a formula looks wasteful here, torch is. Of two operands,
torch makes the gradient of the second one first.
"""

from collections.abc import Sequence

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
    shapes = [(*x.shape[:dim], size, *x.shape[dim + 1 :]) for size in sizes]

    def backward(*grads: Tensor) -> list[Tensor]:
        return [result("cat", x_shape, dtype, *grads)]

    x_shape, dtype = x.shape, x.dtype
    node = record("split", [x], backward, len(shapes))
    return [attach(viewed(x, shape), node, i) for i, shape in enumerate(shapes)]


def unbind_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Even and odd elements of the last dimension (d_head → 2 × d_head / 2)."""
    half = (*x.shape[:-1], x.shape[-1] // 2)

    def backward(even: Tensor, odd: Tensor) -> list[Tensor]:
        return [result("stack", x_shape, dtype, even, odd)]

    x_shape, dtype = x.shape, x.dtype
    node = record("unbind", [x], backward, 2)
    return attach(viewed(x, half), node, 0), attach(viewed(x, half), node, 1)


# Copies ---------------------------------------------------------------------------------------------------------


def clone(x: Tensor, shape: Shape | None = None) -> Tensor:
    """A contiguous copy (in another shape)."""

    def backward(grad: Tensor) -> list[Tensor]:
        return [viewed(grad, x_shape)]

    x_shape = x.shape
    return attach(result("copy", shape or x.shape, x.dtype, x), record("copy", [x], backward))


def cast(x: Tensor, dtype: DType, name: str = "cast") -> Tensor:
    """`x` in another type; itself when it has that type already."""
    if x.dtype == dtype:
        return x

    def backward(grad: Tensor) -> list[Tensor]:
        return [result(name, grad.shape, before, grad)]

    before = x.dtype
    return attach(result(name, x.shape, dtype, x), record(name, [x], backward))


def at_least_float32(x: Tensor) -> Tensor:
    return cast(x, "fp32") if x.dtype == "bf16" else x


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Matrices below one another; the gradients are row ranges of the whole gradient, views."""
    shape = (sum(p.shape[0] for p in parts), *parts[0].shape[1:])

    def backward(grad: Tensor) -> list[Tensor]:
        return [viewed(grad, s) for s in shapes]

    shapes = [p.shape for p in parts]
    return attach(result("cat", shape, parts[0].dtype, *parts), record("cat", parts, backward))


def stack_pairs(even: Tensor, odd: Tensor) -> Tensor:
    """The inverse of `unbind_pairs`, in new memory."""
    shape = (*even.shape[:-1], 2 * even.shape[-1])

    def backward(grad: Tensor) -> list[Tensor]:
        return [viewed(grad, half), viewed(grad, half)]

    half = even.shape
    return attach(result("stack", shape, even.dtype, even, odd), record("stack", [even, odd], backward))


def repeat_heads(x: Tensor, group: int) -> Tensor:
    """Each key or value head `group` times (repeat_interleave over dimension 1); backward sums the group."""
    batch, heads, seq, d_head = x.shape

    def backward(grad: Tensor) -> list[Tensor]:
        return [result("sum", (batch, heads, seq, d_head), grad.dtype, grad)]

    return attach(result("copy", (batch, heads * group, seq, d_head), x.dtype, x), record("repeat", [x], backward))


# Element-wise ---------------------------------------------------------------------------------------------------


def add(a: Tensor, b: Tensor) -> Tensor:
    def backward(grad: Tensor) -> list[Tensor]:
        return [grad, grad]

    out = result("add", broadcast(a.shape, b.shape), promoted(a, b), a, b)
    return attach(out, record("add", [a, b], backward))


def sub(a: Tensor, b: Tensor) -> Tensor:
    def backward(grad: Tensor) -> list[Tensor | None]:
        return [grad, result("neg", grad.shape, grad.dtype, grad) if negated else None]

    negated = b.requires_grad
    out = result("sub", broadcast(a.shape, b.shape), promoted(a, b), a, b)
    return attach(out, record("sub", [a, b], backward))


def scalar(name: str, x: Tensor) -> Tensor:
    """`x` plus a number ("add") or times one ("mul"): nothing is saved."""

    def backward(grad: Tensor) -> list[Tensor]:
        return [grad] if name == "add" else [result(name, grad.shape, grad.dtype, grad)]

    return attach(result(name, x.shape, x.dtype, x), record(name, [x], backward))


def mul(a: Tensor, b: Tensor) -> Tensor:
    """A factor is kept where the other factor needs a gradient."""
    tape = a.tape
    recorded = tape.records(a, b)
    kept_a = tape.save(a, "mul") if recorded and b.requires_grad else None
    kept_b = tape.save(b, "mul") if recorded and a.requires_grad else None

    def backward(grad: Tensor) -> list[Tensor | None]:
        for_b = _times(grad, kept_a.get()) if kept_a else None
        return [_times(grad, kept_b.get()) if kept_b else None, for_b]

    out = result("mul", broadcast(a.shape, b.shape), promoted(a, b), a, b)
    return attach(out, record("mul", [a, b], backward))


def _times(a: Tensor, b: Tensor) -> Tensor:
    return result("mul", broadcast(a.shape, b.shape), promoted(a, b), a, b)


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
        return [result("div", grad.shape, grad.dtype, grad, divisor), for_b]

    out = result("div", broadcast(a.shape, b.shape), promoted(a, b), a, b)
    return attach(out, record("div", [a, b], backward))


def _divisor_gradient(grad: Tensor, a: Tensor, b: Tensor) -> Tensor:
    once = result("div", grad.shape, grad.dtype, a, b)
    twice = result("div", grad.shape, grad.dtype, once, b)
    return _times(result("neg", grad.shape, grad.dtype, grad), twice)


def square(x: Tensor) -> Tensor:
    """Keeps x; backward is torch's general power: grad · (2 · x¹)."""
    kept = keep("square", [x], x)

    def backward(grad: Tensor) -> list[Tensor]:
        power = result("pow", grad.shape, grad.dtype, kept[0].get())
        doubled = result("mul", grad.shape, grad.dtype, power)
        return [_times(grad, doubled)]

    return attach(result("square", x.shape, x.dtype, x), record("square", [x], backward))


def exp(x: Tensor) -> Tensor:
    return _keeps_result("exp", x, lambda grad, y: _times(grad, y))


def sigmoid(x: Tensor) -> Tensor:
    return _keeps_result("sigmoid", x, lambda grad, y: result("sigmoid_backward", grad.shape, grad.dtype, grad, y))


def relu(x: Tensor) -> Tensor:
    return _keeps_result("relu", x, lambda grad, y: result("threshold_backward", grad.shape, grad.dtype, grad, y))


def soft_cap(x: Tensor) -> Tensor:
    """cap · tanh(x / cap)."""

    def backward(grad: Tensor, y: Tensor) -> Tensor:
        return result("tanh_backward", grad.shape, grad.dtype, grad, y)

    return scalar("mul", _keeps_result("tanh", scalar("div", x), backward))


def rsqrt(x: Tensor) -> Tensor:
    """backward: -½ · grad · y³."""

    def backward(grad: Tensor, y: Tensor) -> Tensor:
        half = result("mul", grad.shape, grad.dtype, grad)
        return _times(half, result("pow", y.shape, y.dtype, y))

    return _keeps_result("rsqrt", x, backward)


def _keeps_result(name: str, x: Tensor, formula) -> Tensor:
    out = result(name, x.shape, x.dtype, x)
    kept = keep(name, [x], out)
    return attach(out, record(name, [x], lambda grad: [formula(grad, kept[0].get())]))


def clamp_min(x: Tensor) -> Tensor:
    """Keeps x; backward lets the gradient through where x was above the bound."""
    kept = keep("clamp", [x], x)

    def backward(grad: Tensor) -> list[Tensor]:
        above = result("ge", grad.shape, "bool", kept[0].get())
        return [result("where", grad.shape, grad.dtype, above, grad)]

    return attach(result("clamp", x.shape, x.dtype, x), record("clamp", [x], backward))


def masked_fill(x: Tensor, mask: Tensor) -> Tensor:
    """Keeps the mask."""
    kept = keep("masked_fill", [x], mask)

    def backward(grad: Tensor) -> list[Tensor]:
        return [result("masked_fill", grad.shape, grad.dtype, grad, kept[0].get())]

    return attach(result("masked_fill", x.shape, x.dtype, x), record("masked_fill", [x], backward))


# Reductions -----------------------------------------------------------------------------------------------------


def amax(x: Tensor) -> Tensor:
    """Largest of the last dimension, kept as 1. Not differentiated (the model detaches it)."""
    return result("amax", (*x.shape[:-1], 1), x.dtype, x)


def sum_to(x: Tensor, shape: Shape) -> Tensor:
    """Sum over the dimensions that `shape` lacks or has as 1; the gradient is a view that repeats."""

    def backward(grad: Tensor) -> list[Tensor]:
        return [viewed(grad, x_shape)]

    x_shape = x.shape
    return attach(result("sum", shape, x.dtype, x), record("sum", [x], backward))


def mean_last(x: Tensor) -> Tensor:
    """Mean over the last dimension, kept as 1; the gradient is divided at full size."""

    def backward(grad: Tensor) -> list[Tensor]:
        return [result("div", x_shape, grad.dtype, grad)]

    x_shape = x.shape
    return attach(result("mean", (*x.shape[:-1], 1), x.dtype, x), record("mean", [x], backward))


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
        difference = result("sub", logits.shape, logits.dtype, logits, kept[1].get())
        weight = result("exp", logits.shape, logits.dtype, difference)
        return [_times(viewed(grad, (*grad.shape, 1)), weight)]

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
