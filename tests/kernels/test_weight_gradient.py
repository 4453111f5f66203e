"""The division of a weight gradient in plain Python, and who computes it on a CPU; on a GPU: test_kernels_gpu.py."""

import sys
from collections import defaultdict

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from groundup.kernels import linear
from groundup.kernels import weight_gradient as module
from groundup.kernels.weight_gradient import CANDIDATES, TILES, Candidate, Plan, chosen, plan, weight_gradient_op

SHAPES = [(3072, 1024), (5504, 1024), (1024, 2688), (1024, 1024), (2304, 768), (4096, 768), (768, 768), (16384, 4096)]
ODD = [(72, 264, 192, 132), (8, 8, 64, 132), (4104, 776, 2048, 114), (1000, 328, 4096, 7), (640, 640, 448, 1)]


def tile_grid(candidate: Candidate, m: int, n: int) -> tuple[int, int]:
    tile = TILES[candidate.tile]
    rows, columns = (n, m) if candidate.turned else (m, n)
    return -(-rows // tile.rows), -(-columns // tile.columns)


def segments_of(p: Plan, block: int) -> list[tuple[int, int, int, int]]:
    """(tile, first step, end, slot) of every segment, by the kernel's own arithmetic."""
    from groundup.kernels.weight_gradient_hopper import n_segments, segment

    return [segment.fn(block, i, p.blocks, p.steps, p.cut) for i in range(n_segments.fn(block, p.cut))]


def slots_awaited(p: Plan, tile: int) -> list[int]:
    """In the order in which they are added."""
    from groundup.kernels.weight_gradient_hopper import slots_of

    if tile < p.waves * p.blocks:
        return []
    own, helped, n_helped = slots_of.fn(tile - p.waves * p.blocks, p.cut)
    return [*range(own, own + p.parts - 1), *range(helped, helped + n_helped)]


def check(p: Plan, tiles: int) -> None:
    """Every step of every tile once; a tile's last range waits for all others, which come earlier."""
    of_tile = defaultdict(list)
    slots = []
    for block in range(p.blocks):
        for i, (tile, start, end, slot) in enumerate(segments_of(p, block)):
            assert start < end
            of_tile[tile].append((start, end, slot, (block, i)))
            slots += [slot] * (slot >= 0)
    assert len(slots) == len(set(slots)) <= p.blocks
    assert all(slot < p.slots for slot in slots)
    assert set(of_tile) == set(range(tiles))
    for tile, pieces in of_tile.items():
        reached = 0
        for start, end, _, _ in sorted(pieces):
            assert start == reached
            reached = end
        assert reached == p.steps
        ((*_, when),) = (x for x in pieces if x[2] < 0)
        others = {slot: at for *_, slot, at in pieces if slot >= 0}
        assert sorted(slots_awaited(p, tile)) == sorted(others)
        assert all(at[0] < when[0] for at in others.values())


@pytest.mark.parametrize("candidate", CANDIDATES)
@pytest.mark.parametrize(("helpers", "parts"), [(True, 0), (True, 1), (False, 0)])
def test_every_step_once_and_nobody_waits_for_a_later_block(candidate: Candidate, helpers: bool, parts: int):
    pytest.importorskip("triton")
    candidate = candidate._replace(helpers=helpers, parts=parts)
    for m, n, k, blocks in [*((m, n, k, 132) for m, n in SHAPES for k in (8192, 32768)), *ODD]:
        rows, columns = tile_grid(candidate, m, n)
        check(plan(candidate, m, n, k, blocks), rows * columns)


def test_a_division_carried_out():
    """The sums, with the workspace and its slots, in the order of the blocks' numbers."""
    pytest.importorskip("triton")
    candidate, m, n, k = Candidate("192x256"), 712, 520, 8192
    a, b = torch.randn(k, m, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)
    out, work = torch.full((m, n), float("nan"), dtype=torch.float64), {}
    p = plan(candidate, m, n, k, 34)
    assert p.parts > 1
    assert p.helpers
    for tile, start, end, slot in (x for block in range(p.blocks) for x in segments_of(p, block)):
        row, column = tile // 3 * 192, tile % 3 * 256
        over, where = slice(start * 64, end * 64), (slice(row, row + 192), slice(column, column + 256))
        sums = a[over, where[0]].T @ b[over, where[1]]
        if slot >= 0:
            work[slot] = sums
        else:
            out[where] = sum((work.pop(j) for j in slots_awaited(p, tile)), sums)
    assert not work
    assert torch.allclose(out, a.T @ b)


def test_cublas_keeps_what_the_kernel_cannot_take_or_is_not_faster_at():
    assert chosen(5504, 1024, 16384, 132) is not None
    for m, n, k in ((5500, 1024, 16384), (5504, 1023, 16384), (5504, 1024, 16400), (5504, 1024, 1024), (8, 8, 16384)):
        assert chosen(m, n, k, 132) is None


def test_what_was_measured_goes_before_the_costs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(module.CHOICE, (5512, 1024), None)
    assert chosen(5512, 1024, 16384, 132) is None
    monkeypatch.setitem(module.CHOICE, (5520, 1024), Candidate("128x128"))
    assert chosen(5520, 1024, 16384, 132) == Candidate("128x128")


def test_rows_that_the_copy_engine_reads():
    x = torch.zeros(64, 72, dtype=torch.bfloat16)
    assert module.copyable(x)
    assert module.copyable(x[:, 8:24])
    assert not module.copyable(x[:, 4:12])  # starts between 16 bytes
    assert not module.copyable(x.T)
    assert not module.copyable(x[:1].expand(64, 72))
    assert not module.copyable(x.float())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_operator_on_the_cpu(kind: torch.dtype):
    d_y, x = torch.randn(64, 24).to(kind), torch.randn(64, 16).to(kind)
    torch.library.opcheck(weight_gradient_op, (d_y, x))
    expected = (d_y.double().T @ x.double()).float()
    torch.testing.assert_close(weight_gradient_op(d_y, x), expected)
    torch.testing.assert_close(module.weight_gradient(d_y, x), expected)


def test_its_flops_are_counted():
    with FlopCounterMode(display=False) as counter:
        weight_gradient_op(torch.randn(64, 24).bfloat16(), torch.randn(64, 16).bfloat16())
    assert counter.get_total_flops() == 2 * 64 * 24 * 16


def test_linear_compiles_whole_around_the_operator(monkeypatch: pytest.MonkeyPatch):
    """As on Hopper, where the product is the operator's."""
    monkeypatch.setattr(sys.modules["groundup.kernels.linear"], "weight_gradient", weight_gradient_op)
    x, weight = torch.randn(2, 32, 16), torch.randn(24, 16, requires_grad=True)
    function = torch.compile(linear, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(x, weight)
    d_out = torch.randn_like(out)
    (d_weight,) = torch.autograd.grad(out, weight, d_out)
    expected = d_out.flatten(0, 1).float().T @ x.bfloat16().float().flatten(0, 1)
    torch.testing.assert_close(d_weight, expected)


def test_a_graph_captured_before_the_check_keeps_cublas(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="before capture"):
        assert not module.proven(Candidate("192x128"), torch.zeros(1, dtype=torch.float16))


def test_a_kernel_that_fails_is_left_visibly(monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(module, "by_kernel", broken)
    with pytest.warns(UserWarning, match="no such instruction"):
        assert not module.prove(torch.device("cpu"), torch.bfloat16, Candidate("192x256"))
    monkeypatch.setattr(module, "by_kernel", lambda d_y, x, _: d_y.float().T @ x.float() * float("nan"))
    with pytest.warns(UserWarning, match="wrong on a small check"):
        assert not module.prove(torch.device("cpu"), torch.bfloat16, Candidate("192x256"))
