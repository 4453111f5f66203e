"""A Slurm script that runs a sweep; it may be queued again and goes on where the time limit cut it off."""

import shlex
from collections.abc import Sequence
from math import ceil

MAX_HOURS = 24


def slurm_script(name: str, argv: Sequence[str], cells: int, seconds_per_cell: float, on_gpu: bool) -> str:
    """The script's text; it runs where it is submitted. `argv`: the words after `groundup bench NAME`, no --slurm."""
    seconds = min(MAX_HOURS * 3600, 600 + cells * seconds_per_cell)
    minutes = ceil(seconds / 60)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name=bench-{name}",
        f"#SBATCH --time={minutes // 60:02d}:{minutes % 60:02d}:00",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks=1",
        "#SBATCH --cpus-per-task=8",
        *(["#SBATCH --gres=gpu:1"] if on_gpu else []),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        f"#SBATCH --output=bench-{name}-%j.log",
        "",
        f"# {cells} cells. Finished cells are kept: submit again to go on.",
        "set -euo pipefail",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # since Slurm 22.05 srun does not take it from the job',
        f"srun groundup bench {name} {shlex.join(argv)}".rstrip(),
        "",
    ]
    return "\n".join(lines)


def without_flag(argv: Sequence[str], flag: str) -> list[str]:
    """`argv` without `flag VALUE` and `flag=VALUE`."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip or word.split("=")[0] == flag:
            skip = word == flag
            continue
        kept.append(word)
    return kept
