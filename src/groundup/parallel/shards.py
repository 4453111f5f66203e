"""Shards on disk by torch.distributed.checkpoint (DCP): every rank writes and reads its own parts of FSDP2's tensors.

A directory of DCP has one file a rank, and `.metadata`, which says where each part of each tensor lies. Names and
numbers are those of state.py's whole tensors, so that a reader that knows nothing of FSDP2 puts them together again.

Cost: a rank writes its 1/W of the state, copied to the host about 10 MB at a time; it reads the saved parts that
overlap its own, each entirely. Rejected: DCP's safetensors writer, which other readers of DCP do not know.
`.metadata` is a pickle: like a program, it should come from someone you trust.
Whoever needs this module imports it where it is needed: DCP takes seconds to import.
"""

import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from groundup.parallel.state import as_saved, load_state
from groundup.parallel.torch_engines import TorchFSDP2, is_distributed


def own_tensors(
    engine: TorchFSDP2, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, optimizer's state) under state.py's names, as this rank holds them: DTensors, and counts as int64."""
    engine.take_shards()
    found = {}
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{key}.{name}"] = value if is_distributed(value) and value.ndim else as_saved(value)
    return model.state_dict(), found


def write_shards(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write this rank's parts of `tensors`; a collective. An error of one rank is raised on all, OSErrors as such."""
    with _plain_errors():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(directory))


class Shards:
    """A directory of DCP, read by each rank for itself (`get_tensor`, as safetensors' safe_open has it) or together."""

    def __init__(self, directory: Path):
        self.reader = _Reader(directory)
        self.tensors: dict[str, Any] = self.reader.read_metadata().state_dict_metadata

    def keys(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> torch.Size:
        return self.tensors[name].size

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].properties.dtype

    def get_tensor(self, name: str) -> Tensor:
        """One whole tensor, on the CPU."""
        return self.whole([name])[name]

    def whole(self, names: list[str]) -> dict[str, Tensor]:
        """Whole tensors on the CPU; no other rank is needed."""
        found = {name: torch.empty(self.shape(name), dtype=self.dtype(name)) for name in names}
        with _plain_errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(found, storage_reader=self.reader, no_dist=True)
        return found

    def fill(self, tensors: dict[str, Any]) -> None:
        """Read this rank's parts of DTensors into them; a collective."""
        with _plain_errors():
            dcp.load(tensors, storage_reader=self.reader)


def load_own(
    engine: nn.Module | None, model: nn.Module, optimizer: torch.optim.Optimizer, weights: Shards, state: Shards
) -> None:
    """Fill FSDP2's model and its optimizer from shards of any world size, no tensor being whole anywhere."""
    weights.fill(model.state_dict())
    params = dict(model.named_parameters())
    found = {}
    for full in state.keys():  # noqa: SIM118
        dtype, p = state.dtype(full), params[full.partition(".")[2]]
        found[full] = torch.empty_like(p.detach(), dtype=dtype) if state.shape(full) else torch.empty((), dtype=dtype)
    state.fill(found)
    load_state(engine, model, optimizer, found, found.__getitem__)


class _Reader(dcp.FileSystemReader):
    """Reads `.metadata` once, however many tensors are asked for one by one."""

    known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.known is None:
            self.known = super().read_metadata(*args, **kwargs)
        return self.known


@contextmanager
def _plain_errors() -> Generator[None]:
    """DCP's error, which is no Exception, as an OSError that names the rank, where that was it, else a RuntimeError."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, OSError):
            raise OSError(cause.errno, f"rank {rank}: {cause.strerror or cause}", cause.filename) from cause
        raise RuntimeError(str(error)) from cause
