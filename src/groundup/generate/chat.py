"""A conversation with a model that only continues text.

There is one text. What the user writes is put at its end as it is, the model goes on from there until it ends the
document or has said enough, and the next line starts a new line of that same text. Nothing marks who speaks: a model
trained on stories continues the story, one trained on dialogues can be given their form by writing it. When the model
ends the document, what follows is the next document, as in its training data.

The model sees the newest context_length tokens (engine.py says how the window slides). Answer i draws from the stream
of seed + i, so that the same lines after the same `/seed` give the same conversation, and equal lines different
answers.
"""

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from groundup.errors import UserError, nearest_name
from groundup.generate.engine import generate
from groundup.generate.sampling import check_sampling
from groundup.generate.text import bounds, stream_text
from groundup.model import TransformerLM
from groundup.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatSettings:
    """How answers are drawn."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    max_tokens: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for a setting out of range."""
        check_sampling(self.temperature, self.top_k, self.top_p, self.seed, self.min_p)
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; it must be at least 1")


SETTINGS = {
    "/temperature": ("temperature", "below 1 safer, above 1 wilder; 0: always the likeliest token"),
    "/top-k": ("top_k", "sample among the k likeliest tokens; 0: all"),
    "/top-p": ("top_p", "sample among the likeliest tokens that together hold this probability; 1: all"),
    "/min-p": ("min_p", "sample among tokens with at least this part of the likeliest one's probability; 0: all"),
    "/max-tokens": ("max_tokens", "most tokens of an answer"),
    "/seed": ("seed", "the same seed and lines give the same answers; counts anew from here"),
}
"""Command with a number → (field of ChatSettings, help)."""

COMMANDS = {
    "/reset": "forget the conversation and begin a new text",
    "/help": "this list, and the settings",
    "/quit": "end (so does Ctrl-D); Ctrl-C stops an answer",
}

ABOUT = """The model continues a text; it was not taught to answer. What you write is put at the end of the text as it
is, and the model goes on from there. A line that begins with // is sent with one / and is no command."""


class Chat:
    """The text so far, and what it takes to go on. `note` receives lines for the user that are not the model's."""

    def __init__(
        self,
        model: TransformerLM,
        tokenizer: Tokenizer,
        settings: ChatSettings,
        note: Callable[[str], None],
    ):
        self.model, self.tokenizer, self.settings, self.note = model, tokenizer, settings, note
        self.ids: list[int] = []
        """The newest tokens of the text, at most context_length of them."""
        self.answers = 0
        """Since the seed was set."""
        self._slid = False

    def say(self, line: str) -> Iterator[str]:
        """The model's answer to a line of the user's, piece by piece; what was said before an interruption stays said.

        An empty line lets the model go on. Control characters appear as U+FFFD: a terminal would obey them.
        """
        ended = not self.ids or self.ids[-1] == self.tokenizer.eot_id
        text = line if ended or not line else f"\n{line}"
        self._append(self.tokenizer.encode(text))
        settings = vars(self.settings) | {"seed": (self.settings.seed + self.answers) % 2**63}
        answer = generate(self.model, self.ids, **settings, **bounds(self.tokenizer), on_slide=self._say_slide)
        self.answers += 1
        return map(printable, stream_text(self.tokenizer, self._remembered(answer)))

    def command(self, line: str) -> bool:
        """Obey a line that begins with "/"; False when it ends the conversation. Raises UserError for a wrong one."""
        name, *values = line.split()
        if name in SETTINGS:
            self._set(name, values)
        elif values or name not in COMMANDS:
            known = SETTINGS | COMMANDS
            hint = f"; {name} takes no value" if name in COMMANDS else nearest_name(name, known)
            raise UserError(f'no command "{line.strip()}"{hint}; a line of text that begins with / is written with //')
        elif name == "/reset":
            self.ids, self.answers, self._slid = [], 0, False
            self.note("a new text")
        elif name == "/help":
            self.note(self.help())
        return name != "/quit"

    def help(self) -> str:
        """What can be typed, and the settings as they are."""
        rows = {f"{name} {getattr(self.settings, field)}": text for name, (field, text) in SETTINGS.items()} | COMMANDS
        width = max(map(len, rows))
        return "\n".join([ABOUT, *(f"  {name:<{width}}  {text}" for name, text in rows.items())])

    def _set(self, name: str, values: list[str]) -> None:
        field, _ = SETTINGS[name]
        kind = type(getattr(self.settings, field))
        if len(values) != 1:
            raise UserError(f"{name} takes one number, such as {name} {getattr(self.settings, field)}")
        try:
            value: Any = kind(values[0])
        except ValueError:
            raise UserError(f'{name} "{values[0]}" is not {"a whole number" if kind is int else "a number"}') from None
        self.settings = replace(self.settings, **{field: value})
        if field == "seed":
            self.answers = 0
        self.note(f"{field} {value}")

    def _append(self, ids: list[int]) -> None:
        self.ids += ids
        context_length = self.model.config.context_length
        if len(self.ids) > context_length:
            self._say_slide("")
            del self.ids[:-context_length]

    def _remembered(self, answer: Iterator[int]) -> Iterator[int]:
        for token in answer:
            self._append([token])
            yield token

    def _say_slide(self, _: str) -> None:
        """Once a conversation: the engine would say it for each answer."""
        if not self._slid:
            context_length = self.model.config.context_length
            self.note(f"past the context of {context_length} tokens: the model no longer sees the beginning")
        self._slid = True


def printable(text: str) -> str:
    """`text` with control characters, all but newline and tab, as U+FFFD."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
