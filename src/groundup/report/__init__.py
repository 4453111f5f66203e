"""Pictures and tables from run logs.

runlog.py    metrics.jsonl into columns
plots.py     loss curves as a PNG
lr_range.py  the curve of a learning-rate range test (imported by name: it needs torch)
"""

from groundup.report.plots import plot_runs
from groundup.report.runlog import RunLog, read_run

__all__ = ["RunLog", "plot_runs", "read_run"]
