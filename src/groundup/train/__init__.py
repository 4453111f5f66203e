"""Training: the loop, the run directory and its checkpoints, evaluation, progress.

loop.py           the training step and the loop around it, whole
job.py            a run's parts, built from its configuration; its batches
device.py         where it computes: precision modes, loss scaling, compilation, the same bits each time
micro_batch.py    the largest micro-batch that fits
run_directory.py  a run on disk: metrics.py, checkpoint.py
resume.py         from a job to a checkpoint and back
guards.py         steps that are left out, early stopping, losses that cannot be true
evaluate.py       loss, perplexity, bits per byte; documents.py: by document
load.py           a run's model, for evaluation and generation
exchange.py       a run to and from Hugging Face's format
progress.py       the plan, and what a person sees; sinks.py: TensorBoard, W&B; interrupt.py: what Ctrl-C does
lr_range.py       a learning rate from a short sweep; ablate.py: a recipe's variations as runs
"""

from groundup.train.documents import Document, DocumentEvaluation, evaluate_documents
from groundup.train.evaluate import Evaluation, bits_per_byte, evaluate
from groundup.train.exchange import export_run, import_run
from groundup.train.load import evaluate_run, evaluate_run_documents, load_run
from groundup.train.loop import TrainResult, train
from groundup.train.progress import ConsoleProgress, Plan, Progress
from groundup.train.run_directory import RunDirectory, changed_fields

__all__ = [
    "ConsoleProgress",
    "Document",
    "DocumentEvaluation",
    "Evaluation",
    "Plan",
    "Progress",
    "RunDirectory",
    "TrainResult",
    "bits_per_byte",
    "changed_fields",
    "evaluate",
    "evaluate_documents",
    "evaluate_run",
    "evaluate_run_documents",
    "export_run",
    "import_run",
    "load_run",
    "train",
]
