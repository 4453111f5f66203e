"""What contracts.py checks, one spawn a world size."""

import pytest
from contracts import CHECKS, run_checks

_done: dict[int, list] = {}


def check(world: int, name: str) -> None:
    if world not in _done:
        _done[world] = run_checks(world)
    assert [result[name] for result in _done[world]] == [""] * world, "\n".join(r[name] for r in _done[world])


@pytest.mark.parametrize("name", list(CHECKS))
def test_two_ranks(name):
    check(2, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CHECKS))
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks(world, name):
    check(world, name)
