"""The model, the loss and the optimizer once more, line for line, over symbolic tensors.

Read beside groundup.model: the same functions in the same order with the same local variables, because a local
variable keeps a tensor alive. tests/account holds the two together, byte for byte.
"""

from dataclasses import dataclass
from functools import partial

from groundup.account import ops, products
from groundup.account.params import parameter_shapes
from groundup.account.tape import DType, Kernel, Tape, Tensor
from groundup.config import ModelConfig


@dataclass
class Model:
    """Parameters and buffers of one model on the device."""

    config: ModelConfig
    attention: str
    checkpoint_every: int
    parameters: dict[str, Tensor]
    cos: Tensor
    sin: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name]

    def zero_grad(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def build(tape: Tape, config: ModelConfig, dtype: DType, attention: str, checkpoint_every: int) -> Model:
    """The model's memory after construction."""
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        parameters[name] = tape.empty(shape, dtype, name, "parameters")
        parameters[name].requires_grad = True
    angles = (config.context_length, config.d_head // 2)
    cos, sin = (tape.empty(angles, "fp32", f"rope.{name}", "buffers") for name in ("cos", "sin"))
    return Model(config, attention, checkpoint_every, parameters, cos, sin)


def forward(model: Model, ids: Tensor, targets: Tensor | None = None) -> Tensor:
    """Logits, or the loss when targets are given: TransformerLM.forward."""
    tape, seq = ids.tape, ids.shape[-1]
    mask = ops.result("tril", (seq, seq), "bool", ops.result("ones", (seq, seq), "bool", ids))
    cos, sin = (ops.viewed(t, (seq, t.shape[1])) for t in (model.cos, model.sin))
    with tape.inside("token_embeddings"):
        x = ops.embedding(model["token_embeddings.weight"], ids)
    layers, every = model.config.n_layers, model.checkpoint_every
    for first in range(0, layers, every or 1):
        piece = range(first, min(first + (every or 1), layers))
        run = partial(_blocks, model, piece, mask, cos, sin)
        x = tape.checkpoint(run, x) if every else run(x)
    with tape.inside("ln_final"):
        x = _rms_norm(x, model["ln_final.weight"])
    with tape.inside("lm_head"):
        tied = model.config.tie_embeddings
        logits = products.linear(x, model["token_embeddings.weight" if tied else "lm_head.weight"], "logits")
    if targets is None:
        return logits
    with tape.inside("loss"):
        return _cross_entropy(logits, targets)


def _blocks(model: Model, indices: range, mask: Tensor, cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
    for index in indices:
        with x.tape.inside(f"layers.{index}"):
            x = _block(model, f"layers.{index}", x, mask, cos, sin)
    return x


def _block(model: Model, name: str, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tape = x.tape
    with tape.inside("ln1"):
        normed = _rms_norm(x, model[f"{name}.ln1.weight"])
    with tape.inside("attn"):
        attended = _attention(model, f"{name}.attn", normed, mask, cos, sin)
    del normed
    x = ops.add(x, attended)
    del attended
    with tape.inside("ln2"):
        normed = _rms_norm(x, model[f"{name}.ln2.weight"])
    with tape.inside("ffn"):
        fed = _swiglu(model, f"{name}.ffn", normed)
    del normed
    return ops.add(x, fed)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = ops.at_least_float32(x)
    inverse_rms = ops.rsqrt(ops.scalar("add", ops.mean_last(ops.square(wide))))
    return ops.cast(ops.mul(ops.mul(wide, inverse_rms), weight), x.dtype)


def _swiglu(model: Model, name: str, x: Tensor) -> Tensor:
    w1, w2, w3 = (model[f"{name}.{part}.weight"] for part in ("w1", "w2", "w3"))
    hidden = ops.mul(_silu(products.linear(x, w1, "w1")), products.linear(x, w3, "w3"))
    return products.linear(hidden, w2, "w2")


def _silu(x: Tensor) -> Tensor:
    return ops.mul(x, ops.sigmoid(x))


def _attention(model: Model, name: str, x: Tensor, mask: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    config = model.config
    q, k, v = _project(model, name, x)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    if model.attention == "flash":
        # The kernel reads grouped heads as they are; it wants v in memory of its own.
        heads = products.flash(q, k, ops.clone(v))
        return products.linear(_joined(heads), model[f"{name}.output_proj.weight"], "output")
    v_in_place = config.n_kv_heads < config.n_heads or not _scattered(v)
    if config.n_kv_heads < config.n_heads:
        group = config.n_heads // config.n_kv_heads
        k, v = ops.repeat_heads(k, group), ops.repeat_heads(v, group)
    heads = _sdpa(q, k, v, mask, v_in_place)
    return products.linear(_joined(heads), model[f"{name}.output_proj.weight"], "output")


def _joined(heads: Tensor) -> Tensor:
    """(batch, heads, seq, d_head) → (batch, seq, d_model): a copy, unless there is one head."""
    batch, n_heads, seq, d_head = heads.shape
    shape = (batch, seq, n_heads * d_head)
    return ops.view(heads, shape) if n_heads == 1 or seq == 1 else ops.clone(heads, shape)


def _scattered(x: Tensor) -> bool:
    """Whether (batch, heads, seq, d_head), laid out (batch, seq, heads, d_head), is no view of (batch · heads, …)."""
    return x.shape[0] > 1 and x.shape[1] > 1


def _project(model: Model, name: str, x: Tensor) -> list[Tensor]:
    config = model.config
    batch, seq, _ = x.shape
    weight = ops.cat_rows([model[f"{name}.{part}_proj.weight"] for part in "qkv"])
    heads = config.n_heads + 2 * config.n_kv_heads
    joined = ops.view(products.linear(x, weight, "qkv"), (batch, heads, seq, config.d_head), gradient_copied=True)
    return ops.split(joined, [config.n_heads, config.n_kv_heads, config.n_kv_heads], 1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = ops.unbind_pairs(ops.at_least_float32(x))
    turned = ops.stack_pairs(
        ops.sub(ops.mul(even, cos), ops.mul(odd, sin)), ops.add(ops.mul(even, sin), ops.mul(odd, cos))
    )
    return ops.cast(turned, x.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, v_in_place: bool) -> Tensor:
    scores = products.bmm(ops.scalar("div", q), k, "scores", transposed=True)
    scores = ops.masked_fill(scores, ops.result("not", mask.shape, "bool", mask))
    weights = _softmax(scores)
    v = v if v_in_place else ops.clone(v)
    return products.bmm(weights, v, "values", transposed=False, gradient_copied=_scattered(q))


def _softmax(x: Tensor) -> Tensor:
    with x.tape.inside("softmax"):
        wide = ops.at_least_float32(x)
        top = ops.clamp_min(ops.amax(wide.detach()))
        weight = ops.exp(ops.sub(wide, top))
        return ops.cast(ops.div(weight, ops.clamp_min(ops.sum_last(weight))), x.dtype)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    wide = ops.at_least_float32(logits)
    valid = ops.result("ne", targets.shape, "bool", targets)
    chosen = ops.gather(wide, ops.result("clamp", targets.shape, "int64", targets))
    losses = ops.mul(ops.sub(ops.logsumexp(wide), chosen), valid)
    count = ops.clamp_min(ops.result("sum", (), "int64", valid))
    return ops.div(ops.sum_all(losses), count)


class AdamW:
    """groundup.optim.AdamW on a GPU, over parameter_groups(): matrices, then gains, one launch a line each."""

    PASSES = (("mul", 2), ("lerp", 3), ("mul", 2), ("addcmul", 3), ("sqrt", 2), ("div", 2), ("add", 2), ("addcdiv", 4))
    """Each line of adamw_update_many and how many tensors a parameter it reads and writes."""

    def __init__(self, model: Model):
        self.groups = [
            [p for p in model.parameters.values() if len(p.shape) >= 2],
            [p for p in model.parameters.values() if len(p.shape) < 2],
        ]
        self.state: list[Tensor] = []

    def step(self) -> None:
        """The state at the first step; then the update, with a root of the second moment as large as the weights."""
        first = not self.state
        for group in self.groups:
            tape = group[0].tape
            tape.scope = "optimizer"
            if first:
                for p in group:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state.append(tape.empty(p.shape, p.dtype, name, "optimizer"))
            nbytes = sum(p.nbytes for p in group)
            root = [tape.empty(p.shape, p.dtype, "root") for p in group]
            for name, passes in self.PASSES:
                tape.kernels.append(Kernel(f"foreach_{name}", tape.phase, tape.scope, passes * nbytes, even=True))
            del root
            tape.scope = ""
