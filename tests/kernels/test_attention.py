"""Attention's plain backends, masks and messages, on the CPU; the Triton kernels are in test_interpreted.py."""

import subprocess
import sys

import pytest
import torch
from attention_truth import attention as truth
from attention_truth import make, visible
from torch._subclasses.fake_tensor import FakeTensorMode

from groundup.errors import UserError
from groundup.kernels import attention, document_ids, flash_hopper, flash_triton, rotary_attention
from groundup.kernels.attention import BACKENDS, pick
from groundup.kernels.documents import intervals

IDS = torch.tensor([[0] * 5 + [1] + [2] * 20 + [3] * 14, [0] * 40])


@pytest.mark.parametrize(
    ("kernel", "width", "shared", "hopper", "tile"),
    [
        ("queries", 64, 232_448, True, (128, 64, 4, 3)),
        ("queries", 64, 166_912, False, (64, 64, 4, 2)),
        ("queries", 64, 101_376, False, (64, 64, 4, 2)),
        ("queries", 128, 232_448, True, (128, 64, 8, 3)),
        ("queries", 128, 166_912, False, (64, 64, 4, 2)),
        ("queries", 128, 101_376, False, (64, 32, 4, 2)),
        ("keys", 64, 101_376, False, (32, 128, 4, 3)),
    ],
)
def test_the_tile_of_a_gpu(kernel, width, shared, hopper, tile, monkeypatch):
    """Of an H200, an A100 and an RTX 3090: what fits, and 16 rows of dQ a warp where there is no wgmma."""
    monkeypatch.setattr(flash_triton, "shared_memory", lambda _: shared)
    monkeypatch.setattr(flash_triton, "has_wgmma", lambda _: hopper)
    fresh = flash_triton.pick_tile.__wrapped__  # it remembers its answers
    assert fresh(kernel, torch.bfloat16, width, torch.device("cuda"))[:4] == tile


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 7},
        {"softcap": 3.0},
        {"documents": IDS},
        {"documents": IDS, "window": 4},
        {"documents": IDS, "causal": False},
        {"scale": 0.3},
    ],
)
def test_reference_has_every_feature(options):
    q, k, v, d_out = make(2, 4, 2, 40, 40, 16, 24)
    out, lse = attention(q, k, v, backend="reference", return_lse=True, **options)
    documents = options.get("documents")
    named = {"causal": True} | options | {"documents": None if documents is None else (documents, documents)}
    true_out, true_lse = truth(q, k, v, **named)
    torch.testing.assert_close(out, true_out)
    torch.testing.assert_close(lse, true_lse)
    ours = torch.autograd.grad((out, lse.sum()), (q, k, v), (d_out, torch.ones(()).double()))
    theirs = torch.autograd.grad((true_out, true_lse.sum()), (q, k, v), (d_out, torch.ones(()).double()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_that_see_nothing_give_zero_and_no_nan():
    q, k, v, d_out = make(1, 1, 1, 9, 4, 16, 16)
    for backend in ("reference", "flash-torch"):
        out = attention(q, k, v, backend=backend)
        assert out[:, :, :5].eq(0).all()
        for grad in torch.autograd.grad(out, (q, k, v), d_out):
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("backend", ["auto", "flash-torch", "sdpa"])
@pytest.mark.parametrize(("n_q", "n_k", "causal"), [(33, 33, True), (5, 33, True), (33, 20, False)])
def test_backends_agree(backend: str, n_q: int, n_k: int, causal: bool):
    q, k, v, _ = make(2, 4, 2, n_q, n_k, 16, 16)
    torch.testing.assert_close(attention(q, k, v, causal=causal, backend=backend), truth(q, k, v, causal)[0])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_intervals_are_the_mask(causal: bool, window: int):
    """Queries and keys of different numbers, a document that only one side has, an empty document between."""
    q_ids = torch.tensor([[0, 0, 1, 1, 1, 3, 3, 3, 3], [0] * 9])
    k_ids = torch.tensor([[0, 0, 0, 1, 2, 2, 3, 3], [0] * 8])
    (q_lo, q_hi), (k_lo, k_hi) = intervals(q_ids, k_ids, causal, window)
    i, j = torch.arange(9)[:, None], torch.arange(8)
    for b in range(2):
        keep = torch.zeros(9, 8, dtype=torch.bool)
        for document in q_ids[b].unique():
            rows, columns = q_ids[b] == document, k_ids[b] == document
            if columns.any():
                block = visible(int(rows.sum()), int(columns.sum()), causal, window)
                keep[torch.outer(rows, columns)] = block.flatten()
        assert torch.equal((j >= q_lo[b][:, None]) & (j < q_hi[b][:, None]), keep)
        assert torch.equal((i >= k_lo[b]) & (i < k_hi[b]), keep)
        for bound in (q_lo, q_hi, k_lo, k_hi):
            assert (bound[b].diff() >= 0).all(), "the kernels rely on growing intervals"


def test_document_ids_from_cumulative_lengths():
    assert document_ids(torch.tensor([0, 3, 3, 5]), 6).tolist() == [[0, 0, 0, 2, 2, 3]]


def test_autocast_brings_all_three_to_one_type():
    q, k, v, _ = (x.detach().float() for x in make(1, 1, 1, 8, 8, 16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


def test_messages_are_one_line():
    q, k, v, _ = make(1, 3, 2, 8, 8, 16, 16)
    bad = [
        (lambda: attention(q, k, v), "2 key heads do not divide 3 query heads"),
        (lambda: attention(q, q, q.float()), "one type"),
        (lambda: attention(q, k[..., :8], v), "do not fit together"),
        (lambda: attention(q[0], k[0], v[0]), "batch, heads, seq, d"),
        (lambda: attention(q, q, q, window=-1), "window -1"),
        (lambda: attention(q, q, q, documents=torch.zeros(1, 7, dtype=int)), "documents_of_k .1, 7. do not fit"),
        (lambda: attention(q, q, q, documents=torch.zeros(2, 8, dtype=int)), "documents_of_q .2, 8."),
        (lambda: attention(q, q, q, documents=torch.zeros(8, dtype=int)), "documents_of_q .8,."),
        (lambda: attention(q, q[:, :, 1:], q[:, :, 1:], documents=torch.zeros(1, 8, dtype=int)), "do not fit"),
        (lambda: attention(q, q, q, backend="flash"), "does not exist"),
        (lambda: attention(q.float(), q.float(), q.float(), backend="flash-triton"), "needs a GPU"),
        (lambda: rotary_attention(q, (q[0, 0, :2, :8],) * 2, 1), "rotary_attention: qkv .*, cos .* do not fit"),
    ]
    for call, message in bad:
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_fallback_is_seen():
    q, _, _, _ = make(1, 1, 1, 8, 8, 16, 16)
    with pytest.warns(UserWarning, match="causal and full only"):
        out = attention(q, q, q, window=3, backend="sdpa")
    torch.testing.assert_close(out, truth(q, q, q, True, 3)[0])


def test_the_package_imports_where_there_is_no_triton():
    hidden = "import sys; sys.modules['triton'] = None\nimport groundup.kernels as k, torch\n"
    run = "x = torch.randn(1, 1, 8, 16); print(k.attention(x, x, x).shape)"
    done = subprocess.run([sys.executable, "-c", hidden + run], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(BACKENDS) == {"auto", "reference", "flash-torch", "flash-triton", "flash-hopper", "sdpa"}


def test_looking_at_the_device_and_falling_back_break_no_graph(monkeypatch):
    """The choice between the kernels is made while a model is compiled; a break there would split every block."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))

    def chosen(x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x, window=5, backend="flash-torch") + len(flash_hopper.device_obstacle(7))

    q = torch.randn(1, 1, 8, 16)
    with pytest.warns(UserWarning, match="flash-torch: knows causal and full only"):
        out = torch.compile(chosen, fullgraph=True, backend="eager")(q)
    torch.testing.assert_close(out, chosen(q))


def test_the_hopper_kernels_are_not_given_empty_tensors():
    with FakeTensorMode():
        q = torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
        empty = [flash_hopper.obstacle(q, k, k, False, True) for k in (q[:, :, :0], q[:0])]
        assert flash_hopper.obstacle(q[:0], q[:0], q[:0], True, True) == empty[0] == empty[1] == "nothing to attend to"
        assert flash_hopper.obstacle(q, q, q.float()[..., :8], True, True).startswith("d 64, d_v 8")


def test_gpus_without_tf32_take_the_reference(monkeypatch):
    with FakeTensorMode():
        for index, hip, capability, reason in ((11, "6.4", (9, 4), "not NVIDIA's"), (12, None, (7, 5), "older than")):
            monkeypatch.setattr(torch.version, "hip", hip)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, found=capability: found)
            q = torch.empty(1, 1, 64, 64, device=f"cuda:{index}", dtype=torch.bfloat16)
            assert pick("auto", (q, q, q), True, True, True, True) == "reference"
            with pytest.warns(UserWarning, match=reason):
                assert pick("flash-triton", (q, q, q), True, True, True, True) == "reference"


def test_passes_that_are_not_hopper_s_are_named_where_hopper_was(monkeypatch):
    for kernels in (flash_hopper, flash_triton):
        monkeypatch.setattr(kernels, "device_obstacle", lambda index: "")
    notes = []
    monkeypatch.setattr(flash_hopper, "note_fallback", lambda what, why: notes.append(why))
    with FakeTensorMode():
        for n, d, grads, deterministic, backend, expected in (
            (1024, 64, True, True, "flash-hopper", ["forward of fewer than 2048", "deterministic"]),
            (1024, 128, True, False, "flash-hopper", ["backward of fewer than 2048"]),
            (1024, 64, False, True, "flash-hopper", ["forward"]),
            (2048, 64, True, False, "flash-hopper", []),
            (1024, 64, True, True, "auto", []),
        ):
            notes.clear()
            q = torch.empty(1, 2, n, d, device="cuda", dtype=torch.bfloat16, requires_grad=grads)
            assert pick(backend, (q, q, q), True, True, True, deterministic) == "flash-hopper"
            assert len(notes) == len(expected)
            assert all(part in note for part, note in zip(expected, notes, strict=True))


def test_a_graph_captured_before_the_proof_says_that_it_keeps_the_plain_path(monkeypatch):
    monkeypatch.setattr(flash_hopper, "_proof", {})
    monkeypatch.setattr(flash_hopper, "prove", lambda *key: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    q, keys_from = torch.empty(1, 1, 2048, 64), flash_hopper.FORWARD_FROM
    with pytest.warns(UserWarning, match="keeps flash-triton"):
        assert not flash_hopper.pays(keys_from, q, q)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert flash_hopper.pays(keys_from, q, q)
    assert not flash_hopper.pays(keys_from, q, q[:, :, :1024])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert flash_hopper.pays(keys_from, q, q)
