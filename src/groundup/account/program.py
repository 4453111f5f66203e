"""The model, the loss and the optimizer once more, line for line, over symbolic tensors.

Read beside groundup.model: the same functions in the same order with the same local variables, because a local
variable keeps a tensor alive. tests/account holds the two together, byte for byte.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from groundup.account import fused, ops
from groundup.account.params import parameter_shapes
from groundup.account.tape import ITEMSIZE, Kernel, Tape, Tensor
from groundup.config import ModelConfig

if TYPE_CHECKING:
    from groundup.account.memory import Setting


@dataclass
class Model:
    """Parameters and buffers of one model on the device."""

    config: ModelConfig
    setting: "Setting"
    parameters: dict[str, Tensor]
    angles: list[Tensor]
    """cos and sin; empty without RoPE."""

    def __getitem__(self, name: str) -> Tensor:
        return self.parameters[name]

    def zero_grad(self) -> None:
        for p in self.parameters.values():
            p.grad = None


def build(tape: Tape, config: ModelConfig, setting: "Setting") -> Model:
    """The model's memory after construction."""
    parameters = {}
    for name, shape in parameter_shapes(config).items():
        parameters[name] = tape.empty(shape, setting.weights, name, "parameters")
        parameters[name].requires_grad = True
    table = (config.context_length, config.d_head // 2)
    names = ("cos", "sin") if config.position == "rope" else ()
    return Model(config, setting, parameters, [tape.empty(table, "fp32", f"rope.{name}", "buffers") for name in names])


def forward(model: Model, ids: Tensor, targets: Tensor | None = None) -> Tensor:
    """Logits, or the loss when targets are given: TransformerLM.forward."""
    tape, seq = ids.tape, ids.shape[-1]
    mask = None
    if model.setting.attention == "reference":
        mask = ops.result("tril", (seq, seq), "bool", ops.result("ones", (seq, seq), "bool", ids))
    with tape.inside("token_embeddings"):
        x = ops.embedding(model["token_embeddings.weight"], ids)
        x = ops.cast(x, "bf16") if tape.autocast else x
    rotation = [ops.viewed(t, (seq, t.shape[1])) for t in model.angles]
    layers, every = model.config.n_layers, model.setting.checkpoint_every
    for first in range(0, layers, every or 1):
        piece = range(first, min(first + (every or 1), layers))
        run = partial(_blocks, model, piece, mask, rotation)
        x = tape.checkpoint(run, x) if every else run(x)
    x = _norm(model, "ln_final", x) if model.config.norm == "pre" else x
    return _head(model, x, targets)


def _blocks(model: Model, indices: range, mask: Tensor | None, rotation: list[Tensor], x: Tensor) -> Tensor:
    block = _post_block if model.config.norm == "post" else _block
    for index in indices:
        with x.tape.inside(f"layers.{index}"):
            x = block(model, f"layers.{index}", x, mask, rotation)
    return x


def _block(model: Model, name: str, x: Tensor, mask: Tensor | None, rotation: list[Tensor]) -> Tensor:
    x = ops.add(x, _attention(model, f"{name}.attn", _norm(model, f"{name}.ln1", x), mask, rotation))
    return ops.add(x, _feed_forward(model, f"{name}.ffn", _norm(model, f"{name}.ln2", x)))


def _post_block(model: Model, name: str, x: Tensor, mask: Tensor | None, rotation: list[Tensor]) -> Tensor:
    x = _norm(model, f"{name}.ln1", ops.add(x, _attention(model, f"{name}.attn", x, mask, rotation)))
    return _norm(model, f"{name}.ln2", ops.add(x, _feed_forward(model, f"{name}.ffn", x)))


def _norm(model: Model, name: str, x: Tensor) -> Tensor:
    """RMSNorm, or nothing where the model has no such norm."""
    weight = model.parameters.get(f"{name}.weight")
    if weight is None:
        return x
    with x.tape.inside(name.rpartition(".")[2]):
        if model.setting.kernels == "triton":
            return fused.rms_norm(x, weight)
        wide = ops.at_least_float32(x)
        inverse_rms = ops.rsqrt(ops.scalar("add", ops.mean_last(ops.square(wide))))
        return ops.cast(ops.mul(ops.mul(wide, inverse_rms), weight), x.dtype)


def _linear(model: Model, x: Tensor, weight: Tensor, name: str) -> Tensor:
    return ops.linear(x, weight, name, wide=model.setting.kernels == "triton")


def _feed_forward(model: Model, name: str, x: Tensor) -> Tensor:
    with x.tape.inside("ffn"):
        return _linear(model, _hidden(model, name, x), model[f"{name}.w2.weight"], "w2")


def _hidden(model: Model, name: str, x: Tensor) -> Tensor:
    gated, w1 = model.config.gated, model[f"{name}.w1.weight"]
    if gated and model.setting.kernels == "triton" and x.tape.records(x, w1):
        return fused.swiglu(_linear(model, x, ops.cat_rows([w1, model[f"{name}.w3.weight"]]), "w13"))
    up = _linear(model, x, w1, "w1")
    if gated:
        return ops.mul(_silu(up), _linear(model, x, model[f"{name}.w3.weight"], "w3"))
    return _silu(up) if model.config.ffn == "silu" else ops.square(ops.relu(up))


def _silu(x: Tensor) -> Tensor:
    return ops.mul(x, ops.sigmoid(x))


def _attention(model: Model, name: str, x: Tensor, mask: Tensor | None, rotation: list[Tensor]) -> Tensor:
    with x.tape.inside("attn"):
        heads = _heads(model, name, x, mask, rotation)
        return _linear(model, heads, model[f"{name}.output_proj.weight"], "output")


def _heads(model: Model, name: str, x: Tensor, mask: Tensor | None, rotation: list[Tensor]) -> Tensor:
    config = model.config
    as_one = mask is None and model.setting.kernels == "triton" and not config.qk_norm
    if as_one and config.d_head * (2 if x.tape.autocast else ITEMSIZE[x.dtype]) % 16 == 0:
        qkv = _joined(model, name, x)
        qkv = ops.view(qkv, (*x.shape[:2], config.n_heads + 2 * config.n_kv_heads, config.d_head))
        return ops.view(fused.rotary_attention(qkv, config.n_heads, turned=bool(rotation)), x.shape)
    q, k, v = _project(model, name, x, joined=mask is not None or as_one)
    q, k = _norm(model, f"{name}.q_norm", q), _norm(model, f"{name}.k_norm", k)
    if rotation and model.setting.kernels == "triton":
        q, k = fused.rope(q, k)
    elif rotation:
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
    heads = fused.attention(q, k, v) if mask is None else _plain(config, q, k, v, mask, turned=bool(rotation))
    batch, n_heads, seq, d_head = heads.shape
    # The kernel's output lies as (batch, seq, heads, d_head); the plain one is copied, unless there is one head.
    shape = (batch, seq, n_heads * d_head)
    in_place = mask is None or n_heads == 1 or seq == 1
    return ops.view(heads, shape) if in_place else ops.clone(heads, shape)


def _plain(config: ModelConfig, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, turned: bool) -> Tensor:
    """`turned`: RoPE has put q and k into memory of their own, in the order of the product."""
    grouped = config.n_kv_heads < config.n_heads
    if grouped:
        group = config.n_heads // config.n_kv_heads
        k, v = ops.repeat_heads(k, group), ops.repeat_heads(v, group)
    scattered = _scattered(q)
    scaled = ops.scalar("div", q)
    copied = scattered and not turned
    in_order = ops.clone(scaled) if copied else scaled, ops.clone(k) if copied and not grouped else k
    scores = ops.bmm(*in_order, "scores", transposed=True)
    del scaled, in_order
    scores = ops.soft_cap(scores) if config.attention_softcap else scores
    scores = ops.masked_fill(scores, ops.result("not", mask.shape, "bool", mask))
    weights = _softmax(scores)
    v = ops.clone(v) if scattered and not grouped else v
    return ops.bmm(weights, v, "values", transposed=False, gradient_copied=scattered)


def _scattered(x: Tensor) -> bool:
    """Whether (batch, heads, seq, d_head), laid out (batch, seq, heads, d_head), is no view of (batch · heads, …)."""
    return x.shape[0] > 1 and x.shape[1] > 1


def _project(model: Model, name: str, x: Tensor, joined: bool) -> list[Tensor]:
    config = model.config
    batch, seq, _ = x.shape
    sizes = [config.n_heads, config.n_kv_heads, config.n_kv_heads]
    weights = [model[f"{name}.{part}_proj.weight"] for part in "qkv"]
    if not joined:
        out = [_linear(model, x, weight, part) for weight, part in zip(weights, "qkv", strict=True)]
        return [ops.view(t, (batch, n, seq, config.d_head)) for t, n in zip(out, sizes, strict=True)]
    together = _joined(model, name, x)
    return ops.split(ops.view(together, (batch, sum(sizes), seq, config.d_head), gradient_copied=True), sizes, 1)


def _joined(model: Model, name: str, x: Tensor) -> Tensor:
    """q, k and v from one product: (batch, seq, all heads · d_head)."""
    return _linear(model, x, ops.cat_rows([model[f"{name}.{part}_proj.weight"] for part in "qkv"]), "qkv")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = ops.unbind_pairs(ops.at_least_float32(x))
    turned = ops.stack_pairs(
        ops.sub(ops.mul(even, cos), ops.mul(odd, sin)), ops.add(ops.mul(even, sin), ops.mul(odd, cos))
    )
    return ops.cast(turned, x.dtype)


def _softmax(x: Tensor) -> Tensor:
    with x.tape.inside("softmax"):
        wide = ops.at_least_float32(x)
        top = ops.clamp_min(ops.amax(wide.detach()))
        weight = ops.exp(ops.sub(wide, top))
        return ops.cast(ops.div(weight, ops.clamp_min(ops.sum_to(weight, (*weight.shape[:-1], 1)))), x.dtype)


def _head(model: Model, x: Tensor, targets: Tensor | None) -> Tensor:
    config = model.config
    weight = model["token_embeddings.weight" if config.tie_embeddings else "lm_head.weight"]
    if targets is not None and model.setting.kernels != "reference":
        with x.tape.inside("loss"):
            return fused.linear_cross_entropy(x, weight)
    with x.tape.inside("lm_head"):
        logits = ops.linear(x, weight, "logits")
        if config.logit_softcap:
            logits = ops.soft_cap(ops.at_least_float32(logits))
    if targets is None:
        return logits
    with x.tape.inside("loss"):
        return _cross_entropy(logits, targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    wide = ops.at_least_float32(logits)
    valid = ops.result("ne", targets.shape, "bool", targets)
    chosen = ops.gather(wide, ops.result("clamp", targets.shape, "int64", targets))
    losses = ops.mul(ops.sub(ops.logsumexp(wide), chosen), valid)
    count = ops.clamp_min(ops.result("sum", (), "int64", valid))
    return ops.div(ops.sum_to(losses, ()), count)


class AdamW:
    """groundup.optim.AdamW over parameter_groups(): matrices, then gains."""

    PASSES = (("mul", 2), ("lerp", 3), ("mul", 2), ("addcmul", 3), ("sqrt", 2), ("div", 2), ("add", 2), ("addcdiv", 4))
    """Each line of adamw_update and how many tensors a parameter it reads and writes."""
    KERNEL_PASSES = 7
    """Weight, gradient and two moments in; weight and moments out."""

    def __init__(self, model: Model):
        self.form = model.setting.optimizer
        self.groups = [
            [p for p in model.parameters.values() if len(p.shape) >= 2],
            [p for p in model.parameters.values() if len(p.shape) < 2],
        ]
        self.state: list[Tensor] = []

    def step(self) -> None:
        """The state at the first step; then the update, without the kernel with a root of the second moment."""
        first = not self.state
        for group in filter(None, self.groups):
            tape = group[0].tape
            tape.scope = "optimizer"
            if first:
                for p in group:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state.append(tape.empty(p.shape, p.dtype, name, "optimizer"))
            for params in [[p] for p in group] if self.form == "tensors" else [group]:
                self._update(tape, params)
            tape.scope = ""

    def _update(self, tape: Tape, params: list[Tensor]) -> None:
        nbytes = sum(p.nbytes for p in params)
        lines = (("adamw", self.KERNEL_PASSES),) if self.form == "kernel" else self.PASSES
        root = [] if self.form == "kernel" else [tape.empty(p.shape, p.dtype, "root") for p in params]
        for name, passes in lines:
            tape.kernels.append(Kernel(f"foreach_{name}", tape.phase, tape.scope, passes * nbytes, even=True))
        del root
