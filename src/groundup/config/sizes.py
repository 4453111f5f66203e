"""Named model sizes: one table, plain data.

`small` … `10b` are the sizes of the course's systems assignment (vocabulary 10,000; its earlier editions' `xl` is
1600 × 48, its "2.7b" really has 3.4 B parameters and is the 2026 edition's `xl`). `gpt2-…` are GPT-2's shapes
(Radford et al. 2019) with this project's gated feed-forward at equal parameters, embeddings tied.
`tiny` learns nothing: it lets every command run in a second on any machine.
"""

from groundup.config.model import ModelConfig
from groundup.errors import UserError, nearest_name


def _course(d_model: int, d_ff: int, n_layers: int, n_heads: int) -> ModelConfig:
    return ModelConfig(vocab_size=10_000, d_model=d_model, d_ff=d_ff, n_layers=n_layers, n_heads=n_heads)


def _gpt2(d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=50_257,
        context_length=1024,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        tie_embeddings=True,
    )


SIZES: dict[str, ModelConfig] = {
    "small": _course(768, 3072, 12, 12),
    "medium": _course(1024, 4096, 24, 16),
    "large": _course(1280, 5120, 36, 20),
    "xl": _course(1600, 6400, 48, 25),
    "2.7b": _course(2560, 10240, 32, 32),
    "xl-2026": _course(2560, 10240, 32, 32),
    "10b": _course(4608, 12288, 50, 36),
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-350m": _gpt2(1024, 24, 16),
    "gpt2-774m": _gpt2(1280, 36, 20),
    "gpt2-1.5b": _gpt2(1600, 48, 25),
    "tiny": ModelConfig(vocab_size=256, context_length=64, d_model=32, d_ff=64, n_layers=2, n_heads=2),
    "stories-17m": ModelConfig(vocab_size=10_000, context_length=256, d_model=512, n_layers=4, n_heads=16),
}


def size(name: str) -> ModelConfig:
    """The configuration called `name`. Raises UserError with the nearest name."""
    if name not in SIZES:
        raise UserError(f'no model size "{name}"{nearest_name(name, SIZES)}')
    return SIZES[name]
