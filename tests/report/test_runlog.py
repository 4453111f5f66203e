"""metrics.jsonl into columns: complete, in progress, damaged."""

import json
import math

import numpy as np
import pytest

from groundup.errors import UserError
from groundup.report import read_run
from groundup.rows import read_rows


def write(tmp_path, *rows, tail=""):
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + tail)
    return run


def test_rows_become_columns_of_training_and_evaluation(tmp_path):
    log = read_run(
        write(
            tmp_path,
            {"step": 1, "loss": 3.5, "tokens": 64, "tokens_per_second": 128},
            {"step": 2, "loss": 3.25, "tokens": 128, "tokens_per_second": 64},
            {"step": 2, "valid_loss": 3.0, "valid_bits_per_byte": 1.25},
            {"step": 3, "loss": 2.75, "tokens": 192, "tokens_per_second": 128},
        )
    )
    assert log.train["step"].tolist() == [1, 2, 3]
    assert log.train["loss"].tolist() == [3.5, 3.25, 2.75]
    assert log.train_axis("tokens").tolist() == [64, 128, 192]
    assert log.valid["valid_loss"].tolist() == [3.0]
    assert log.valid_axis("step").tolist() == [2]
    assert log.valid_axis("tokens").tolist() == [128]
    assert log.valid_axis("seconds").tolist() == [1.5]


def test_an_evaluation_between_and_before_the_rows(tmp_path):
    log = read_run(
        write(
            tmp_path,
            {"step": 0, "valid_loss": 9.0},
            {"step": 1, "valid_loss": 8.0},
            {"step": 2, "loss": 4.0, "tokens": 300, "tokens_per_second": 100},
            {"step": 3, "valid_loss": 7.0},
            {"step": 4, "loss": 4.0, "tokens": 700, "tokens_per_second": 100},
        )
    )
    assert log.valid_axis("seconds").tolist() == [0.0, 1.5, 5.0]


def test_seconds_follow_from_the_speed_of_each_step(tmp_path):
    rows = [
        {"step": s, "loss": 2.0, "tokens": s * 100, "tokens_per_second": v} for s, v in ((1, 50), (2, 200), (3, 100))
    ]
    assert read_run(write(tmp_path, *rows)).train_axis("seconds").tolist() == [2.0, 2.5, 3.5]


@pytest.mark.parametrize("tail", ['{"step": 2, "lo', '{"step": 2, "loss": 2.', "{", '{"step": 2, "note": "\\ud8'])
def test_a_row_still_being_written_is_left_out(tmp_path, tail):
    assert read_run(write(tmp_path, {"step": 1, "loss": 3.5}, tail=tail)).train["step"].tolist() == [1]


def test_a_row_cut_inside_a_character_is_left_out(tmp_path):
    run = write(tmp_path, {"step": 1, "loss": 3.5})
    with open(run / "metrics.jsonl", "ab") as file:
        file.write('{"step": 2, "note": "é'.encode()[:-1])
    assert read_run(run).train["step"].tolist() == [1]


def test_a_damaged_row_is_named(tmp_path):
    run = write(tmp_path, {"step": 1, "loss": 3.5}, '{"step": 2, "lo\n', {"step": 3, "loss": 3.5})
    with pytest.raises(UserError, match="line 2 is not a JSON object"):
        read_run(run)
    with pytest.raises(UserError, match="line 1 is not a JSON object"):
        read_run(write(tmp_path, "[1, 2]\n"))
    with pytest.raises(UserError, match='no number "step"'):
        read_run(write(tmp_path, {"loss": 3.5}))


def test_missing_fields_and_non_finite_losses_are_nan(tmp_path):
    log = read_run(
        write(
            tmp_path,
            {"step": 1, "loss": math.nan, "lr": 0.5},
            {"step": 2, "loss": None},
            {"step": 3, "loss": math.inf, "tokens": 7, "flag": True},
        )
    )
    assert np.isnan(log.train["loss"][:2]).all()
    assert log.train["loss"][2] == math.inf
    assert np.array_equal(log.train["tokens"], [np.nan, np.nan, 7], equal_nan=True)
    assert "flag" not in log.train
    with pytest.raises(UserError, match='have no "seconds"; plot by step'):
        log.train_axis("seconds")


def test_rows_are_ordered_by_step(tmp_path):
    log = read_run(write(tmp_path, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 3.0}))
    assert log.train["step"].tolist() == [1, 2]
    assert log.train["loss"].tolist() == [1.0, 3.0]


def test_nothing_to_read(tmp_path):
    with pytest.raises(UserError, match="no such run directory"):
        read_run(tmp_path / "none")
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match=r"no metrics\.jsonl in it"):
        read_run(tmp_path / "run")
    for rows in ([], ["\n\n"], ['{"step": 1'], [{"step": 1, "note": 2}]):
        with pytest.raises(UserError, match="holds no finished step yet"):
            read_run(write(tmp_path, *rows))


def test_a_skipped_step_has_no_loss_and_takes_its_time(tmp_path):
    rows = [
        {"step": s, "loss": loss, "tokens": s * 100, "tokens_per_second": 50.0, **({} if loss else {"skipped": True})}
        for s, loss in ((1, 3.5), (2, None), (3, 3.0))
    ]
    log = read_run(write(tmp_path, *rows))
    assert np.isnan(log.train["loss"]).tolist() == [False, True, False]
    assert log.train_axis("seconds").tolist() == [2.0, 4.0, 6.0]


def test_the_run_and_its_reader_read_alike(tmp_path):
    """The one reader: rows of a run that was killed while it wrote, for a resume and for a plot."""
    rows = [{"step": s, "loss": 3.5} for s in (1, 2)]
    run = write(tmp_path, *rows, tail='{"step": 3, "loss": 1.0}')  # whole, but for the newline
    assert read_rows(run / "metrics.jsonl") == rows
    assert read_run(run).train["step"].tolist() == [1, 2]
    assert read_rows(run / "none") == []
