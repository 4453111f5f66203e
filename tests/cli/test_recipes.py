"""Every recipe loads, resolves, and says what it needs and gives; the job script does what Slurm asks of it."""

import os
import subprocess
from pathlib import Path

import pytest

from groundup.config import RunConfig, load_toml, size

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert {"stories-17m.toml", "stories-cpu.toml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_resolves_and_its_header_is_complete(path: Path):
    config = load_toml(path, RunConfig).resolve(vocab_size=10_000)
    assert config.train.steps > config.optim.warmup_steps > 0
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("Hardware", "Tokens", "Time", "Cost", "Expected"):
        assert any(line.startswith(f"# {word}") for line in header), word
    assert any(f"--config recipes/{path.name}" in line for line in header)


def test_stories_17m_is_the_named_size_and_the_course_budget():
    recipe = load_toml(RECIPES[0].with_name("stories-17m.toml"), RunConfig).resolve()
    assert recipe.model == size("stories-17m").resolve()
    assert recipe.train.steps * recipe.train.global_batch_size * recipe.model.context_length == 327_680_000


@pytest.mark.parametrize(("code", "queued_again"), [(0, ""), (2, ""), (75, "requeue 7\n")])
def test_the_job_script_gives_tasks_their_cpus_and_queues_a_stopped_run_again(code, queued_again, tmp_path: Path):
    """Slurm 22.05 and later give a task one CPU unless srun itself is told otherwise."""
    said = 'echo "$SRUN_CPUS_PER_TASK $OMP_NUM_THREADS $*" > srun.txt'
    for name, text in {"srun": f"{said}; exit {code}", "scontrol": 'echo "$*" > scontrol.txt'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"}
    script = RECIPES[0].with_name("slurm.sh")
    run = subprocess.run(["bash", script, "--out", "a b"], cwd=tmp_path, env=slurm, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (code, "")
    assert (tmp_path / "srun.txt").read_text() == "8 8 --kill-on-bad-exit=1 groundup train --resume --out a b\n"
    assert "".join(path.read_text() for path in tmp_path.glob("scontrol.txt")) == queued_again
