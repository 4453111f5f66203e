"""Export and import: against transformers' own Llama and Qwen3, and bit for bit there and back."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import EOT, VOCAB, tiny_config, write_tokens

from groundup.config import ModelConfig
from groundup.config.model import HOW
from groundup.errors import UserError
from groundup.generate import generate
from groundup.model import TransformerLM
from groundup.model.hf import WEIGHTS, from_hf, from_hf_config, join_pairs, split_pairs, to_hf, to_hf_config
from groundup.tokenizer import Tokenizer
from groundup.train import evaluate_run, export_run, import_run, load_run, train
from groundup.train.exchange import EXPORTED
from groundup.train.run_directory import RunDirectory

torch.set_num_threads(1)

SHAPES = {
    "gqa": {},
    "mha-tied": {"n_kv_heads": 4, "tie_embeddings": True},
    "mqa-theta": {"n_kv_heads": 1, "rope_theta": 500.0, "norm_eps": 1e-3, "d_ff": 96},
    "padded": {"vocab_size": 264},
    "qwen3": {"qk_norm": True, "attention": "sdpa", "kernels": "reference"},
}


def no_notes(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module", params=SHAPES)
def run(request: pytest.FixtureRequest, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, so that norm gains are not all one."""
    out = tmp_path_factory.mktemp("run") / "run"
    train(tiny_config(tokens, model=SHAPES[request.param], steps=2, save_every=1, eval_every=0), out)
    return out


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    assert export_run(run, run.parent / "hf") == 2
    return run.parent / "hf"


def test_transformers_gives_the_same_logits_and_ids(run: Path, exported: Path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    qk_norm = load_run(run, device="cpu")[2].model.qk_norm
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    assert theirs.dtype == torch.float32
    ours, tokenizer, config, _ = load_run(run, device="cpu")
    ids = torch.randint(VOCAB, (3, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (EOT, EOT)
    assert theirs.config.max_position_embeddings == 32
    # Greedy text by their own loop, which stops where ours stops and never draws what no token has.
    made = theirs.generate(ids[:1, :5], max_new_tokens=20, do_sample=False, pad_token_id=EOT)[0, 5:].tolist()
    limit = tokenizer.vocab_size
    assert made == list(generate(ours, ids[0, :5].tolist(), 20, 0.0, stop_ids={EOT}, vocab_limit=limit))
    suppressed = theirs.generation_config.suppress_tokens
    assert suppressed == (list(range(VOCAB, 264)) if config.model.vocab_size == 264 else None)


def test_transformers_tokenizer_gives_the_same_ids(exported: Path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    ours = Tokenizer.load(exported / "tokenizer.json")
    for text in ("", "def f(x):\n    return  x", "é日🙂<|endoftext|>and on", " a  b "):
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (EOT, EOT)
    assert theirs.model_max_length == 32


def test_there_and_back_is_bit_equal(run: Path, exported: Path, tokens: Path, tmp_path: Path):
    config = import_run(exported, tmp_path / "back", tokens, no_notes)
    before, tokenizer, trained, _ = load_run(run, device="cpu")
    after, same, saved, step = load_run(tmp_path / "back", device="cpu")
    assert step == 2
    assert saved == config
    assert saved.model == replace(trained.model, **{name: getattr(saved.model, name) for name in HOW})
    assert same.fingerprint == tokenizer.fingerprint
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, weight in before.state_dict().items():
        assert torch.equal(weight, after.state_dict()[name]), name
    # And it is a run: evaluated, exported again to the same files, but not resumed.
    found = evaluate_run(tmp_path / "back", device="cpu")[0].loss
    assert found == pytest.approx(evaluate_run(run, device="cpu")[0].loss, rel=1e-6)  # batches of another size
    again = tmp_path / "again"
    export_run(tmp_path / "back", again)
    for name in EXPORTED - {WEIGHTS}:
        assert (again / name).read_bytes() == (exported / name).read_bytes(), name
    weights = load_file(again / WEIGHTS)
    assert all(torch.equal(weights.pop(name), w) for name, w in load_file(exported / WEIGHTS).items())
    assert not weights
    with pytest.raises(UserError, match="was imported"):
        train(config, tmp_path / "back", resume=True)


def test_a_model_that_transformers_saved_is_read(tmp_path: Path, run: Path, exported: Path):
    """Its own save_pretrained: sharded, in bfloat16, without our step; the weights are theirs exactly."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    shutil.copy(exported / "tokenizer.json", tmp_path / "hf")
    import_run(tmp_path / "hf", tmp_path / "run", None, no_notes)
    ours, _, config, step = load_run(tmp_path / "run", device="cpu")
    assert step == 0
    trained = load_run(run, device="cpu")[2].model
    assert config.model == replace(trained, **{name: getattr(config.model, name) for name in HOW})
    ids = torch.randint(VOCAB, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs.float()(ids).logits, ours(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="knows no token files; give --data"):
        evaluate_run(tmp_path / "run")


def test_a_config_of_transformers_4_is_read():
    table = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
    }
    config = from_hf_config(table, Path("config.json"))
    assert (config.context_length, config.n_kv_heads, config.rope_theta, config.norm_eps) == (2048, 4, 10000.0, 1e-6)
    assert from_hf_config({**table, "rope_theta": 500000}, Path("x")).rope_theta == 500000.0
    nested = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert from_hf_config({**table, **nested}, Path("x")).rope_theta == 7.0


def test_pairs_move_as_rope_asks():
    rows = torch.arange(16.0)[:, None].expand(16, 3)  # two heads of 8
    assert split_pairs(rows, 8)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(join_pairs(split_pairs(rows, 8), 8), rows)


# What is refused


@pytest.mark.parametrize(
    "changes",
    [{"norm": "post"}, {"position": "nope"}, {"ffn": "relu2"}, {"logit_softcap": 5.0}, {"attention_softcap": 5.0}],
)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_an_option_that_the_format_lacks_is_named(changes: dict[str, Any], qk_norm: bool):
    config = ModelConfig(vocab_size=8, qk_norm=qk_norm, **changes).resolve()
    ((name, value),) = changes.items()
    kind = "Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"
    with pytest.raises(UserError, match=f"model.{name} = {value!r} has no place in Hugging Face's {kind}"):
        to_hf_config(config)


def write_foreign(directory: Path, **changes) -> Path:
    """A small directory in Hugging Face's format, its config.json changed; None takes a key away."""
    config = ModelConfig(vocab_size=VOCAB, context_length=8, d_model=16, n_layers=1, n_heads=2, d_ff=8).resolve()
    directory.mkdir()
    table = {**to_hf_config(config), "eos_token_id": EOT, **changes}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in table.items() if v is not None}))
    save_file(to_hf(TransformerLM(config).state_dict(), config), directory / "model.safetensors")
    Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"]).save(directory / "tok")
    shutil.move(directory / "tok" / "tokenizer.json", directory)
    shutil.rmtree(directory / "tok")
    return directory


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "only LlamaForCausalLM and Qwen3ForCausalLM can be imported"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "only LlamaForCausalLM and Qwen3ForCausalLM can be imported",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}}, "rope_type is 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope_type is 'linear'"),
        ({"model_type": "qwen3", "architectures": None, "head_dim": None}, "head_dim is 128"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
            "has no model.layers.0.self_attn.q_norm.weight",
        ),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"hidden_size": None}, "hidden_size is None; it must be of type int"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"num_hidden_layers": 2}, "has no model.layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 0}, "n_layers is 0"),
        ({"intermediate_size": 12}, "mlp.gate_proj.weight of shape (8, 16)"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(changes, says, tmp_path: Path):
    source = write_foreign(tmp_path / "hf", **changes)
    with pytest.raises(UserError) as caught:
        import_run(source, tmp_path / "run", None, no_notes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_damaged_and_missing_files_are_named(tmp_path: Path):
    source = write_foreign(tmp_path / "hf")
    weights, out = source / "model.safetensors", tmp_path / "run"
    whole = weights.read_bytes()

    def refused() -> str:
        with pytest.raises(UserError) as caught:
            import_run(source, out, None, no_notes)
        assert not out.exists()
        return str(caught.value)

    weights.write_bytes(whole[:-100])
    assert "model.safetensors cannot be read" in refused()
    weights.write_bytes(whole)
    tensors = load_file(weights)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}, weights)
    assert "has model.layers.0.self_attn.q_proj.bias, for which" in refused()
    save_file({**tensors, "model.norm.weight": torch.ones(16, dtype=torch.int64)}, weights)
    assert "holds torch.int64" in refused()
    weights.unlink()
    assert "save the model as safetensors" in refused()
    weights.write_bytes(whole)
    (source / "tokenizer.json").rename(source / "away.json")
    assert "tokenizer.json: no such file" in refused()
    (source / "config.json").unlink()
    assert "has no config.json" in refused()


def test_what_the_tokenizer_does_otherwise_is_said(tmp_path: Path):
    source, lines = write_foreign(tmp_path / "hf", eos_token_id=3), []
    table = json.loads((source / "tokenizer.json").read_text())
    table["post_processor"] = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
    (source / "tokenizer.json").write_text(json.dumps(table))
    import_run(source, tmp_path / "run", None, lines.append)
    assert len(lines) == 2
    assert "adds tokens around a text (TemplateProcessing)" in lines[0]
    assert "ends a text with id 3" in lines[1]


def test_only_our_own_export_is_replaced(tokens: Path, tmp_path: Path):
    train(tiny_config(tokens, steps=1, eval_every=0), tmp_path / "run")
    out = tmp_path / "hf"
    export_run(tmp_path / "run", out)
    export_run(tmp_path / "run", out)
    assert not list(tmp_path.glob(".*"))
    (out / "README.md").touch()
    with pytest.raises(UserError, match=r"holds README.md, which export did not write"):
        export_run(tmp_path / "run", out)
    with pytest.raises(UserError, match=r"holds .*which export did not write"):
        export_run(tmp_path / "run", tmp_path / "run")
    downloaded = write_foreign(tmp_path / "downloaded")
    before = (downloaded / "config.json").read_bytes()
    with pytest.raises(UserError, match="groundup did not export"):
        export_run(tmp_path / "run", downloaded)
    assert (downloaded / "config.json").read_bytes() == before
    with pytest.raises(UserError, match="is not free"):
        import_run(out, tmp_path / "run", None, no_notes)
    assert RunDirectory(tmp_path / "run").load_config().train.steps == 1


def test_half_precision_is_widened_exactly():
    config = ModelConfig(vocab_size=8, d_model=8, n_layers=1, n_heads=2, d_ff=8).resolve()
    state = {name: w.bfloat16() for name, w in TransformerLM(config).state_dict().items()}
    back = from_hf(to_hf(state, config), config, Path("x"))
    assert all(torch.equal(back[name], w.float()) and back[name].dtype == torch.float32 for name, w in state.items())
