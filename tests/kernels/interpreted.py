"""Run a folder of tests under Triton's interpreter, which is fixed when Triton is imported: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_interpreted(script: str, *arguments: str) -> None:
    """Run tests/kernels/SCRIPT with pytest, interpreting; its failures become this test's."""
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / script), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
