"""Start several processes of this machine that run one function, and bring back what went wrong.

The parent holds the store where the children meet, at a port that the system chose: no port is taken twice. When one
fails the others are stopped and the parent raises: a child's UserError as one, with its rank; anything else with the
child's whole trace. A child that was killed is named with its signal. Children end with their parent.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from groundup.errors import UserError

GRACE = 10.0
"""Seconds between asking a process to stop and killing it."""


class ChildError(RuntimeError):
    """A child raised something that is no UserError; the message holds its rank and trace."""


def spawn(function: Callable[..., Any], nproc: int, *arguments: Any, grace: float = GRACE) -> list[Any]:
    """`function(*arguments)` in `nproc` new processes that can `connect`; returns their results in order of rank.

    `function`, arguments and results must pickle. Raises UserError, ChildError or KeyboardInterrupt; no child is left.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context: Any = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="groundup-") as directory:
        children = []
        for rank in range(nproc):
            child = context.Process(target=_child, args=(function, arguments, Path(directory) / str(rank), os.getpid()))
            with _environment(_variables(rank, nproc, store.port)):
                child.start()
            children.append(child)
        first = _first_failure(children, grace)
        outcomes = [_read(Path(directory) / str(rank)) for rank in range(nproc)]
        if first is None:  # nor may a child have left without a result
            first = next((rank for rank, (kind, _) in enumerate(outcomes) if kind != "ok"), None)
        if first is not None:
            _raise(first, children, outcomes)
        return [outcome[1] for outcome in outcomes]


def _variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
    return variables


@contextmanager
def _environment(variables: dict[str, str]) -> Generator[None]:
    """What a child starts with: some of it is read when torch is imported, which is before our code runs there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _child(function: Callable[..., Any], arguments: tuple, outcome: Path, parent: int) -> None:
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    try:
        result = ("ok", function(*arguments))
    except UserError as error:
        result = ("user", str(error))
    except KeyboardInterrupt:
        result = ("interrupt", "")
    except BaseException as error:
        result = ("bug", "".join(traceback.format_exception(error)))
    aside = outcome.with_suffix(".tmp")
    aside.write_bytes(pickle.dumps(result))
    os.replace(aside, outcome)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not exit(): after a failure the backend's threads may still wait for a peer that has gone.
    os._exit(0 if result[0] == "ok" else 1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _first_failure(children: list[Any], grace: float) -> int | None:
    """Wait for all; after a failure stop the others. Returns the rank that failed first, or None."""

    def stop(number: int, _: Any) -> None:
        for child in children:
            if child.is_alive():
                os.kill(child.pid, number)

    # Ctrl-C reaches the children by itself, from the terminal; they end in their own way.
    before = _handle(signal.SIGINT, lambda *_: None), _handle(signal.SIGTERM, stop)
    first = None
    try:
        while first is None:
            # Asked in this order: a child that ends in between is seen as failed, not missed.
            alive = [child for child in children if child.is_alive()]
            failed = [rank for rank, child in enumerate(children) if child.exitcode not in (None, 0)]
            if failed:
                # Ranks that lost a peer fail right after the one that is to blame: a signal tells it apart.
                first = min(failed, key=lambda rank: (children[rank].exitcode > 0, rank))
                _stop_all(children, grace)
            elif alive:
                wait([child.sentinel for child in alive], timeout=1.0)
            else:
                break
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            if handler is not None:
                signal.signal(number, handler)
        _stop_all(children, 0.0)
    return first


def _handle(number: int, handler: Any) -> Any:
    """Only the main thread may set handlers."""
    return signal.signal(number, handler) if threading.current_thread() is threading.main_thread() else None


def _stop_all(children: list[Any], grace: float) -> None:
    for child in children:
        if child.is_alive():
            with suppress(ProcessLookupError):
                child.terminate()
    end = time.monotonic() + grace
    for child in children:
        child.join(max(0.0, end - time.monotonic()))
        if child.is_alive():
            child.kill()
        child.join()


def _read(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else ("gone", "")


def _raise(first: int, children: list[Any], outcomes: list[Any]) -> None:
    """The failure that explains the others: a killed child, else a UserError, else the first trace."""
    code = children[first].exitcode
    if code is not None and code < 0 and outcomes[first][0] == "gone":
        name = signal.Signals(-code).name
        raise UserError(
            f"rank {first} was killed by {name}; the others were stopped: go on from the last checkpoint with --resume"
        )
    kinds = [kind for kind, _ in outcomes]
    if "interrupt" in kinds:
        raise KeyboardInterrupt
    said = [(rank, text) for rank, (kind, text) in enumerate(outcomes) if kind == "user"]
    bugs = [(rank, text) for rank, (kind, text) in enumerate(outcomes) if kind == "bug"]
    blamed = [entry for entry in said if entry[0] == first] or ([] if bugs and bugs[0][0] == first else said)
    if blamed:
        rank, text = blamed[0]
        everywhere = len(said) == len(outcomes) and len({text for _, text in said}) == 1
        raise UserError(text if everywhere else f"rank {rank}: {text}")
    if bugs:
        rank, text = next((entry for entry in bugs if entry[0] == first), bugs[0])
        raise ChildError(f"rank {rank} failed:\n{text}")
    raise ChildError(f"rank {first} ended with exit code {code}")
