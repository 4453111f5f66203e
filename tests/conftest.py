"""Shared by every room's tests."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test depends on the clock: a busy machine is not a failure.
settings.register_profile("groundup", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("groundup")

# Two cores: torch's own threads would fight pytest's neighbours, and one thread makes sums reproducible.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CORPORA = Path(__file__).resolve().parents[2] / "shared" / "corpora"


@pytest.fixture(scope="session")
def corpora() -> Path:
    """Folder of real text (xz files) beside the checkout; tests that need it skip where it is absent."""
    if not CORPORA.is_dir():
        pytest.skip("no corpora beside this checkout")
    return CORPORA
