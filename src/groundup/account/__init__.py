"""Predictions from the configuration alone: parameters, FLOPs, memory, time. Imports no torch, reads no measurement.

Read in this order: params.py, flops.py, hardware.py; then tape.py (a symbolic torch), allocator.py, ops.py,
program.py (the model over it), memory.py, device.py (the time of one kernel), throughput.py, predict.py, explain.py.
"""

# Functions named as their module (flops, memory, throughput) are not repeated here: they would hide it.
from groundup.account.device import Costs
from groundup.account.flops import MatrixProduct, matrix_products
from groundup.account.hardware import GPUS, Gpu, gpu
from groundup.account.memory import SavedTensor, Setting, trace
from groundup.account.params import parameter_shapes, parameters
from groundup.account.predict import predict_step
from groundup.account.throughput import max_batch

__all__ = [
    "GPUS",
    "Costs",
    "Gpu",
    "MatrixProduct",
    "SavedTensor",
    "Setting",
    "gpu",
    "matrix_products",
    "max_batch",
    "parameter_shapes",
    "parameters",
    "predict_step",
    "trace",
]
