"""The launcher of our own: what its children get when somebody signals it, and that none is left."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groundup.parallel.launch import spawn


def wait_for_a_signal(directory):
    """Leaves what came: ended by another signal than SIGINT, or by a second one, it leaves no word."""
    try:
        (directory / f"ready-{os.getpid()}").touch()  # in here: the signal may come as soon as the file is seen
        time.sleep(300)
    except KeyboardInterrupt:
        time.sleep(1.5 + float(os.environ["RANK"]))  # the other has ended by then
        (directory / f"once-{os.getpid()}").touch()
        raise


def signalled_launcher(directory, to_group):
    """A launcher of two in a process group of its own, which gets one SIGINT: by `kill`, or as from a terminal."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import test_launch as t\n"
        "if __name__ == '__main__': t.spawn(t.wait_for_a_signal, 2, Path(sys.argv[2]))"
    )
    script = directory / "launcher.py"
    script.write_text(code)
    parent = subprocess.Popen(
        [sys.executable, script, Path(__file__).parent, directory], start_new_session=True, stderr=subprocess.PIPE
    )
    try:
        end = time.monotonic() + 120
        while len(list(directory.glob("ready-*"))) < 2:
            assert parent.poll() is None, parent.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.1)
        (os.killpg if to_group else os.kill)(parent.pid, signal.SIGINT)
        _, said = parent.communicate(timeout=60)
    finally:
        parent.kill()
    return parent.returncode, said.decode()


@pytest.mark.parametrize("to_group", [False, True], ids=["kill", "terminal"])
def test_an_interrupt_reaches_every_child_once(to_group, tmp_path):
    code, said = signalled_launcher(tmp_path, to_group)
    assert code == -signal.SIGINT, said
    assert "KeyboardInterrupt" in said
    assert len(list(tmp_path.glob("once-*"))) == 2


def test_children_end_when_a_later_one_cannot_start(monkeypatch, tmp_path):
    context = multiprocessing.get_context("spawn")
    start, started = context.Process.start, []

    def start_one(child):
        if started:
            raise OSError("no more processes")
        start(child)
        started.append(child)

    monkeypatch.setattr(context.Process, "start", start_one)
    with pytest.raises(OSError, match="no more processes"):
        spawn(wait_for_a_signal, 2, tmp_path)
    assert [child.is_alive() for child in started] == [False]
