"""The command: JSON against its schema, tables, no torch; and the throughput's arithmetic."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from groundup.account import Setting, gpu, max_batch, parameters, predict_step, report, trace
from groundup.account.device import Costs, kernel_ms
from groundup.account.hardware import GPUS
from groundup.account.tape import Kernel
from groundup.account.throughput import phase_times, throughput
from groundup.cli import dispatch
from groundup.config import dump_toml, size
from groundup.config.run import RunConfig
from groundup.errors import UserError

SCHEMA = json.loads((files("groundup.account") / "schema.json").read_text())
COMMANDS = [
    ["params", "--size", "small"],
    ["flops", "--size", "gpt2-124m", "--attention", "flash", "--checkpoint-every", "2"],
    ["memory", "--size", "stories-17m", "--precision", "bf16-mixed", "--context", "64"],
    ["memory", "--size", "stories-17m", "--mode", "forward"],
    ["throughput", "--size", "stories-17m", "--gpu", "rtx-4090", "--tokens", "3e8", "--price", "0.5"],
]


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert dispatch(["account", *argv]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_json_is_valid_and_alone_on_standard_output(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run([*argv, "--json"], capsys))
    jsonschema.validate(document, SCHEMA)
    config = size(argv[2]).resolve()
    assert document["parameters.total"] == parameters(config)["total"]
    assert document["command"] == f"account {argv[0]}"


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_tables_state_their_units_and_formulas_their_sources(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    text = run([*argv, "--explain", "--json", str(path)], capsys)
    jsonschema.validate(json.loads(path.read_text()), SCHEMA)
    words = {"params": "V·d", "flops": "multiply-add (MAC) is two", "memory": "GB is 10**9", "throughput": "ms"}
    assert words[argv[0]] in text
    assert text.count("[") >= 3


MODELS = [
    ("bf16-pure", {}),
    ("fp32", {"ffn": "silu", "norm": "none", "qk_norm": True}),
    ("fp16-mixed", {"ffn": "relu2", "norm": "post", "n_kv_heads": 1, "tie_embeddings": True}),
]


@pytest.mark.parametrize(("precision", "changes"), MODELS, ids=str)
def test_every_formulas_numbers_give_its_value(precision: str, changes: dict[str, Any]) -> None:
    config = replace(size("stories-17m"), **changes).resolve()
    device = gpu("h200-measured")
    found = []
    for kernels, mode, attention in (("reference", "train-step", "reference"), ("loss", "forward", "flash")):
        setting = Setting(2, 16, mode, precision, attention, kernels=kernels)
        for one in (
            report.params_report(config),
            report.flops_report(config, setting),
            report.memory_report(config, setting),
            report.throughput_report(config, setting, device, Costs()),
        ):
            found += one.lines
    checked = set()
    for line in found:
        value, unit = re.fullmatch(r"([\d.,]+)(.*)", line.value).groups()
        tolerance = 2e-3 if "." in value else 0
        value = float(value.rstrip(",").replace(",", "")) / (100 if unit == "%" else 1)
        numbers = line.numbers.replace("·", "*").replace("×", "*")
        if re.fullmatch(r"[\d.e+*/() -]+", numbers):
            assert eval(numbers) == pytest.approx(value, rel=1e-12, abs=tolerance), line
            checked.add(line.quantity)
        elif line.quantity == "memory.peak":
            parts = sum(float(word) for word in re.findall(r"\d+\.\d+", numbers))
            assert parts * 2**30 == pytest.approx(value, abs=4 * 0.0005 * 2**30)
    unchecked = {line.quantity for line in found} - checked
    assert all(q == "memory.peak" or q.startswith(("time of one product", "rate of passes")) for q in unchecked)


def test_the_schema_refuses_other_documents() -> None:
    good = {"command": "account params", "config": {}, "units": {}, "parameters.total": 1}
    good["config"] = dict.fromkeys(SCHEMA["properties"]["config"]["required"], 1)
    jsonschema.validate(good, SCHEMA)
    for bad in ({"parameters.total": 0.5}, {"memory.peek": "1"}, {"unknown": 1}, {"command": "account flops"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(good | bad, SCHEMA)


def test_a_runs_configuration_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(RunConfig()))
    with pytest.raises(UserError, match="--vocab-size"):
        dispatch(["account", "params", "--config", str(path)])
    document = json.loads(run(["params", "--config", str(path), "--vocab-size", "300", "--json"], capsys))
    assert document["parameters.embeddings"] == 300 * 512


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["params"], "exactly one of --size and --config"),
        (["params", "--size", "smal"], 'did you mean "small"'),
        (["parms", "--size", "small"], 'did you mean "params"'),
        (["throughput", "--size", "small", "--gpu", "h20"], "did you mean"),
        (["throughput", "--size", "small", "--gpus", "0"], "--gpus is 0"),
        (["throughput", "--size", "small", "--kernel-us", "-1"], "--kernel-us is -1"),
        (["throughput", "--size", "small", "--tokens", "nan"], "--tokens is nan"),
        (["throughput", "--size", "small", "--tokens", "inf"], "--tokens is inf"),
        (["memory", "--size", "small", "--checkpoint-every", "13"], "12 layers"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dispatch(["account", *argv])


@pytest.mark.parametrize("command", ["params", "flops", "memory", "throughput"])
def test_no_command_imports_torch(command: str) -> None:
    code = (
        "import sys; from groundup.cli import main; "
        f"main(['account', '{command}', '--size', 'stories-17m', '--explain']); "
        "assert not {'torch', 'jaxtyping', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_prediction_has_the_benchmarks_names() -> None:
    config = size("stories-17m")
    found = predict_step(config, Setting(2, 64, "train-step", "bf16-mixed"))
    for key in (
        *("parameters.total", "flops.forward", "flops.backward", "memory.parameters", "memory.gradients"),
        *("memory.optimizer", "memory.static", "memory.activations", "memory.peak_forward", "memory.peak_backward"),
        *("memory.peak_optimizer", "memory.peak", "time.forward", "time.backward", "time.optimizer", "time.step"),
    ):
        assert found[key] > 0, key
    assert found["time.step"] == pytest.approx(sum(found[f"time.{p}"] for p in ("forward", "backward", "optimizer")))
    forward = predict_step(config, Setting(2, 64, "forward"))
    assert forward["flops.backward"] == forward["memory.gradients"] == forward["memory.optimizer"] == 0
    assert forward["memory.peak"] < found["memory.peak"]


def test_a_kernels_time_by_hand() -> None:
    """Waves of tiles, a cut k where the waves are few, passes over memory by their kind."""
    device, free = gpu("h200-measured"), 0.0
    tile = 2 * 128 * 128 * 1600 / (51e12 / 132) * 1e3  # ms of one tile with k = 1600 on one multiprocessor
    # 2048 × 1600 results: 16 · 13 tiles = 1.58 waves, 2 to run; in 2 parts 416 half tiles, 3.15 waves, 4 to run; in 4
    # parts 832 quarters, 6.3 waves, 7 to run: 1.75 tiles and 5 passes over the result.
    parts = 7 / 4 * tile + 5 * 2048 * 1600 * 4 / 4273e9 * 1e3
    shape = (1, 2048, 1600, 1600)
    product = Kernel("w", "forward", "", 0, 2 * 2048 * 1600 * 1600, "fp32", shape)
    assert kernel_ms(product, device, "fp32", free) == pytest.approx(min(2 * tile, parts))
    # bf16 at its own rate, and never faster than its traffic; TF32 by the mode
    small = replace(product, nbytes=10**9, dtype="bf16")
    assert kernel_ms(small, device, "bf16-mixed", free) == pytest.approx(1e9 / 4273e9 * 1e3)
    whole = Kernel("w", "forward", "", 0, 2 * 128 * 128 * 128, "fp32", (1, 128, 128, 128))
    assert kernel_ms(whole, device, "tf32", free) == pytest.approx(whole.flops / (390e12 / 132) * 1e3)
    passes = [("mul", True, 1.0), ("foreach_mul", True, 0.86), ("mul", False, 0.55), ("sum", False, 0.55)]
    for name, even, share in passes:
        found = kernel_ms(Kernel(name, "forward", "", 10**9, even=even), device, "fp32", 4.5)
        assert found == pytest.approx(0.0045 + 1e9 / (share * 4273e9) * 1e3)


def test_two_queues_by_hand() -> None:
    """The device waits for the host or runs behind it; the next phase's launches hide behind what is still queued."""
    device = replace(gpu("h200-measured"), bandwidth_gb_s=1.0)  # 1e6 bytes take 1 ms
    work = [("forward", 10), ("forward", 1), ("backward", 1), ("optimizer", 0)]
    kernels = [Kernel("mul", phase, "", ms * 10**6, even=True) for phase, ms in work]
    times = phase_times(kernels, device, "fp32", Costs(launch_us=4000, kernel_us=0))
    # issued at 4, 8, 12, 16 ms; ends at 14, 15, 16, 16
    assert [times[p].total for p in ("forward", "backward", "optimizer")] == pytest.approx([15, 1, 0])
    assert [times[p].idle for p in ("forward", "backward", "optimizer")] == pytest.approx([4, 0, 0])
    slow = phase_times(kernels, device, "fp32", Costs(launch_us=20000, kernel_us=0))
    assert [slow[p].total for p in ("forward", "backward", "optimizer")] == pytest.approx([41, 20, 19])
    inserted = [kernels[0], Kernel("autocast", "forward", "", 10**6, even=True)]
    assert phase_times(inserted, device, "fp32", Costs(20000, 0))["forward"].total == pytest.approx(31)


def test_throughput_by_hand() -> None:
    config = size("small").resolve()
    step = trace(config, Setting(4, 256))
    device = gpu("h200-measured")
    slow, fast = (throughput(config, step, device, Costs(us, 4.5)) for us in (1000.0, 0.0))
    assert slow["forward.launch"] == slow["forward.kernels"] == len([k for k in step.kernels if k.phase == "forward"])
    assert slow["step"] == pytest.approx(sum(slow[f"{p}.launch"] for p in ("forward", "backward", "optimizer")), 1e-3)
    assert fast["forward"] == pytest.approx(fast["forward.matmul"] + fast["forward.elementwise"])
    tokens = 10**9
    table = throughput(config, step, device, tokens=tokens, dollars_per_hour=3.0, gpus=2)
    assert table["days"] * 86400 * table["tokens_per_second"] == pytest.approx(tokens)
    assert table["cost"] == pytest.approx(table["days"] * 24 * 2 * 3.0)
    useful = 4 * 256 * (6 * parameters(config)["matrix"] + 12 * 12 * 768 * 256)
    assert table["mfu"] == pytest.approx(useful / (table["step"] / 1e3) / 51e12)


@pytest.mark.parametrize(("optimizer", "nbytes", "launches"), [("kernel", 28, 2), ("lists", 80, 16)])
def test_what_adamw_moves_for_a_parameter(optimizer: Any, nbytes: int, launches: int) -> None:
    config = size("small").resolve()
    kernels = trace(config, Setting(1, 16, optimizer=optimizer)).kernels
    moved = [k.nbytes for k in kernels if k.phase == "optimizer"]
    assert (sum(moved), len(moved)) == (nbytes * parameters(config)["total"], launches)


def test_largest_batch_fits_and_the_next_does_not() -> None:
    config = size("stories-17m").resolve()
    batch = max_batch(config, Setting(), 4.0, reserve_gib=0.5)
    peaks = [trace(config, Setting(b)).phases["backward"].peak for b in (batch, batch + 1)]
    assert peaks[0] <= 3.5 * 2**30 < peaks[1]
    assert max_batch(config, Setting(), 0.3, reserve_gib=0.2) == 0


def test_every_gpu_says_where_its_figures_come_from() -> None:
    for device in GPUS.values():
        assert device.source
        assert device.bf16_tflops >= device.tf32_tflops >= device.fp32_tflops > 0
        assert device.multiprocessors > 0
        assert device.memory_gib < device.memory_gb * 1e9 / 2**30 * 1.08
