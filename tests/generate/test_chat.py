"""A conversation is one text: each answer is what `generate` gives for all that was said before it."""

import pytest
import torch

from groundup.config import ModelConfig
from groundup.errors import UserError
from groundup.generate import generate, stream_text
from groundup.generate.chat import COMMANDS, SETTINGS, Chat, ChatSettings, printable
from groundup.model import TransformerLM
from groundup.tokenizer import Tokenizer

EOT = 256
TOKENIZER = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])


def make(context_length: int = 512, **settings) -> tuple[Chat, list[str]]:
    model = TransformerLM(ModelConfig(vocab_size=300, context_length=context_length, d_model=32, n_layers=1, n_heads=2))
    with torch.no_grad():
        model.lm_head.weight *= 4
    lines: list[str] = []
    return Chat(model, TOKENIZER, ChatSettings(**{"max_tokens": 12, **settings}), lines.append), lines


def expected(chat: Chat, ids: list[int], seed: int, settings: ChatSettings) -> list[int]:
    more = {"seed": seed, "stop_ids": {EOT}, "vocab_limit": 257, "start_id": EOT}
    return list(generate(chat.model, ids, **vars(settings) | more))


def test_each_answer_continues_the_whole_text():
    chat, lines = make(seed=5, min_p=0.02)
    text: list[int] = []
    for turn, line in enumerate(["Once upon a time", "and then", "", "é🙂"]):
        ended = not text or text[-1] == EOT
        text += (line if ended or not line else "\n" + line).encode()
        answer = expected(chat, text, 5 + turn, chat.settings)
        assert "".join(chat.say(line)) == printable("".join(stream_text(TOKENIZER, answer)))
        text += answer
        assert chat.ids == text
    assert lines == []


def test_a_new_document_begins_without_a_new_line():
    chat, _ = make()
    chat.ids = [65, EOT]
    answer = chat.say("B")
    assert chat.ids == [65, EOT, 66]
    list(answer)


def test_an_interrupted_answer_stays_in_the_text():
    chat, _ = make()
    answer = chat.say("abc")
    for _ in range(3):
        next(answer)
    del answer
    said = chat.ids[3:]
    assert len(said) >= 3
    list(chat.say("x"))
    assert chat.ids[: 3 + len(said) + 2] == [97, 98, 99, *said, 10, ord("x")]


def test_the_conversation_slides_and_says_so_once():
    chat, lines = make(context_length=16)
    for line in ("a" * 10, "b" * 30, "c"):
        list(chat.say(line))
    assert lines == ["past the context of 16 tokens: the model no longer sees the beginning"]
    assert len(chat.ids) == 16
    before = list(chat.ids)
    answer = expected(chat, [*before, 10, 100][-16:], chat.answers, chat.settings)
    list(chat.say("d"))
    assert chat.ids == [*before, 10, 100, *answer][-16:]
    chat.command("/reset")
    list(chat.say("a" * 40))
    assert len(lines) == 3  # "a new text", and the slide again


def test_commands_change_the_settings():
    chat, lines = make()
    for line, field, value in [
        ("/temperature 0.5", "temperature", 0.5),
        ("/top-p 0.9", "top_p", 0.9),
        ("/top-k 7", "top_k", 7),
        ("/min-p 0.1", "min_p", 0.1),
        ("/max-tokens 3", "max_tokens", 3),
        ("/seed 9", "seed", 9),
    ]:
        assert chat.command(line)
        assert getattr(chat.settings, field) == value
        assert lines[-1] == f"{field} {value}"
    first = "".join(chat.say("x"))
    chat.command("/reset")
    assert "".join(chat.say("x")) == first  # reset counts the answers anew
    assert chat.answers == 1
    chat.command("/seed 9")
    assert chat.answers == 0
    assert not chat.command("/quit")
    chat.command("/help")
    assert all(name in lines[-1] for name in SETTINGS | COMMANDS)
    assert "/temperature 0.5 " in lines[-1]
    assert "was not taught to answer" in lines[-1]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/temprature 1", 'no command "/temprature 1" (did you mean "/temperature"?)'),
        ("/temperature", "/temperature takes one number, such as /temperature 0.8"),
        ("/temperature 1 2", "takes one number"),
        ("/temperature x", '/temperature "x" is not a number'),
        ("/temperature -1", "temperature is -1.0; it must be a number ≥ 0"),
        ("/top-k 1.5", '"1.5" is not a whole number'),
        ("/top-p 0", "top_p is 0.0"),
        ("/min-p nan", "min_p is nan"),
        ("/max-tokens 0", "max_tokens is 0"),
        ("/seed -1", "seed is -1"),
        ("/reset now", "/reset takes no value"),
        ("/", "no command"),
    ],
)
def test_a_wrong_command_is_one_line_and_changes_nothing(line, says):
    chat, _ = make()
    before = chat.settings
    with pytest.raises(UserError) as caught:
        chat.command(line)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert chat.settings == before


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\tb\n\x1b[31m\x00\x7f\x9b é🙂") == "a\tb\n\ufffd[31m\ufffd\ufffd\ufffd é🙂"
