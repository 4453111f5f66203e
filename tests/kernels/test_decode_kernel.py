"""The step of a token as one kernel: how it is split among programs, and what it asks of the GPU."""

import re
from dataclasses import replace

import pytest
import torch

from groundup.config.sizes import size
from groundup.generate.cache import KVCache
from groundup.kernels import decode as one_kernel
from groundup.model import TransformerLM

SMALL = replace(
    size("tiny"), vocab_size=1003, context_length=700, d_model=256, d_ff=520, n_layers=3, n_heads=8, n_kv_heads=2
)
"""Heads of 32, grouped; more programs than some of them have rows."""


@pytest.mark.parametrize("name", ["gpt2-124m", "stories-17m"])
@pytest.mark.parametrize("programs", [132, 128, 114])
def test_every_row_and_key_has_a_program(name: str, programs: int):
    config = size(name).resolve()
    s = one_kernel.sizes(config, config.context_length, programs)
    rows = (s["HEADS"] + 2 * s["KV_HEADS"]) * s["HEAD"]
    for total, each, tile in ((rows, "QKV_N", "QKV_R"), (s["D"], "D_N", "D_R"), (s["F"], "F_N", "F_R")):
        assert s[each] * programs >= total
        assert s[each] <= s[tile]
    assert s["QKV_N"] % 2 == 0  # a pair of RoPE's is one program's
    assert s["SPLITS"] * s["HEADS"] <= programs
    assert min(s["DC"], s["FC"]) * one_kernel.COLUMNS >= min(s["D"], s["F"])
    # Four words are read at once: all that is published begins at a multiple of 16 bytes.
    assert not [n for n in (rows, s["HEAD"] + 4, s["D"], s["F"]) if n % 4]


def test_models_that_fit():
    """350M's feed-forward needs tiles of 128 registers a thread, and was slower so than compiled."""
    fitting = [name for name in ("stories-17m", "gpt2-124m", "gpt2-350m", "gpt2-1.5b", "tiny")
               if one_kernel.fits(size(name).resolve(), 1024, 132)]  # fmt: skip
    assert fitting == ["stories-17m", "gpt2-124m"]
    assert one_kernel.fits(SMALL.resolve(), 700, 132)
    assert not one_kernel.fits(size("gpt2-124m").resolve(), 4096, 132)  # 11 pieces of 128 keys a head
    model = TransformerLM(size("tiny").resolve())
    assert not one_kernel.takes(model, KVCache(model.config).keys)


@pytest.mark.parametrize("n", [1, 4, 8])
def test_readers_ask_until_every_word_carries_the_step(n: int):
    """The PTX of `waiting`, executed: n words, the last one late at first, none at address 0."""
    decode_words = pytest.importorskip("groundup.kernels.decode_words")
    text, size_ = decode_words.waiting(n), min(n, 4)
    body, after = re.search(r"AGAIN: (.*)@late bra AGAIN; (.*)}", text).groups()
    step, asked = 70_007, []
    memory = {1000 + i: (0x3F80_0000 + (i << 16)) | (step & 0xFFFF) for i in range(n)}

    def once(late: bool, address: int) -> list[int] | None:
        words = {}
        for load in re.finditer(r"@there(\d+) ld\.relaxed\.gpu\.global[.v\d]*\.b32 \{?([^\[]*?)\}?, \[", body):
            names = [name.strip() for name in load[2].split(",")]
            at = address and address + int(load[1]) * size_
            asked.append(at)
            for i, name in enumerate(names):
                words[name] = memory[at + i] - (late and name == f"word{n - 1}") if at else step & 0xFFFF
        checked = re.findall(r"cvt\.u16\.u32 low, (\w+); setp\.ne\.or\.b16 late, low, step, late;", body)
        assert checked == list(words)
        if any(words[name] & 0xFFFF != step & 0xFFFF for name in checked):
            return None
        return [words[name] & 0xFFFF0000 for name in re.findall(r"and\.b32 \$\d+, (\w+), 0xffff0000;", after)]

    assert once(True, 1000) is None
    assert once(False, 1000) == [0x3F80_0000 + (i << 16) for i in range(n)]
    assert once(False, 0) == [0] * n
    assert len(asked) == 3 * (n // size_)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_heads": 8, "tie_embeddings": True}, {"position": "nope", "logit_softcap": 5.0}]
)
@pytest.mark.parametrize("held", [1, 127, 128, 600])
def test_logits_keys_and_choice_on_the_gpu(changes: dict, held: int):
    """Against float32, beside the plain step in bf16; over the border between two programs' keys."""
    from groundup.generate.decode import decode

    config = replace(SMALL, **changes).resolve()
    with torch.device("cuda"):
        model, wide = TransformerLM(config).bfloat16(), TransformerLM(config)
        wide.load_state_dict(model.state_dict())
        caches = [KVCache(config, 1, dtype, "cuda") for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)]
        caches[0].keys.normal_(), caches[0].values.normal_()
        for cache in caches[1:]:
            cache.keys.copy_(caches[0].keys), cache.values.copy_(caches[0].values)
        state = torch.tensor([17, held, 0])
    assert one_kernel.takes(model, caches[0].keys)
    kernel = one_kernel.DecodeKernel(model, caches[0].keys, caches[0].values, state, limit=1000)
    with torch.no_grad():
        for place in (held, held + 1):
            token = state[:1].clone()
            kernel.logits.fill_(float("nan"))
            kernel.run()
            at = torch.tensor([place], device="cuda")
            plain, truth = (
                decode(m, c.keys, c.values, token, at).float() for m, c in ((model, caches[1]), (wide, caches[2]))
            )
            ours, theirs = (float((x - truth).norm() / truth.norm()) for x in (kernel.logits, plain))
            assert ours <= theirs
            assert state.tolist() == [int(kernel.logits[0, :1000].argmax()), place + 1, 0]
            for a, b in ((caches[0].keys, caches[2].keys), (caches[0].values, caches[2].values)):
                torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05)
        repeated = []
        for _ in range(30):
            state.copy_(torch.tensor([17, held, 0]))
            kernel.run()
            repeated.append(kernel.logits.clone())
        assert all(torch.equal(repeated[0], again) for again in repeated)
        model.ln_final.weight[3] = float("nan")
        kernel.run()
        assert state.view(torch.float64)[2].isnan()


@pytest.mark.gpu
def test_the_engine_takes_it_on_the_gpu():
    from groundup.generate import generate
    from groundup.generate.decode import CompiledDecode

    model = TransformerLM(SMALL.resolve()).cuda().bfloat16()
    cache = KVCache(model.config, 1, torch.bfloat16, "cuda")
    step = CompiledDecode(model, cache)
    assert step.kernel is not None
    with torch.inference_mode():
        tokens, greedy, by_logits = [5], [], []
        for place in range(50):  # runs ahead
            tokens = step.greedy(tokens, [place])
            greedy += tokens
        tokens = [5]
        for place in range(50):
            tokens = [int(step(tokens, [place]).argmax())]
            by_logits += tokens
    assert greedy == by_logits
    first, second = (list(generate(model, [1, 2, 3], 900, 1.0, seed=3, compiled=True)) for _ in range(2))
    assert first == second  # past the context, drawn
    assert len(first) == 900
