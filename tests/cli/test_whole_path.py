"""Text → tokenizer → token files → run → resumed run → numbers, text and picture, by the commands of the README."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from groundup import Tokenizer
from groundup.cli import main
from groundup.config import RunConfig, load_toml


@pytest.fixture
def here(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(path)
    return path


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in rows(run) if "loss" in row]


def test_tokenizer_and_token_files_hold_the_text(here: Path):
    tokenizer = Tokenizer.load("tok")
    assert tokenizer.vocab_size == 300
    assert list(tokenizer.special_tokens) == ["<|endoftext|>"]
    for split in ("train", "valid"):
        text = Path(f"{split}.txt").read_text()
        assert tokenizer.decode(np.load(f"tokens/{split}.npy").tolist()) == text + "<|endoftext|>"


def test_the_run_is_complete_and_says_what_it_derived(here: Path):
    config = load_toml(Path("run/config.toml"), RunConfig)
    assert (config.model.vocab_size, config.model.d_ff, config.train.global_batch_size) == (300, 64, 4)
    assert [step for step, _ in losses(here / "run")] == list(range(1, 13))
    assert [row["step"] for row in rows(here / "run") if "valid_loss" in row] == [6, 12]
    assert sorted(p.name for p in Path("run/checkpoints").iterdir()) == ["step-00000006", "step-00000012"]


def test_a_run_cut_at_a_checkpoint_goes_on_bit_for_bit(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    cut = tmp_path / "cut"
    shutil.copytree("run", cut)
    shutil.rmtree(cut / "checkpoints" / "step-00000012")
    # Flags equal to the saved configuration, and the one that adds the token files, are accepted.
    assert main(["train", "--out", str(cut), "--resume", "--data", "tokens", "--model.d-model", "32"]) == 0
    said = capsys.readouterr().out
    assert "going on at step 7" in said
    assert "4 sequences = micro-batch 4 × accumulation 1 × world size 1" in said
    assert losses(cut) == losses(here / "run")


def test_evaluate_gives_a_card_and_json(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", "run", "--json", str(tmp_path / "e.json")]) == 0
    card = capsys.readouterr().out
    result = json.loads((tmp_path / "e.json").read_text())
    for name in ("loss", "perplexity", "bits per byte"):
        assert f"\n{name} " in card
    tokens = np.load("tokens/valid.npy")
    size = len(Path("valid.txt").read_text().replace("<|endoftext|>", ""))
    assert result["step"] == 12
    assert result["tokens"] == len(tokens) - 1
    assert result["perplexity"] == pytest.approx(np.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / np.log(2) * len(tokens) / size, rel=1e-3)
    assert main(["evaluate", "run", "--step", "6", "--data", "tokens", "--json"]) == 0
    earlier = json.loads(capsys.readouterr().out)
    assert earlier["step"] == 6
    assert earlier["loss"] > result["loss"]


def test_evaluate_by_document_counts_the_texts_bytes(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["evaluate", "run", "--by-document", "--json", str(tmp_path / "d.json")]) == 0
    card = capsys.readouterr().out
    result = json.loads((tmp_path / "d.json").read_text())
    texts = Path("valid.txt").read_text().split("<|endoftext|>")
    documents = result["documents"]
    assert [document["bytes"] for document in documents] == [len(text.encode()) for text in texts]
    assert all(text.startswith(document["beginning"]) for text, document in zip(texts, documents, strict=True))
    losses = [document["loss"] for document in documents]
    assert result["mean_loss"] == pytest.approx(np.mean(losses))
    assert result["median_loss"] == pytest.approx(np.median(losses))
    assert [losses[i] for i in result["worst"]] == sorted(losses, reverse=True)[:5]
    assert f"worst 1        {max(losses):.4f} over" in card
    nats = sum(document["loss"] * document["tokens"] for document in documents)
    assert result["bits_per_byte"] == pytest.approx(nats / np.log(2) / sum(len(text.encode()) for text in texts))


def test_generate_continues_the_prompt_and_repeats_itself(here: Path, capsys: pytest.CaptureFixture[str]):
    line = ["generate", "run", "--prompt", "Once upon", "--max-tokens", "8", "--top-p", "0.9", "--temperature", "0.8"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*line, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("Once upon")
    assert main(["generate", "run", "--max-tokens", "30", "--top-k", "5"]) == 0
    assert "past the context of 16 tokens" in capsys.readouterr().err


def test_generate_in_bf16(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    import groundup.generate

    plain, seen = groundup.generate.generate_text, []

    def watched(model, *args, **settings):
        seen.append({weight.dtype for weight in model.parameters()})
        return plain(model, *args, **settings)

    monkeypatch.setattr(groundup.generate, "generate_text", watched)
    line = ["generate", "run", "--prompt", "Once upon", "--max-tokens", "8", "--temperature", "0"]
    assert main([*line, "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.startswith("Once upon")
    assert main(line) == 0
    assert seen == [{torch.bfloat16}, {torch.float32}]
    assert main([*line, "--dtype", "fp64"]) == 2


def test_generate_takes_many_prompts_at_once(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "p.txt").write_text("Once upon\nThe old fox sat\n\n")
    line = ["generate", "run", "--max-tokens", "9", "--min-p", "0.01"]
    assert main([*line, "--prompts", str(tmp_path / "p.txt"), "--seed", "4", "--json"]) == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert [row["prompt"] for row in texts] == ["Once upon", "The old fox sat", ""]
    for i, row in enumerate(texts):
        assert main([*line, "--prompt", row["prompt"], "--seed", str(4 + i)]) == 0
        assert capsys.readouterr().out == row["prompt"] + row["text"] + "\n"
    assert main([*line, "--prompts", str(tmp_path / "p.txt"), "--seed", "4"]) == 0
    assert capsys.readouterr().out.split("\n\n---\n\n")[1] == texts[1]["prompt"] + texts[1]["text"]


def test_export_and_import_keep_the_models_words(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hf, back = str(tmp_path / "hf"), str(tmp_path / "back")
    assert main(["export", "run", "--out", hf]) == 0
    assert main(["import", hf, "--out", back, "--data", "tokens"]) == 0
    assert "1 layers of 32, 2 heads over 2, context 16, vocabulary 300" in capsys.readouterr().out
    said = []
    for run in ("run", back):
        assert main(["generate", run, "--prompt", "Once", "--max-tokens", "9"]) == 0
        said.append(capsys.readouterr().out)
        assert main(["evaluate", run, "--json"]) == 0
        said.append(round(json.loads(capsys.readouterr().out)["loss"], 5))
    assert said[:2] == said[2:]


def test_plot_writes_a_png(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for x in ("step", "tokens", "time"):
        assert main(["plot", "run", "--x", x, "--out", str(tmp_path / f"{x}.png")]) == 0
        assert (tmp_path / f"{x}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["plot", "run"]) == 0
    assert capsys.readouterr().out.endswith("run/loss.png\n")


def test_one_file_is_split_by_document(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = ["tokenize", "train.txt", "--tokenizer", "tok", "--valid-fraction", "0.1", "--out", str(tmp_path / "t")]
    assert main(line) == 0
    meta = json.loads((tmp_path / "t" / "meta.json").read_text())
    assert [meta["splits"][split]["documents"] for split in ("train", "valid")] == [252, 28]
    assert main(line) == 0  # one of our making is replaced


def test_fewer_merges_than_asked_is_a_note(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "short.txt").write_text("ab ab ab")
    out = tmp_path / "tok"
    assert main(["tokenizer", "train", str(tmp_path / "short.txt"), "--vocab-size", "999", "--out", str(out)]) == 0
    err = capsys.readouterr().err
    assert err.startswith("groundup: note: ")
    assert Tokenizer.load(out).vocab_size == 256 + 2 + 1


def test_invalid_bytes_are_replaced_and_counted_when_asked(here: Path, tmp_path: Path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"good text \xff\xfe more good text\n" * 3)
    bad, tok, out = (str(tmp_path / name) for name in ("bad.txt", "tok", "tokens"))
    assert main(["tokenizer", "train", bad, "--vocab-size", "270", "--out", tok, "--errors", "replace"]) == 0
    assert "6 invalid" in capsys.readouterr().err
    assert main(["tokenize", bad, "--tokenizer", tok, "--out", out, "--errors", "replace"]) == 0
    assert "6 invalid" in capsys.readouterr().err


def test_flags_beat_the_file_and_the_file_beats_the_size(tmp_path: Path):
    from groundup.cli.train import parse_args

    file = tmp_path / "c.toml"
    file.write_text("[model]\nn_layers = 3\nd_model = 64\n[train]\ntokens = 5000\ncompile = true\n")
    line = ["--out", "x", "--config", str(file), "--size", "small", "--model.n-layers", "2", "--data", "d"]
    run = parse_args(line, "groundup train").run
    assert (run.model.n_layers, run.model.d_model, run.model.n_heads) == (2, 64, 12)
    assert (run.data.path, run.train.tokens, run.train.compile) == ("d", 5000, True)
    # The length said last stands in for the other one.
    run = parse_args([*line, "--train.steps", "7", "--train.no-compile"], "groundup train").run
    assert (run.train.steps, run.train.tokens, run.train.compile) == (7, 0, False)
    assert parse_args([*line, "--train.compile"], "groundup train").run.train.compile


def test_resume_lays_flags_over_the_saved_run(here: Path):
    from groundup.cli.train import parse_args

    saved = load_toml(Path("run/config.toml"), RunConfig)
    assert parse_args(["--out", "run", "--resume"], "groundup train").run == saved
    run = parse_args(["--out", "run", "--resume", "--optim.lr", "0.5"], "groundup train").run
    assert (run.optim.lr, run.model) == (0.5, saved.model)
