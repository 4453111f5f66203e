"""Text files → token files → batches. numpy only; nothing here imports torch.

corpus.py       text files and folders as a stream of documents
embedded.py     the standard library's source as a corpus
tokenize.py     documents → token directory
npy.py          .npy files written as a stream and read without filling memory
dataset.py      the token directory, opened and checked
permutation.py  a keyed permutation without a table
sampler.py      the windows of a step, a pure function of (seed, step); the windows of an evaluation
"""

from groundup.data.corpus import documents
from groundup.data.dataset import TokenData, token_dtype
from groundup.data.embedded import EmbeddedCorpus, write_embedded_corpus
from groundup.data.sampler import WindowSampler, check_window, validation_windows
from groundup.data.tokenize import tokenize_corpus

__all__ = [
    "EmbeddedCorpus",
    "TokenData",
    "WindowSampler",
    "check_window",
    "documents",
    "token_dtype",
    "tokenize_corpus",
    "validation_windows",
    "write_embedded_corpus",
]
