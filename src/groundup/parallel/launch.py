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
from contextlib import contextmanager
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
    children: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="groundup-") as directory, _signals_reach(children) as asked:
        paths = [Path(directory) / str(rank) for rank in range(nproc)]
        try:
            for rank, path in enumerate(paths):
                children.append(context.Process(target=_child, args=(function, arguments, path, os.getpid())))
                with _environment(_variables(rank, nproc, store.port)):
                    children[-1].start()
            first = _first_failure(children, grace, asked)
        finally:
            _stop_all(children, 0.0)
        outcomes: list[Any] = [pickle.loads(path.read_bytes()) if path.exists() else None for path in paths]
    if first is None:  # nor may a child have left without a result
        first = next((rank for rank, outcome in enumerate(outcomes) if outcome is None), None)
    if first is not None:
        raise _explanation(first, children[first].exitcode, [outcome[1] if outcome else None for outcome in outcomes])
    return [outcome[0] for outcome in outcomes]


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
    """What a child starts with: some of it is read when torch is imported, which may be before our code runs there."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _signals_reach(children: list[Any]) -> Generator[threading.Event]:
    """SIGINT and SIGTERM go on to the children, which end in their own way; Ctrl-Z stops them with their parent.

    Yields what is set when they have been asked to end.

    They are in process groups of their own: so a signal comes once, from a terminal (which signals the whole group of
    the parent, and a second one would end a run unsaved) as from `kill`.
    """

    asked = threading.Event()

    def pass_on(number: int, _: Any) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            asked.set()
        for child in children:
            if child.is_alive():
                os.kill(child.pid, number)

    def suspend(*_: Any) -> None:
        pass_on(signal.SIGSTOP, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        pass_on(signal.SIGCONT, None)

    handlers = {signal.SIGINT: pass_on, signal.SIGTERM: pass_on, signal.SIGTSTP: suspend}
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _child(function: Callable[..., Any], arguments: tuple, path: Path, parent: int) -> None:
    os.setpgrp()
    end_with_parent(parent)
    result, error = None, None
    try:
        result = function(*arguments)
    except UserError as caught:
        error = UserError(str(caught))
    except KeyboardInterrupt:
        error = KeyboardInterrupt()
    except BaseException as caught:
        error = ChildError(f"rank {os.environ['RANK']} failed:\n{''.join(traceback.format_exception(caught))}")
    aside = path.with_suffix(".tmp")
    aside.write_bytes(pickle.dumps((result, error)))
    os.replace(aside, path)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not exit(): after a failure the backend's threads may still wait for a peer that has gone.
    os._exit(1 if error else 0)


def end_with_parent(parent: int) -> None:
    """From now on this process ends, within a second, when its parent (that process id) has gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _first_failure(children: list[Any], grace: float, asked: threading.Event) -> int | None:
    """Wait for all; after a failure stop the others. Returns the rank that failed first, or None.

    Children that were `asked` to end are not asked again: a second signal would end a run unsaved.
    """
    while True:
        # Asked in this order: a child that ends in between is seen as failed, not missed.
        alive = [child for child in children if child.is_alive()]
        failed = [rank for rank, child in enumerate(children) if child.exitcode not in (None, 0)]
        if failed:
            _stop_all(children, grace, ask=not asked.is_set())
            # Ranks that lost a peer fail right after the one that is to blame: a signal tells it apart.
            return min(failed, key=lambda rank: (children[rank].exitcode > 0, rank))
        if not alive:
            return None
        wait([child.sentinel for child in alive], timeout=1.0)


def _stop_all(children: list[Any], grace: float, ask: bool = True) -> None:
    """Let the children end within `grace` seconds, with `ask` after a SIGTERM; then kill them."""
    started = [child for child in children if child.pid]
    for child in started:
        if ask and child.is_alive():
            child.terminate()
    end = time.monotonic() + grace
    for child in started:
        child.join(max(0.0, end - time.monotonic()))
        if child.is_alive():
            child.kill()
        child.join()


def _explanation(first: int, code: int, errors: list[BaseException | None]) -> BaseException:
    """The error that explains the others: a killed child, else Ctrl-C, else what the first to fail has said."""
    error = errors[first]
    if error is None and code < 0:
        name = signal.Signals(-code).name
        return UserError(
            f"rank {first} was killed by {name}; the others were stopped: go on from the last checkpoint with --resume"
        )
    if any(isinstance(other, KeyboardInterrupt) for other in errors):
        return KeyboardInterrupt()
    if error is None:
        return ChildError(f"rank {first} ended with exit code {code}")
    everywhere = {repr(other) for other in errors} == {repr(error)}
    return UserError(f"rank {first}: {error}") if isinstance(error, UserError) and not everywhere else error
