"""Every recipe loads, resolves, and says what it needs and gives."""

from pathlib import Path

import pytest

from groundup.config import RunConfig, load_toml, size

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert {"stories-17m.toml", "stories-cpu.toml"} <= {path.name for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_resolves_and_its_header_is_complete(path: Path):
    config = load_toml(path, RunConfig).resolve(vocab_size=10_000)
    assert config.train.steps > config.optim.warmup_steps > 0
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("Hardware", "Tokens", "Time", "Cost", "Expected"):
        assert any(line.startswith(f"# {word}") for line in header), word
    assert any(f"--config recipes/{path.name}" in line for line in header)


def test_stories_17m_is_the_named_size_and_the_course_budget():
    recipe = load_toml(RECIPES[0].with_name("stories-17m.toml"), RunConfig).resolve()
    assert recipe.model == size("stories-17m").resolve()
    assert recipe.train.steps * recipe.train.global_batch_size * recipe.model.context_length == 327_680_000
