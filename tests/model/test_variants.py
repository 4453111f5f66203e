"""Every variant against an independent forward pass, and every way of computing it against the plain one."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_transformer import SMALL, turn
from torch._dynamo.testing import CompileCounter

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.model import IGNORE, TransformerLM

CHANGES: list[dict[str, Any]] = [
    {"norm": "post"},
    {"norm": "none"},
    {"position": "nope"},
    {"ffn": "silu"},
    {"ffn": "relu2"},
    {"qk_norm": True},
    {"attention_softcap": 2.0},
    {"logit_softcap": 3.0},
    {"qk_norm": True, "tie_embeddings": True, "n_kv_heads": 2, "attention_softcap": 1.5, "logit_softcap": 2.0},
    {"norm": "post", "position": "nope", "ffn": "relu2", "tie_embeddings": True, "logit_softcap": 5.0},
]


def name_of(changes: dict[str, Any]) -> str:
    return "-".join(f"{key}={value}" for key, value in changes.items())


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(3))


def make(dtype: torch.dtype = torch.float64, **changes: Any) -> TransformerLM:
    """A model whose gains are not 1, so that a missing one shows."""
    model = TransformerLM(replace(SMALL, **changes)).to(dtype)
    for p in model.parameters():
        p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(dtype)
    return model


def attention(x: torch.Tensor, w: dict[str, torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Head by head, query by query."""
    groups, d = config.n_heads // config.n_kv_heads, config.d_head
    out = torch.zeros_like(x)
    for head in range(config.n_heads):
        own, shared = slice(head * d, head * d + d), slice(head // groups * d, head // groups * d + d)
        q, k, v = x @ w["q_proj"][own].T, x @ w["k_proj"][shared].T, x @ w["v_proj"][shared].T
        if config.qk_norm:
            q, k = (F.rms_norm(t, (d,), w[f"{n}_norm"], config.norm_eps) for t, n in ((q, "q"), (k, "k")))
        if config.position == "rope":
            q, k = turn(q, config.rope_theta), turn(k, config.rope_theta)
        rows = []
        for i in range(x.shape[1]):
            scores = torch.einsum("bd,bjd->bj", q[:, i], k[:, : i + 1]) / d**0.5
            if config.attention_softcap:
                scores = config.attention_softcap * torch.tanh(scores / config.attention_softcap)
            rows.append(torch.einsum("bj,bjd->bd", scores.softmax(-1), v[:, : i + 1]))
        out = out + torch.stack(rows, 1) @ w["output_proj"][:, own].T
    return out


def feed_forward(x: torch.Tensor, w: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    up = x @ w["w1"].T
    hidden = {"swiglu": F.silu, "silu": F.silu, "relu2": lambda x: F.relu(x) ** 2}[kind](up)
    return (hidden * (x @ w["w3"].T) if kind == "swiglu" else hidden) @ w["w2"].T


def expected_logits(state: dict[str, torch.Tensor], config: ModelConfig, ids: torch.Tensor) -> torch.Tensor:
    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (config.d_model,), state[f"{name}.weight"], config.norm_eps)

    def part(prefix: str) -> dict[str, torch.Tensor]:
        return {k[len(prefix) + 1 : -7]: v for k, v in state.items() if k.startswith(prefix + ".")}

    x = F.embedding(ids, state["token_embeddings.weight"])
    for i in range(config.n_layers):
        attend, feed = part(f"layers.{i}.attn"), part(f"layers.{i}.ffn")
        if config.norm == "pre":
            x = x + attention(normed(x, f"layers.{i}.ln1"), attend, config)
            x = x + feed_forward(normed(x, f"layers.{i}.ln2"), feed, config.ffn)
        elif config.norm == "post":
            x = normed(x + attention(x, attend, config), f"layers.{i}.ln1")
            x = normed(x + feed_forward(x, feed, config.ffn), f"layers.{i}.ln2")
        else:
            x = x + attention(x, attend, config)
            x = x + feed_forward(x, feed, config.ffn)
    if config.norm == "pre":
        x = normed(x, "ln_final")
    logits = x @ state.get("lm_head.weight", state["token_embeddings.weight"]).T
    return config.logit_softcap * torch.tanh(logits / config.logit_softcap) if config.logit_softcap else logits


@pytest.mark.parametrize("changes", CHANGES, ids=name_of)
def test_logits_and_gradients_equal_an_independent_forward(changes: dict[str, Any], ids: torch.Tensor):
    model = make(**changes)
    state = {k: v.detach().clone().requires_grad_() for k, v in model.state_dict().items()}
    expected = expected_logits(state, model.config, ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)  # the angles are float32
    targets = ids.roll(-1, 1)
    model(ids, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, state[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_shapes_and_names_of_the_variants():
    def names(**changes: Any) -> set[str]:
        return set(TransformerLM(replace(SMALL, n_layers=1, **changes)).state_dict())

    plain = names()
    assert names(norm="post") == plain - {"ln_final.weight"}
    assert names(norm="none") == plain - {"ln_final.weight", "layers.0.ln1.weight", "layers.0.ln2.weight"}
    assert names(ffn="relu2") == names(ffn="silu") == plain - {"layers.0.ffn.w3.weight"}
    assert names(qk_norm=True) == plain | {"layers.0.attn.q_norm.weight", "layers.0.attn.k_norm.weight"}
    assert names(position="nope", attention_softcap=1, logit_softcap=1, checkpoint_activations=1) == plain
    assert replace(SMALL, ffn="relu2").resolve().d_ff == replace(SMALL, ffn="silu").resolve().d_ff == 4 * 32
    assert replace(SMALL, n_heads=32, position="nope").resolve().d_head == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm": "prenorm"}, 'model.norm cannot be "prenorm"'),
        ({"ffn": "gelu"}, 'model.ffn cannot be "gelu"'),
        ({"attention": "flash"}, 'model.attention cannot be "flash"'),
        ({"kernels": "torch"}, 'model.kernels cannot be "torch"'),
        ({"logit_softcap": -1.0}, "model.logit_softcap is -1.0"),
        ({"checkpoint_activations": -1}, "model.checkpoint_activations is -1"),
        ({"attention": "sdpa", "attention_softcap": 5.0}, "knows no softcap"),
    ],
)
def test_configurations_that_cannot_be(changes: dict[str, Any], says: str):
    with pytest.raises(UserError, match=says):
        replace(SMALL, **changes).resolve()


# How it is computed


def loss_and_gradients(model: TransformerLM, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    targets = ids.roll(-1, 1)
    targets[0, :5] = IGNORE
    loss = model(ids, targets, n_valid=torch.tensor(40))
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


VARIANTS = [{}, {"n_kv_heads": 2, "qk_norm": True, "tie_embeddings": True, "logit_softcap": 3.0}]


@pytest.mark.parametrize("how", ["flash-torch", "sdpa", "loss", "checkpoint 1", "checkpoint 2", "checkpoint 5"])
@pytest.mark.parametrize("changes", VARIANTS, ids=name_of)
def test_other_ways_give_the_plain_loss_and_gradients(changes: dict[str, Any], how: str, ids: torch.Tensor):
    kind, _, every = how.partition(" ")
    fields = {"checkpoint": {"checkpoint_activations": int(every or 0)}, "loss": {"kernels": "loss"}}
    model = make(**changes, **fields.get(kind, {"attention": kind}))
    loss, gradients = loss_and_gradients(model, ids)
    expected, plain = loss_and_gradients(make(**changes), ids)
    exact = kind == "checkpoint"
    torch.testing.assert_close(loss, expected, rtol=0 if exact else 1e-6, atol=0)
    torch.testing.assert_close(gradients, plain, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-8)


def test_no_mask_where_a_fused_path_runs(ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    def none(*_: Any) -> None:
        raise AssertionError("a (seq, seq) mask was built")

    monkeypatch.setattr("groundup.model.transformer.causal_mask", none)
    make(attention="sdpa")(ids)
    make(attention="flash-torch")(ids)
    with pytest.raises(AssertionError):
        make()(ids)


def test_checkpointing_keeps_less_and_computes_blocks_again(ids: torch.Tensor):
    def kept(every: int) -> tuple[int, int]:
        model, calls, sizes = make(checkpoint_activations=every), [], []
        for block in model.layers:
            block.register_forward_pre_hook(lambda *_: calls.append(1))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
            loss = model(ids, ids)
        loss.backward()
        return sum(sizes), len(calls)

    (plain, once), (single, twice), (pair, again) = kept(0), kept(1), kept(2)
    assert (once, twice, again) == (3, 6, 6)
    assert pair < single < plain / 3


def test_the_loss_alone_holds_no_logits(ids: torch.Tensor):
    shapes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            shapes.append(tuple(out.shape) if isinstance(out, torch.Tensor) else ())
            return out

    def saw_logits(kernels: str) -> bool:
        shapes.clear()
        with Watch():
            make(kernels=kernels)(ids, ids)
        return (2, 17, 61) in shapes

    assert not saw_logits("loss")
    assert saw_logits("reference")


COMPILED = [{}, {"attention": "sdpa", "kernels": "loss"}, {"checkpoint_activations": 2, "qk_norm": True}]


@pytest.mark.parametrize("changes", COMPILED, ids=name_of)
def test_one_graph_under_compile(changes: dict[str, Any], ids: torch.Tensor):
    model = make(torch.float32, **changes)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    targets = ids.roll(-1, 1)
    torch.testing.assert_close(compiled(ids, targets, 30.0), model(ids, targets, 30.0))
    compiled(ids.flip(0), targets.flip(0), 30.0).backward()
    assert counter.frame_count == 1


def test_blocks_compiled_alone_work_with_checkpointing(ids: torch.Tensor):
    model = make(checkpoint_activations=1)
    _, expected = loss_and_gradients(model, ids)
    torch._dynamo.reset()
    for block in model.layers:
        block.compile(backend="aot_eager")
    torch.testing.assert_close(loss_and_gradients(model, ids)[1], expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("attention", "kernels", "changes"),
    list(
        itertools.product(("auto", "flash-triton"), ("auto", "loss"), ({}, {"qk_norm": True, "attention_softcap": 5}))
    ),
)
def test_kernels_on_the_gpu(attention: str, kernels: str, changes: dict[str, Any]):
    shape = {"d_model": 256, "n_heads": 4, "context_length": 128, "vocab_size": 61, **changes}
    ids = torch.randint(0, 61, (4, 128), device="cuda")
    model = make(torch.float32, **shape, attention=attention, kernels=kernels).cuda()
    plain = make(torch.float32, **shape, attention="reference", kernels="reference").cuda()
    with torch.autocast("cuda", torch.bfloat16):
        expected = loss_and_gradients(plain, ids)
        assert_about(loss_and_gradients(model, ids), expected)
        if attention == "flash-triton":
            return  # compiled, this is the graph of "auto" around another operator, and a compilation takes seconds
        # Compiled, both leave the norms to the compiler. "auto" takes kernels for SwiGLU and, without QK-norm, for
        # projection, RoPE and attention in one; "loss" for attention and the loss alone.
        torch._dynamo.reset()
        assert_about(loss_and_gradients(torch.compile(model, fullgraph=True), ids), expected)


def assert_about(ours: tuple[torch.Tensor, list[torch.Tensor]], theirs: tuple[torch.Tensor, list[torch.Tensor]]):
    """Equal losses and gradients, as far as two computations in bf16 can be."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=5e-3, atol=0)
    for got, want in zip(ours[1], theirs[1], strict=True):
        assert (got - want).norm() < 0.05 * want.norm()
