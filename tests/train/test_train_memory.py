"""Memory of a run: a resumed one needs no more than the unbroken one, and token files do not pile up in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import write_tokens

from groundup.data import WindowSampler
from groundup.data.npy import HEADER_BYTES, NpyWriter, open_npy
from groundup.parallel.processes import World
from groundup.train.job import prefetched, read_batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc"),
]

# 26 million weights: a training state of 400 MB, beside which what Python and torch take does not hide a copy.
RUN = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tiny_runs import Recorder, crash, tiny_config
from groundup.train import train
tokens, out, resume, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "resume", int(sys.argv[4])
shape = {"context_length": 64, "d_model": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8, "d_ff": 1408}
config = tiny_config(tokens, model=shape, steps=6, save_every=3, micro_batch_size=2, eval_every=0)
try:
    train(config, out, resume=resume, progress=Recorder({last: crash}))
except BaseException:
    pass
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0])
"""


def test_a_resumed_run_has_the_unbroken_runs_peak(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens")

    def peak(out: str, how: str, last: int) -> float:
        words = [sys.executable, "-c", RUN, str(tokens), str(tmp_path / out), how, str(last)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        return int(subprocess.run(words, env=env, capture_output=True, check=True, text=True).stdout) / 1024

    whole = peak("whole", "begin", 99)
    peak("broken", "begin", 4)
    resumed = peak("broken", "resume", 99)
    a, b = (json.loads((tmp_path / out / "metrics.jsonl").read_text().splitlines()[-1]) for out in ("whole", "broken"))
    assert a["loss"] == b["loss"]
    print(f"peak of the unbroken run {whole:.1f} MiB, of the resumed one {resumed:.1f} MiB")
    assert resumed <= 1.01 * whole


@pytest.mark.timeout(900)
def test_batches_of_a_10_gb_token_file_leave_memory_flat(tmp_path: Path):
    """20,000 batches of 16 windows of 512, all over a sparse file (no block of it is on the disk)."""
    count, path = 5_000_000_000, tmp_path / "train.npy"
    with NpyWriter(path, np.dtype(np.uint16)) as writer:
        writer.count = count
    os.truncate(path, HEADER_BYTES + 2 * count)
    tokens = open_npy(path, "uint16", count)
    sampler = WindowSampler(n_tokens=count, context_length=512, global_batch_size=16, seed=1, vocab_size=256)
    resident = []
    for step, _ in prefetched(lambda step: read_batch(tokens, sampler, step, World(0, 1), pin=False), 1, 20_000):
        if step % 500 == 0:
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20)
    print(f"resident after 500 batches {resident[0]:.1f} MiB, most later {max(resident):.1f} MiB")
    assert max(resident) - resident[0] < 20
