"""The parity grid, every engine on every case, at 1 to 4 processes, against one process; and what contracts.py checks.

One process group a world size runs all of both. At one and two ranks the weights must be bit-equal after four steps of
AdamW, as two numbers add up alike in either order; at three and four equal to 1e-6.
"""

import pytest
import torch
from contracts import CHECKS
from grid import CASES, run_cells, run_grid

from groundup.errors import UserError
from groundup.parallel.launch import ChildError
from groundup.parallel.processes import connect, disconnect, this_world

OURS = ["naive", "flat", "overlap", "bucketed", "zero1", "zero1 after bucketed", "fsdp"]
CELLS = [(engine, case) for engine in OURS for case in CASES]
TORCH = [(engine, case) for engine in ("torch-ddp", "torch-fsdp2") for case in CASES if not CASES[case].late]
REFUSED = {("torch-ddp", "unused on all"): "not used in producing loss"}
"""torch DDP without its search for unused parameters, which costs every step."""
ENDS = {
    (engine, case): {"torch-ddp": "not used in producing loss", "torch-fsdp2": "was killed by SIGABRT"}[engine]
    for engine, case in TORCH
    if CASES[case].unused == "some"
}
"""Where ranks differ in what they use, torch's engines end on one rank: DDP's next forward raises; FSDP2 reduces what
has a gradient, so ranks send different sizes and the backend aborts. The launcher stops the others with one line."""
TORCH = [cell for cell in TORCH if cell not in ENDS]

_done: dict[int, list] = {}


def found_by(world: int, name: tuple[str, str] | str) -> list[str]:
    """What each rank says of a cell or a check."""
    if world not in _done:
        _done[world] = run_grid(world, CELLS + TORCH, list(CHECKS)) if world > 1 else [alone()]
    return [result[name] for result in _done[world]]


def alone() -> dict:
    """A world of one needs no other process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "0")
        connect(this_world(), torch.device("cpu"))
        try:
            return run_cells(CELLS)
        finally:
            disconnect()


def check(world: int, cell: tuple[str, str]) -> None:
    found = found_by(world, cell)
    if cell in REFUSED:
        assert all(REFUSED[cell] in text for text in found), found
    else:
        assert found == [""] * world, found[0]


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.parametrize("world", [1, 2])
def test_ours(world, cell):
    check(world, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids="-".join)
@pytest.mark.parametrize("world", [3, 4])
def test_ours_at_more_ranks(world, cell):
    check(world, cell)


@pytest.mark.parametrize("cell", TORCH, ids="-".join)
def test_torch_engines(cell):
    check(2, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", TORCH, ids="-".join)
@pytest.mark.parametrize("world", [3, 4])
def test_torch_engines_at_more_ranks(world, cell):
    check(world, cell)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch-ddp", "torch-fsdp2"])
def test_what_torchs_engines_cannot_do_ends_with_a_line(engine):
    cell = (engine, "unused on some")
    with pytest.raises((UserError, ChildError), match=ENDS[cell]):
        run_grid(2, [cell], [], catch=False)


@pytest.mark.parametrize("name", list(CHECKS))
def test_contracts(name):
    assert found_by(2, name) == ["", ""], "\n".join(found_by(2, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CHECKS))
@pytest.mark.parametrize("world", [3, 4])
def test_contracts_at_more_ranks(world, name):
    assert found_by(world, name) == [""] * world, "\n".join(found_by(world, name))
