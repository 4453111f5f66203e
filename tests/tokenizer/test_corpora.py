"""Every file of the corpora trains, and comes back from its ids."""

import lzma

import numpy as np
import pytest
from texts import END

from groundup.tokenizer import Tokenizer

NAMES = ["code_16mb", "english_100mb", "multilingual_20mb", "stories_train", "stories_valid"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_file_trains_and_comes_back(corpora, name):
    assert {path.name for path in corpora.glob("*.xz")} <= {f"{name}.txt.xz" for name in NAMES}
    path = corpora / f"{name}.txt.xz"
    tokenizer = Tokenizer.train([path], 16_000, [END])
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (16_000, 15_999)
    with lzma.open(path) as file:
        data = file.read()
    ids = tokenizer.encode_numpy(data)
    assert ids.dtype == np.uint16
    assert np.count_nonzero(ids == tokenizer.eot_id) == data.count(END.encode())
    assert tokenizer.decode_bytes(ids) == data
    assert tokenizer.decode(ids) == data.decode()
