"""The loss picture: its numbers against brute force, its pixels where a curve must be."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from groundup.errors import UserError
from groundup.report import plot_runs
from groundup.report.plots import COLOURS, _loss_ticks, moving_average, short_names, thinned


def make_run(directory, losses, every=10, valid_offset=0.1, **without):
    directory.mkdir(parents=True)
    with open(directory / "metrics.jsonl", "w") as file:
        for step, loss in enumerate(losses, start=1):
            row = {"step": step, "loss": loss, "tokens": step * 512, "tokens_per_second": 1024}
            file.write(json.dumps({k: v for k, v in row.items() if k not in without}) + "\n")
            if every and step % every == 0:
                file.write(json.dumps({"step": step, "valid_loss": loss + valid_offset}) + "\n")
    return directory


def curve(n, floor=2.0, seed=0):
    noise = np.random.default_rng(seed).normal(0, 0.05, n)
    return (floor + 6 * np.exp(-np.arange(n) / (n / 8)) + noise).tolist()


def pixels_near(picture, colour):
    """How many pixels have exactly this colour."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return int((np.abs(picture[..., :3] - rgb).max(-1) < 0.01).sum())


@given(st.lists(st.one_of(st.floats(-100, 100), st.just(math.nan), st.just(math.inf)), max_size=40), st.integers(1, 9))
def test_moving_average_equals_brute_force(values, half_width):
    array = np.array(values, dtype=np.float64)
    got = moving_average(array, half_width)
    for i in range(len(values)):
        half = min(half_width, i)
        window = [v for v in values[i - half : i + half + 1] if math.isfinite(v)]
        if window:
            assert got[i] == pytest.approx(math.fsum(window) / len(window), rel=1e-9, abs=1e-9)
        else:
            assert math.isnan(got[i])


@given(st.integers(1, 300), st.integers(1, 30), st.integers(0, 99))
def test_thinning_keeps_order_and_extremes(n, buckets, seed):
    y = np.random.default_rng(seed).normal(size=n)
    x = np.arange(n, dtype=np.float64)
    tx, ty = thinned(x, y, buckets)
    assert len(tx) <= max(2 * buckets, 1)
    assert (np.diff(tx) > 0).all()
    assert ty.min() == y.min()
    assert ty.max() == y.max()
    assert (y[tx.astype(int)] == ty).all()


def test_thinning_leaves_out_what_is_not_a_number():
    x, y = thinned(np.array([1.0, 2, 3, np.nan]), np.array([5.0, np.nan, np.inf, 1]))
    assert x.tolist() == [1.0]
    assert y.tolist() == [5.0]


def test_names_are_as_short_as_they_can_be(tmp_path):
    a, b, c = tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "other"
    assert short_names([a, b, c]) == ["x/run", "y/run", "other"]
    assert short_names([a]) == ["run"]
    assert short_names([a, a]) == ["run", "run"]


@given(st.floats(1e-3, 50), st.floats(1.001, 30))
def test_a_loss_axis_has_enough_ticks_and_not_too_many(low, ratio):
    ticks = [t for t in _loss_ticks(low, low * ratio) if low <= t <= low * ratio]
    assert 2 <= len(ticks) <= 12


@pytest.mark.parametrize("x", ["step", "tokens", "time"])
def test_runs_are_drawn_in_their_colours(tmp_path, x):
    one = make_run(tmp_path / "one", curve(300))
    two = make_run(tmp_path / "two", curve(200, 3.0, seed=1))
    plot_runs([one, two], tmp_path / "loss.png", x=x)
    picture = imread(tmp_path / "loss.png")
    assert picture.shape[0] > 600
    assert picture.shape[1] > 1000
    assert pixels_near(picture, COLOURS[0]) > 500
    assert pixels_near(picture, COLOURS[1]) > 500
    assert pixels_near(picture, COLOURS[2]) == 0


def test_the_curve_falls_from_the_upper_left_to_the_lower_right(tmp_path):
    plot_runs([make_run(tmp_path / "one", curve(400), every=0)], tmp_path / "loss.png")
    picture = imread(tmp_path / "loss.png")
    rgb = np.array([int(COLOURS[0][i : i + 2], 16) / 255 for i in (1, 3, 5)])
    rows, columns = np.nonzero(np.abs(picture[..., :3] - rgb).max(-1) < 0.01)
    inside = columns < 0.65 * picture.shape[1]  # the legend is to the right of that
    first, last = columns[inside].min(), columns[inside].max()
    assert rows[inside & (columns < first + 8)].min() < 0.15 * picture.shape[0]
    assert rows[inside & (columns > last - 8)].max() > 0.7 * picture.shape[0]


@pytest.mark.parametrize(
    "losses",
    [
        [2.5],
        [3.0, 2.0],
        [0.0, 0.0, 0.0],
        [math.nan] * 5,
        [5.0, math.inf, 4.0, math.nan, 3.0],
        [9.0, 1.0, 1e-6],
        [-1.0, 2.0],
    ],
)
def test_odd_losses_are_drawn(tmp_path, losses):
    plot_runs([make_run(tmp_path / "one", losses, every=2)], tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").size


def test_many_runs_and_evaluations_alone(tmp_path):
    runs = [make_run(tmp_path / f"run-{i}", curve(40, seed=i)) for i in range(9)]
    only_valid = tmp_path / "valid"
    only_valid.mkdir()
    (only_valid / "metrics.jsonl").write_text('{"step": 3, "valid_loss": 4.0}\n')
    plot_runs([*runs, only_valid], tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").size


def test_the_old_picture_stays_when_the_new_one_cannot_be_drawn(tmp_path):
    run = make_run(tmp_path / "one", curve(20), tokens_per_second=0)
    plot_runs([run], tmp_path / "loss.png")
    before = (tmp_path / "loss.png").read_bytes()
    with pytest.raises(UserError, match='have no "seconds"'):
        plot_runs([run], tmp_path / "loss.png", x="time")
    assert (tmp_path / "loss.png").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "one"]


def test_bad_arguments(tmp_path):
    run = make_run(tmp_path / "one", curve(20))
    (tmp_path / "directory.png").mkdir()
    for arguments, says in [
        (([], tmp_path / "a.png"), "no runs to plot"),
        (([run], tmp_path / "a.pdf"), "ends in .png"),
        (([run], tmp_path / "directory.png"), "ends in .png"),
        (([run], tmp_path / "a.png", "epoch"), "one of step, tokens, time"),
        (([tmp_path / "none"], tmp_path / "a.png"), "no such run directory"),
    ]:
        with pytest.raises(UserError) as caught:
            plot_runs(*arguments)
        assert says in str(caught.value)


def test_no_global_plotting_state_is_touched(tmp_path):
    run = make_run(tmp_path / "one", curve(20))
    code = (
        "import sys, matplotlib; before = dict(matplotlib.rcParams.copy())\n"
        "from pathlib import Path; from groundup.report import plot_runs\n"
        f"plot_runs([Path({str(run)!r})], Path({str(tmp_path / 'a.png')!r}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
        "assert dict(matplotlib.rcParams.copy()) == before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
