"""Sampling, the KV cache and the loop that writes text.

sampling.py  temperature, top-k, top-p, min-p and the draw: pure functions on logits
cache.py     the KV cache
decode.py    the step of one token, plain or compiled
engine.py    one prompt or many: prefill, step, the sliding window
chat.py      a conversation, turn by turn
text.py      ids to text as they arrive; prompt to continuation
"""

from groundup.generate.cache import KVCache
from groundup.generate.engine import generate, generate_batch
from groundup.generate.sampling import sample
from groundup.generate.text import generate_text, generate_texts, stream_text

__all__ = ["KVCache", "generate", "generate_batch", "generate_text", "generate_texts", "sample", "stream_text"]
