"""Training: the loop, the run directory and its checkpoints, evaluation, progress.

loop.py           the training step and the loop around it, whole
job.py            a run's parts, built from its configuration: batches.py, device.py, world.py, plan.py
run_directory.py  a run on disk: metrics.py, checkpoint.py
resume.py         from a job to a checkpoint and back; state.py names the tensors
evaluate.py       loss, perplexity, bits per byte
load.py           a run's model, for evaluation and generation
progress.py       what a person sees; interrupt.py: what Ctrl-C does
"""

from groundup.train.evaluate import Evaluation, bits_per_byte, evaluate
from groundup.train.load import evaluate_run, load_run
from groundup.train.loop import TrainResult, train
from groundup.train.plan import Plan
from groundup.train.progress import ConsoleProgress, Progress
from groundup.train.run_directory import RunDirectory, changed_fields

__all__ = [
    "ConsoleProgress",
    "Evaluation",
    "Plan",
    "Progress",
    "RunDirectory",
    "TrainResult",
    "bits_per_byte",
    "changed_fields",
    "evaluate",
    "evaluate_run",
    "load_run",
    "train",
]
