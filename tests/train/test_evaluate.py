"""Evaluation against a window-by-window computation in float64."""

import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_runs import EOT, tiny_config, write_tokens

from groundup.cli import main
from groundup.data import TokenData
from groundup.data.npy import NpyWriter, open_npy
from groundup.errors import UserError
from groundup.model import TransformerLM
from groundup.parallel.processes import World
from groundup.train import ConsoleProgress, evaluate, evaluate_run, train
from groundup.train.evaluate import _batches

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def model(tokens: Path) -> TransformerLM:
    model = TransformerLM(tiny_config(tokens).model)
    model.init_weights(3)
    return model


def window_losses(model: TransformerLM, ids: np.ndarray) -> list[torch.Tensor]:
    """Losses of each window of 32 targets, one window at a time, in float64."""
    wide = TransformerLM(model.config).double()
    wide.load_state_dict(model.state_dict())
    losses = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 32):
            window = torch.from_numpy(ids[start : start + 33].astype(np.int64))
            logits = wide(window[None, :-1])[0]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    return losses


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_all_tokens_once(batch_size: int, model: TransformerLM, tokens: Path):
    data = TokenData.open(tokens)
    found = evaluate(model, data, batch_size=batch_size)
    truth = torch.cat(window_losses(model, np.asarray(data.valid))).mean().item()
    assert found.tokens == 699
    assert found.loss == pytest.approx(truth, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(truth), rel=1e-5)
    # All but the first token are predicted, and the last one, <|endoftext|>, is no byte of the text.
    assert found.bytes == 698
    assert found.bits_per_byte == pytest.approx(truth * 699 / 698 / math.log(2), rel=1e-6)


def test_a_part_is_spread_over_the_file_and_always_the_same(model: TransformerLM, tokens: Path):
    data = TokenData.open(tokens)
    found = evaluate(model, data, batch_size=4, batches=3)
    losses = window_losses(model, np.asarray(data.valid))  # 22 windows, 6 batches: the batches 0, 2, 4
    chosen = torch.cat(losses[0:4] + losses[8:12] + losses[16:20])
    assert found.tokens == 3 * 4 * 32
    assert found.loss == pytest.approx(chosen.mean().item(), rel=1e-6)
    assert evaluate(model, data, batch_size=4, batches=3) == found
    with pytest.raises(UserError, match="-1 batches"):
        evaluate(model, data, batches=-1)
    assert evaluate(model, data, batch_size=4, batches=99) == evaluate(model, data, batch_size=4)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_resident_memory_stays_flat_over_the_whole_file(tokens: Path, tmp_path: Path):
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

    count = 20_000_000
    with NpyWriter(tmp_path / "valid.npy", np.dtype(np.uint16)) as writer:
        writer.count = count
    os.truncate(tmp_path / "valid.npy", 128 + 2 * count)  # 40 MB without a block on the disk
    model = TransformerLM(tiny_config(tokens, model={"context_length": 1024}).model)
    batches = _batches(open_npy(tmp_path / "valid.npy", "uint16", count), model, 32, 0)
    next(batches)
    before = resident()
    assert max(resident() - before for _ in batches) < 10


def test_the_mode_of_the_model_comes_back(model: TransformerLM, tokens: Path):
    for mode in (True, False):
        model.train(mode)
        evaluate(model, TokenData.open(tokens), batches=1)
        assert model.training is mode
        assert all(p.grad is None for p in model.parameters())


def test_a_rank_without_memory_for_a_sharded_model_does_not_wait_for_the_others(model: TransformerLM, tokens: Path):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(model, TokenData.open(tokens), world=World(0, 2), sharded=True)


def test_tokens_without_text_have_no_bits_per_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = write_tokens(tmp_path / "tokens", n_valid=40)
    np.save(data / "valid.npy", np.full(40, EOT, dtype=np.uint16))
    train(tiny_config(data, steps=1), tmp_path / "run", progress=ConsoleProgress())
    assert "validation loss" in capsys.readouterr().out
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1], parse_constant=pytest.fail)["valid_bits_per_byte"] is None
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "no text" in capsys.readouterr().out


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_evaluate_run_repeats_the_runs_own_number(precision: str, tokens: Path, tmp_path: Path):
    result = train(tiny_config(tokens, eval_batches=0, precision=precision), tmp_path / "run")
    found, step = evaluate_run(tmp_path / "run", device="cpu")
    assert step == 12
    assert found.loss == result.valid_loss
    other = write_tokens(tmp_path / "other", n_valid=300, seed=9)
    assert evaluate_run(tmp_path / "run", device="cpu", data=other)[0].tokens == 299


def test_tokens_of_another_tokenizer_are_refused(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens, steps=1, eval_every=0), tmp_path / "run")
    other = write_tokens(tmp_path / "other", specials=("<|endoftext|>", "<|pad|>"))
    with pytest.raises(UserError, match="another tokenizer"):
        evaluate_run(tmp_path / "run", data=other)


def test_no_validation_tokens(tmp_path: Path):
    directory = write_tokens(tmp_path / "tokens", n_valid=1)
    with pytest.raises(UserError, match="no validation tokens"):
        train(tiny_config(directory), tmp_path / "run")
    assert train(tiny_config(directory, eval_every=0), tmp_path / "run").valid_loss is None
