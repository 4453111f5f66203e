"""Every benchmark on tiny sizes: valid JSON, and numbers that an independent count confirms."""

import getpass
import json
import os
import socket
import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from bench_tools import TINY, backends_of_all_reduce, tiny_cells, tiny_cells_of, validate

from groundup.account import Setting, predict_step
from groundup.bench import harness
from groundup.bench.benchmark import config_of, find, summaries
from groundup.bench.cells import document
from groundup.bench.suites import attention, loss, mixed_precision, norm, optimizer, step
from groundup.bench.suites import generate as generation
from groundup.config import size
from groundup.errors import UserError
from groundup.generate import decode, generate
from groundup.model import TransformerLM
from groundup.parallel.launch import spawn

MANY = ("allreduce", "ddp", "sharding")


@pytest.fixture(scope="module")
def of_two_ranks():
    """The benchmarks of many processes, in one start of two."""
    return spawn(tiny_cells_of, 2, MANY)[0]


@pytest.mark.parametrize("name", sorted(TINY))
def test_cells_are_valid_and_complete(name, request):
    check_cells(name, request.getfixturevalue("of_two_ranks")[name] if name in MANY else tiny_cells(name))


def test_a_seed_seeds_what_many_processes_measure(of_two_ranks):
    zero, one = (of_two_ranks[name][0]["metrics"]["loss"] for name in ("ddp", "seed"))
    assert zero != one


def test_an_all_reduce_is_measured_through_the_back_end_that_it_names():
    assert spawn(backends_of_all_reduce, 2) == [(["ok", "ok"], {"gloo"}, ["ok"])] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_many_processes_are_started_for_a_cell(name):
    check_cells(name, tiny_cells(name))


def check_cells(name, cells):
    assert [cell["status"] for cell in cells] == ["ok"] * len(cells), cells
    validate(document(name, cells))
    columns = set(find(name).columns.values())
    assert any(columns & cell["metrics"].keys() for cell in cells)


def test_every_benchmark_is_tested_here():
    assert sorted(TINY) == sorted(summaries())
    assert all(summaries().values())


def test_stamps_name_no_machine_person_or_path():
    text = json.dumps(tiny_cells("mixed-precision"))
    for word in (socket.gethostname(), getpass.getuser(), os.getcwd()):
        if len(word) > 4:  # "root" or a one-letter host would be found in ordinary words
            assert word not in text


def test_step_counts_what_the_shape_says():
    modes = "forward,forward-backward,train-step"
    cells = {cell["parameters"]["mode"]: cell for cell in tiny_cells("step", mode=modes)}
    work = predict_step(size("tiny"), Setting(4, 8))
    total = work["parameters.total"]
    for mode, cell in cells.items():
        metrics = cell["metrics"]
        assert metrics["parameters.total"] == total
        assert metrics["memory.parameters"] == 4 * total
        assert metrics["memory.gradients"] == (0 if mode == "forward" else 4 * total)
        assert metrics["memory.optimizer"] == (8 * total if mode == "train-step" else 0)
        assert metrics["flops.forward"] == work["flops.forward"]
        assert metrics.get("flops.backward") == (None if mode == "forward" else work["flops.backward"])
        assert metrics["memory.peak"] is None
        assert "CPU" in cell["notes"]["memory"]
    assert cells["train-step"]["metrics"]["time.optimizer"]["n"] == 2
    assert "time.backward" not in cells["forward"]["metrics"]
    assert cells["forward"]["environment"]["grad_mode"] == "no_grad"
    assert cells["train-step"]["environment"]["grad_mode"] == "grad"


def test_step_time_is_the_sum_of_its_phases():
    metrics = tiny_cells("step")[0]["metrics"]
    parts = sum(metrics[f"time.{phase}"]["mean"] for phase in ("forward", "backward", "optimizer"))
    assert metrics["time.step"]["mean"] == pytest.approx(parts)
    assert metrics["tokens_per_second"] == pytest.approx(4 * 8 / metrics["time.step"]["median"] * 1e3)


def test_warmup_zero_says_so_and_has_its_own_process():
    options = step.Options(device="cpu", size="tiny", warmup="0,1,2")
    groups = [step.group(parameters) for parameters in step.cells(options)]
    assert len(set(groups)) == 4  # three contexts cold, the rest together
    cell = tiny_cells("step", warmup="0", mode="forward")[0]
    assert cell["environment"]["step"] == "includes the first step"
    assert cell["metrics"]["time.first_step"] in (cell["metrics"]["time.step"][end] for end in ("min", "max"))


def test_bf16_is_autocast_over_float32_weights():
    subject = step.Subject(
        step.cells(step.Options(device="cpu", size="tiny", context="8", precision="bf16"))[0], torch.device("cpu")
    )
    seen = []
    subject.model.layers[0].ffn.w2.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    subject.forward().backward()
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in subject.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in subject.model.parameters()} == {torch.float32}


def test_a_config_file_takes_the_place_of_a_size(tmp_path):
    path = tmp_path / "narrow.toml"
    path.write_text("[model]\nvocab_size = 32\nd_model = 16\nn_heads = 2\nn_layers = 1\n")
    cells = step.cells(step.Options(device="cpu", config=str(path), context="8"))
    assert cells[0]["size"] == "narrow"
    assert config_of(cells[0]).d_model == 16


def test_accumulation_is_the_courses_and_numpys():
    found = mixed_precision.accumulate(torch.device("cpu"))
    assert [round(value, 4) for value in found.values()] == [10.0001, 9.9531, 10.0021, 10.0021]
    total = np.float16(0)
    for _ in range(1000):
        total = np.float16(total + np.float16(0.01))
    assert found["sum.fp16_of_fp16"] == float(total)


def test_autocast_dtypes():
    found = mixed_precision.dtypes(torch.device("cpu"), torch.bfloat16)
    assert found["dtype.parameters"] == found["dtype.gradients"] == found["dtype.loss"] == "float32"
    assert found["dtype.fc1"] == found["dtype.logits"] == "bfloat16"


def test_norms_compute_what_they_are_called():
    x = torch.randn(5, 8, dtype=torch.float64)
    gain, bias = (torch.nn.Parameter(torch.rand(8, dtype=torch.float64)) for _ in range(2))
    rms = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
    centred = x - x.mean(-1, keepdim=True)
    layer = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias
    for name, truth in (("eager", rms), ("rms_norm", rms), ("layer_norm", layer)):
        torch.testing.assert_close(norm.norm_function(name, 8, gain, bias)(x), truth)


def test_losses_compute_what_they_are_called():
    x, weight = torch.randn(6, 8), torch.randn(11, 8)
    targets = torch.randint(11, (6,))
    truth = torch.nn.functional.cross_entropy((x.double() @ weight.double().T), targets)
    for name in ("eager", "chunked"):
        torch.testing.assert_close(loss.loss_function(name)(x, weight, targets).double(), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(find_spec("liger_kernel") is not None, reason="Liger is installed")
def test_a_peer_that_is_not_installed_is_said_in_a_line():
    for name in ("norm", "loss"):
        (cell,) = tiny_cells(name, implementation="liger")
        assert cell["status"] != "ok"
        assert "liger needs the package liger_kernel" in cell["message"]


def test_bandwidth_is_bytes_over_time():
    metrics = tiny_cells("norm", implementation="eager")[0]["metrics"]
    bytes_of_x = 4 * 8 * 2  # rows × hidden × bf16
    assert metrics["bandwidth.forward"] == pytest.approx(2 * bytes_of_x / metrics["time.forward"]["median"] / 1e6)
    assert metrics["bandwidth.backward"] == pytest.approx(3 * bytes_of_x / metrics["time.backward"]["median"] / 1e6)
    update = tiny_cells("optimizer", implementation="fused")[0]["metrics"]
    seconds = update["time.update"]["median"] / 1e3
    assert update["bandwidth.update"] == pytest.approx(28 * update["parameters.total"] / seconds / 1e9)


def test_muons_cells_do_what_they_are_called():
    """On equal matrices: torch's Muon moves them as ours; its part alone is Newton-Schulz of the gradients."""
    moved = {}
    for name in ("muon", "torch-muon"):
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(s, generator=generator).requires_grad_() for s in ((16, 24), (24, 16))]
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        before = [p.detach().clone() for p in params]
        optimizer.updater(name, params)()
        moved[name] = [(p - b).detach() for p, b in zip(params, before, strict=True)]
    for ours, theirs in zip(moved["muon"], moved["torch-muon"], strict=True):
        assert (ours - theirs).norm() < 0.05 * theirs.norm()  # theirs iterates in bfloat16
    for name in ("newton-schulz", "newton-schulz-plain"):
        for out in optimizer.updater(name, params)():
            values = torch.linalg.svdvals(out.float())
            assert 0.6 < values.min() < values.max() < 1.3
    cells = tiny_cells("optimizer", implementation="muon,newton-schulz")
    hidden = sum(p.numel() for p in TransformerLM(size("tiny")).layers.parameters() if p.ndim == 2)
    assert [cell["metrics"]["parameters.total"] for cell in cells] == [hidden] * 2
    assert all(cell["metrics"]["bandwidth.update"] is None and "bandwidth" in cell["notes"] for cell in cells)


def test_generation_rates_and_bound_are_what_the_shape_and_the_clock_say():
    """Bytes counted on the model's own tensors: all weights but the unread rows of the embedding, and the keys seen."""
    model, bandwidth = TransformerLM(size("tiny")), 4.8e12
    held = 8 + 3 + 2  # prompt, warm-up, the middle one of three timed steps
    for cell in tiny_cells("generate", hardware="h200"):
        rows, metrics = cell["parameters"]["batch_size"], cell["metrics"]
        weights = sum(p.nbytes for p in model.parameters()) - model.token_embeddings.weight.nbytes + rows * 32 * 4
        cache = 2 * 2 * rows * 32 * held * 4  # keys and values, two layers, 32 numbers a token
        assert metrics["memory.read_per_step"] == weights + cache
        assert metrics["time.bound"] == pytest.approx((weights + cache) / bandwidth * 1e3)
        assert metrics["bound_fraction"] == pytest.approx(metrics["time.bound"] / metrics["time.step"]["median"])
        assert metrics["tokens_per_second"] == pytest.approx(rows / metrics["time.step"]["median"] * 1e3)
        assert metrics["prefill_tokens_per_second"] == pytest.approx(rows * 8 / metrics["time.prefill"]["median"] * 1e3)
        assert metrics["memory.kv_cache"] == 2 * 2 * rows * 32 * 64 * 4
    cell = tiny_cells("generate", batch="1")[0]
    assert cell["environment"]["method"] == "prefill perf_counter; step " + harness.ARRIVAL_METHOD
    assert cell["metrics"]["bound_fraction"] is None
    assert "--hardware" in cell["notes"]["bound"]


@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_generation_is_measured_on_the_text_that_the_engine_gives(compiled, monkeypatch):
    monkeypatch.setattr(decode, "compiled_decode", lambda on_gpu: decode.decode)  # compiling it takes a minute
    for batch in ("1", "3"):
        options = generation.Options(device="cpu", **TINY["generate"] | {"batch": batch, "compile": compiled})
        subject = generation.Subject(generation.cells(options)[0], torch.device("cpu"))
        made = []
        prefill = partial(subject.prefill, lambda name: None)
        for move in (prefill, subject.step, subject.step, prefill, subject.step):
            move()
            made.append(list(subject.tokens))
        alone = [list(generate(subject.model, prompt, 3, temperature=0)) for prompt in subject.prompts]
        assert made == [list(tokens) for tokens in [*zip(*alone, strict=True)][:3]] + made[:2]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("step", {"precision": "fp32,fp8"}, '--precision: no "fp8"'),
        ("step", {"context": "8,x"}, '--context: "x"'),
        ("step", {"context": ","}, "--context: the list is empty"),
        ("step", {"size": "smal"}, 'did you mean "small"'),
        ("step", {"steps": 0}, "--steps is 0"),
        ("attention", {"warmup": 0}, "--warmup is 0"),
        ("generate", {"prompt": "62"}, "has a context of 64: give --prompt at most 58"),
        ("generate", {"hardware": "h20"}, 'no GPU "h20"'),
        ("norm", {"implementation": "triton"}, '--implementation: no "triton"'),
    ],
)
def test_bad_options_are_one_line(name, changes, words):
    with pytest.raises(UserError) as error:
        tiny_cells(name, **changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(UserError, match="no GPU"):
        step.cells(step.Options(device="cuda"))


def test_every_attention_implementation_gives_the_eager_result():
    options = attention.Options(device="cpu", d="16", context="64", batch="2", heads="3", causal="no,yes")
    cells = {cell["causal"]: cell for cell in attention.cells(options)}
    q, k, v = (torch.randn(2, 3, 64, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    for cell in cells.values():
        expected = attention.implementation(cell | {"implementation": "eager"}, torch.device("cpu"))(q, k, v)
        for name in ("flash-torch", "sdpa-flash"):  # the others need a GPU, or a minute of compiling
            found = attention.implementation(cell | {"implementation": name}, torch.device("cpu"))(q, k, v)
            torch.testing.assert_close(found, expected)


def test_attention_on_a_device_that_a_kernel_lacks_is_an_error_cell():
    (cell,) = tiny_cells("attention", implementation="flash-triton")
    assert cell["status"] == "error"
    assert "flash-triton" in cell["message"]


@pytest.mark.parametrize(
    ("forward", "deterministic", "kept"),
    [(True, "no", {"forward", "backward", "total"}), (True, "yes", {"forward"}), (False, "no", None)],
)
def test_no_time_of_other_kernels_is_kept_as_flash_hoppers(forward, deterministic, kept, monkeypatch):
    """Plain PyTorch in place of both families of kernels; which of them runs is attention()'s own choice."""
    from groundup.kernels import flash_hopper, flash_triton

    module = sys.modules["groundup.kernels.attention"]

    def forward_of(q, k, v, rule):
        out, lse = module.reference(q, k, v, rule, None)
        return flash_triton.rows_first(*out.shape, like=q).copy_(out), lse

    def backward_of(d_out, d_lse, q, k, v, *_):
        return tuple(flash_triton.rows_first(*x.shape, like=x).zero_() for x in (q, k, v))

    for kernels in (flash_hopper, flash_triton):
        monkeypatch.setattr(kernels, "attention_forward", forward_of)
        monkeypatch.setattr(kernels, "attention_backward", backward_of)
    monkeypatch.setattr(module, "runs_triton", lambda x: True)
    monkeypatch.setattr(flash_hopper, "obstacle", lambda *_: "")
    monkeypatch.setattr(flash_hopper, "note_fallback", lambda *_: None)
    monkeypatch.setattr(flash_hopper, "pays", lambda *_: forward)
    (cell,) = tiny_cells("attention", implementation="flash-hopper", d="64", deterministic=deterministic)
    if kept is None:
        assert cell["status"] == "error"
        assert "--implementation flash-triton measures what runs" in cell["message"]
        return
    assert {name[5:] for name, value in cell["metrics"].items() if name.startswith("time.") and value} == kept
    assert ("backward" in cell["notes"]) == (deterministic == "yes")
    assert flash_triton.attention_backward is backward_of
    (plain,) = tiny_cells("attention", implementation="flash-triton")
    assert plain["metrics"]["time.backward"]


def test_step_measures_the_ways_of_computing():
    how = {"attention": "sdpa", "kernels": "loss", "checkpoint": "0,1"}
    plain, again = tiny_cells("step", mode="forward-backward", **how)
    assert (plain["status"], again["status"]) == ("ok", "ok")
    assert again["parameters"]["checkpoint_activations"] == 1
    assert "flops.forward" not in plain["metrics"]
    (counted,) = tiny_cells("step", mode="forward-backward", checkpoint="1")
    expected = predict_step(size("tiny"), Setting(4, 8, "forward-backward", checkpoint_every=1))
    assert counted["metrics"]["flops.backward"] == expected["flops.backward"] + expected["flops.recompute"]
    old = {k: v for k, v in plain["parameters"].items() if k not in ("attention", "kernels", "norm")}
    assert (config_of(old).attention, config_of(old).kernels) == ("reference", "reference")
