"""Predictions from the configuration alone: parameters, FLOPs, memory, time. Imports no torch, reads no measurement.

Read in this order: params.py, flops.py, hardware.py; then tape.py (a symbolic torch), allocator.py, ops.py,
program.py (the model over it), memory.py, throughput.py, predict.py, explain.py.
"""

from groundup.account.flops import MatrixProduct, flops, matrix_products
from groundup.account.hardware import GPUS, Gpu, gpu
from groundup.account.memory import SavedTensor, Setting, memory, trace
from groundup.account.params import parameter_shapes, parameters
from groundup.account.predict import predict_step
from groundup.account.throughput import max_batch, throughput

__all__ = [
    "GPUS",
    "Gpu",
    "MatrixProduct",
    "SavedTensor",
    "Setting",
    "flops",
    "gpu",
    "matrix_products",
    "max_batch",
    "memory",
    "parameter_shapes",
    "parameters",
    "predict_step",
    "throughput",
    "trace",
]
