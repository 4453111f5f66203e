"""Configurations: derived fields, refusals that name the number and the nearest legal value, TOML there and back."""

from dataclasses import replace
from pathlib import Path

import pytest

from groundup.config import SIZES, ModelConfig, OptimConfig, RunConfig, TrainConfig, dump_toml, load_toml, size
from groundup.errors import UserError


def test_derived_model_fields():
    config = ModelConfig(d_model=512, n_heads=16).resolve(vocab_size=10_000)
    assert (config.vocab_size, config.n_kv_heads, config.d_ff) == (10_000, 16, 1344)
    assert ModelConfig(d_model=768, n_heads=12).resolve(10).d_ff == 2048
    assert config.resolve() == config
    assert ModelConfig(vocab_size=7).resolve(vocab_size=9).vocab_size == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 100, "n_heads": 12}, r"d_model 100 .*n_heads 12; the nearest legal d_model is 96"),
        ({"d_model": 36, "n_heads": 12}, r"is 3; .* even: the nearest legal d_model is (24|48)"),
        ({"n_heads": 16, "n_kv_heads": 5}, r"n_kv_heads 5 .*nearest legal value is 4"),
        ({"n_layers": 0}, r"model.n_layers is 0"),
        ({"rope_theta": 0.0}, r"model.rope_theta is 0.0"),
    ],
)
def test_a_wrong_shape_is_refused(fields: dict, message: str):
    with pytest.raises(UserError, match=message):
        replace(ModelConfig(vocab_size=10), **fields).resolve()


@pytest.mark.parametrize(
    ("given", "world", "resolved"),
    [
        ({}, 1, (32, 1, 32)),
        ({"micro_batch_size": 16}, 2, (16, 1, 32)),
        ({"global_batch_size": 64}, 2, (32, 1, 64)),
        ({"global_batch_size": 64, "micro_batch_size": 8}, 2, (8, 4, 64)),
        ({"global_batch_size": 64, "grad_accumulation": 4}, 1, (16, 4, 64)),
        ({"micro_batch_size": 8, "grad_accumulation": 3}, 2, (8, 3, 48)),
        ({"micro_batch_size": 8, "grad_accumulation": 4, "global_batch_size": 64}, 2, (8, 4, 64)),
    ],
)
def test_the_missing_batch_size_is_derived(given: dict, world: int, resolved: tuple):
    train = TrainConfig(steps=1, **given).resolve(context_length=16, world_size=world)
    assert (train.micro_batch_size, train.grad_accumulation, train.global_batch_size) == resolved
    assert train.resolve(16, world) == train


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"global_batch_size": 50, "micro_batch_size": 16}, r"50 .* = 16; .*: 48 and 64"),
        ({"global_batch_size": 9, "micro_batch_size": 16}, r"nearest legal global batch sizes: 16"),
        ({"global_batch_size": 9, "grad_accumulation": 2}, r"nearest legal global batch sizes: 8 and 10"),
        ({"global_batch_size": 64, "micro_batch_size": 16, "grad_accumulation": 2}, r"= 32; leave one of them out"),
        ({"micro_batch_size": -1}, r"micro_batch_size is -1"),
        ({"seed": 2**64}, r"train\.seed is 18446744073709551616; it must be in \[0, 2\^63\)"),
    ],
)
def test_batch_sizes_that_do_not_divide_and_senseless_numbers_are_refused(given: dict, message: str):
    with pytest.raises(UserError, match=message):
        TrainConfig(steps=1, **given).resolve(16)


def test_exactly_one_of_steps_and_tokens():
    assert TrainConfig(tokens=1000, micro_batch_size=4).resolve(16).steps == 16  # 64 tokens a step, rounded up
    with pytest.raises(UserError, match="neither is given"):
        TrainConfig().resolve(16)
    with pytest.raises(UserError, match="1000 tokens make 16 steps, not 7"):
        TrainConfig(steps=7, tokens=1000, micro_batch_size=4).resolve(16)


def test_a_resolved_run_resolves_to_itself_and_survives_toml(tmp_path: Path):
    run = RunConfig(
        model=ModelConfig(d_model=64, n_heads=4),
        optim=OptimConfig(betas=(0.8, 0.99)),
        train=TrainConfig(tokens=5000),
    ).resolve(vocab_size=300)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(run))
    again = load_toml(path, RunConfig)
    assert again == run
    assert again.resolve() == run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nd_modle = 3\n", r'unknown key "model.d_modle" \(did you mean "d_model"\?\)'),
        ("[modell]\n", r'unknown key "modell" \(did you mean "model"\?\)'),
        ('[model]\nd_model = "3"\n', r"model.d_model is '3'; it must be of type int"),
        ("[model]\nd_model = true\n", r"model.d_model is True"),
        ("[optim]\nbetas = [0.9]\n", r"optim.betas needs 2 values, not 1"),
        ('[train]\ndevice = "tpu"\n', r"train.device is 'tpu'; legal: 'auto'"),
        ("model = 3\n", r"model is a table"),
        ("[model\n", r"not a readable TOML file"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, message: str):
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_toml(path, RunConfig)
    with pytest.raises(UserError, match="no such configuration file"):
        load_toml(tmp_path / "absent.toml", RunConfig)


def test_an_integer_is_a_legal_float(tmp_path: Path):
    path = tmp_path / "config.toml"
    path.write_text("[model]\nrope_theta = 500000\n")
    assert load_toml(path, RunConfig).model.rope_theta == 500_000.0


def test_every_named_size_resolves():
    for name, config in SIZES.items():
        assert config.resolve().vocab_size > 0, name
    assert size("2.7b") == size("xl-2026")
    with pytest.raises(UserError, match=r'no model size "smal" \(did you mean "small"'):
        size("smal")


@pytest.mark.parametrize("fields", [{"lr": 0.0}, {"betas": (0.9, 1.0)}, {"grad_clip": -1.0}])
def test_senseless_optimizer_settings_are_refused(fields: dict):
    with pytest.raises(UserError, match=f"optim.{next(iter(fields))}"):
        RunConfig(optim=OptimConfig(**fields), train=TrainConfig(steps=1)).resolve(vocab_size=10)
