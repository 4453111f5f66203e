"""Ablations on tiny runs: the table is the runs', finished ones stay as they are, failures are rows."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import VOCAB, Recorder, read_metrics, tiny_config, write_tokens

from groundup.cli import main
from groundup.config import RunConfig, dump_toml, load_toml
from groundup.errors import UserError
from groundup.model import TransformerLM, count_parameters
from groundup.report.ablation import ablation_table, write_ablation
from groundup.train import Progress, RunDirectory, train
from groundup.train import ablate as module
from groundup.train.ablate import AXES, Outcome, Variation, ablate, changed, outcome, shortened, variations


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    (tmp_path / "tokens").mkdir()
    return write_tokens(tmp_path / "tokens")


def names(base: RunConfig, *vary: str) -> list[str]:
    return [variation.name for variation in variations(base, vary)]


def test_every_axis_gives_the_other_values_and_each_resolves(tokens: Path):
    base = tiny_config(tokens)
    assert names(base, "norm", "norm") == ["baseline", "norm-post", "norm-none"]
    assert names(base, "rope", "qk_norm", "tie") == ["baseline", "rope-off", "qk_norm-on", "tie-on"]
    assert names(base, "softcap") == ["baseline", "softcap-logit-on", "softcap-attention-on"]
    assert names(base, "optimizer", "size") == ["baseline", "optimizer-muon", "size-half-depth", "size-double-depth"]
    precisions = ["baseline", *(f"precision-{name}" for name in ("bf16-mixed", "fp16-mixed", "bf16-pure"))]
    assert names(base, "precision") == precisions  # no unit of a CPU has tf32
    assert names(replace(base, train=replace(base.train, precision="auto")), "precision") == precisions
    other = changed(base, {"model.position": "nope", "model.qk_norm": True, "model.logit_softcap": 9.0})
    assert names(other, "rope", "qk_norm", "softcap")[1:4] == ["rope-on", "qk_norm-off", "softcap-logit-off"]
    for variation in variations(base, list(AXES)):
        config = changed(base, variation.changes).resolve(VOCAB)
        assert (config == base.resolve(VOCAB)) == (variation.name == "baseline"), variation
    with pytest.raises(UserError, match="qk_norm"):
        variations(base, ["qk_nrom"])


def test_other_feed_forwards_have_about_as_many_parameters(tokens: Path):
    base = changed(tiny_config(tokens), {"model.d_ff": 128})
    for variation in variations(base, ["ffn"])[1:]:
        model = TransformerLM(changed(base, variation.changes).model.resolve(VOCAB))
        assert count_parameters(model) == count_parameters(TransformerLM(base.model.resolve(VOCAB)))
    ungated = changed(tiny_config(tokens), {"model.ffn": "silu", "model.d_ff": 192})
    assert variations(ungated, ["ffn"])[1].changes == {"model.ffn": "swiglu", "model.d_ff": 128}


def test_a_shorter_run_has_a_shorter_warm_up(tokens: Path):
    base = tiny_config(tokens, steps=1000, optim={"warmup_steps": 500}, eval_every=0)
    cut = shortened(base, 60)
    assert (cut.train.steps, cut.train.tokens, cut.optim.warmup_steps) == (60, 0, 6)
    assert cut.train.eval_every > 0
    assert shortened(base, 0).optim.warmup_steps == 500


def test_rows_are_those_of_the_runs_and_a_second_call_only_reads(tokens: Path, tmp_path: Path):
    base, out = tiny_config(tokens, steps=6), tmp_path / "out"
    found = variations(base, ["norm", "optimizer"])
    outcomes = ablate(base, found, out)
    assert outcomes is not None
    train(changed(base, {"model.norm": "post"}), tmp_path / "alone")
    alone = read_metrics(tmp_path / "alone")
    assert read_metrics(out / "norm-post") == alone
    baseline, post, none, muon = outcomes
    assert baseline.change is None
    assert post.valid_loss == alone[-1]["valid_loss"]
    assert post.change == pytest.approx(post.valid_loss - baseline.valid_loss)
    assert none.parameters == baseline.parameters - 5 * 32
    assert muon.steps == 6
    assert muon.tokens_per_second > 0
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    said: list[str] = []
    assert ablate(base, found, out, say=said.append) == outcomes
    assert all("finished before" in line for line in said)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()} == before
    with pytest.raises(UserError, match=r"train\.seed"):
        ablate(replace(base, train=replace(base.train, seed=99)), found, out)


def test_an_interrupted_one_goes_on_to_the_same_result(tokens: Path, tmp_path: Path):
    base = tiny_config(tokens, steps=6)
    found = variations(base, ["tie"])
    started = []

    def watcher() -> Progress:
        started.append(1)
        stop = {3: lambda: os.kill(os.getpid(), signal.SIGINT)}
        return Recorder(stop if len(started) == 2 else {})

    assert ablate(base, found, tmp_path / "cut", watcher) is None
    assert len(read_metrics(tmp_path / "cut" / "tie-on")) == 3
    outcomes = ablate(base, found, tmp_path / "cut", watcher)
    assert len(started) == 3  # the baseline was not trained again
    whole = ablate(base, found, tmp_path / "whole")
    assert [o.valid_loss for o in outcomes] == [o.valid_loss for o in whole]


def test_a_signal_between_two_runs_stops_them(tokens: Path, tmp_path: Path):
    def say(line: str) -> None:
        if line.startswith("tie-on"):
            os.kill(os.getpid(), signal.SIGTERM)

    base = tiny_config(tokens, steps=2)
    assert ablate(base, variations(base, ["tie", "norm"]), tmp_path / "cut", say=say) is None
    assert not (tmp_path / "cut" / "norm-post").exists()


def test_no_run_finds_the_compilations_of_another(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]):
        compiled.append(running[-1])
        return graph.forward

    def double(x: torch.Tensor) -> torch.Tensor:
        return x + x

    def watched(config: RunConfig, out: Path, **keywords):
        running.append(out.name)
        for _ in range(2):
            torch.compile(double, backend=backend)(torch.ones(3))
        return train(config, out, **keywords)

    running: list[str] = []
    monkeypatch.setattr(module, "train", watched)
    ablate(tiny_config(tokens, steps=1), variations(tiny_config(tokens), ["norm"]), tmp_path / "out")
    assert compiled == ["baseline", "norm-post", "norm-none"]


def test_a_variation_that_fails_is_a_row_and_a_failed_baseline_an_error(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = train

    def failing(config: RunConfig, out: Path, **keywords):
        if config.model.norm == "none":
            raise UserError("step 3: the loss is nan")
        return real(config, out, **keywords)

    monkeypatch.setattr(module, "train", failing)
    base = tiny_config(tokens, steps=4)
    outcomes = ablate(base, variations(base, ["norm"]), tmp_path / "out")
    assert [o.failed for o in outcomes] == [None, None, "step 3: the loss is nan"]
    text = ablation_table(outcomes)
    assert "| norm-none" in text.splitlines()[-3]
    assert "norm-none failed after 0 steps: step 3: the loss is nan" in text
    write_ablation(outcomes, tmp_path / "out")
    bad = changed(base, {"model.norm": "none"})
    with pytest.raises(UserError, match="the baseline failed"):
        ablate(bad, variations(bad, ["norm"]), tmp_path / "other")


def test_a_stopped_run_is_not_finished_and_not_failed(tokens: Path, tmp_path: Path):
    base, out = tiny_config(tokens, steps=6, eval_every=2), tmp_path / "out"
    found = variations(base, ["tie", "norm"])
    whole, tied = (changed(base, variation.changes) for variation in found[:2])
    train(whole, out / "baseline")
    train(tied, out / "tie-on", progress=Recorder({4: lambda: os.kill(os.getpid(), signal.SIGINT)}))
    train(changed(base, {"model.norm": "post"}), out / "norm-post")
    metrics = out / "norm-post" / "metrics.jsonl"  # killed between its last step and the evaluation
    metrics.write_text("".join(line for line in metrics.open() if '"step": 6, "valid_loss"' not in line))

    def row(variation: Variation, config: RunConfig, failed: str | None = None) -> Outcome:
        return outcome(variation, config, RunDirectory(out / variation.name), failed, 3.0)

    outcomes = [row(found[0], whole), row(found[1], tied), *(row(v, changed(base, v.changes)) for v in found[2:])]
    assert len(read_metrics(out / "tie-on")) > 4  # it has evaluations, but none from its end
    text = ablation_table(outcomes)
    lines = {line.split()[1]: line for line in text.splitlines()[2:6]}
    assert "not finished (4 of 6 steps)" in lines["tie-on"]
    assert "not finished (6 of 6 steps, not evaluated)" in lines["norm-post"]
    assert "not finished (0 of 6 steps)" in lines["norm-none"]
    assert "not finished" not in lines["baseline"]
    assert "failed" not in text
    assert [o.change is None for o in outcomes] == [False, True, True, True]
    text = ablation_table([outcomes[0], row(found[1], tied, "step 5: the loss is nan")])
    assert "| failed |" in " ".join(text.split())
    assert "tie-on failed after 4 steps: step 5: the loss is nan" in text


def test_a_run_that_stopped_early_is_finished_and_counts_its_best_loss(tokens: Path, tmp_path: Path):
    base = tiny_config(tokens, steps=12, eval_every=2, early_stopping=1, min_delta=10.0)
    found = variations(base, [])
    first = ablate(base, found, tmp_path / "out")
    assert first[0].steps < 12
    losses = [row["valid_loss"] for row in read_metrics(tmp_path / "out" / "baseline") if "valid_loss" in row]
    assert first[0].valid_loss == losses[0]
    said: list[str] = []
    assert ablate(base, found, tmp_path / "out", say=said.append) == first
    assert "finished before" in said[0]


def test_the_command_ends_in_one_table_and_one_plot(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    raw = load_toml_config(tokens, tmp_path / "recipe.toml")
    assert raw.train.steps == 12
    words = "ablate recipe.toml --vary qk_norm,norm_decay --steps 5 --out table"
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    table = (tmp_path / "table" / "ablation.md").read_text()
    assert table in out
    assert table.splitlines()[2].split()[1] == "baseline"
    rows = json.loads((tmp_path / "table" / "ablation.json").read_text())
    assert [row["name"] for row in rows] == ["baseline", "qk_norm-on", "norm_decay-on"]
    assert all(row["steps"] == 5 and math.isfinite(row["valid_loss"]) for row in rows)
    assert (tmp_path / "table" / "ablation.png").read_bytes().startswith(b"\x89PNG")
    assert "qk_norm-on (2 of 3): model.qk_norm = True" in err


def load_toml_config(tokens: Path, path: Path) -> RunConfig:
    path.write_text(dump_toml(tiny_config(tokens)))
    return load_toml(path, RunConfig)
