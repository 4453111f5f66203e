"""`groundup chat`: a conversation in the terminal."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from groundup.cli.output import note
from groundup.cli.parse import parse
from groundup.cli.run_config import Step
from groundup.errors import UserError

if TYPE_CHECKING:
    from groundup.generate.chat import Chat


@dataclass(frozen=True, kw_only=True)
class Args:
    """Talk with a run's model, turn by turn.

    The model continues a text; it was not taught to answer. What you write is put at the end of the text as it is, and
    the model goes on from there. /help lists the commands; Ctrl-C stops an answer, Ctrl-D or /quit ends. Lines may come
    from a pipe: standard output then holds the answers alone.
    """

    run: Annotated[Path, Positional, arg(metavar="RUN")]
    """Run directory."""
    temperature: float = 0.8
    """Divides the logits: below 1 safer, above 1 wilder; 0: always the likeliest token."""
    top_k: int = 0
    """Sample among the k likeliest tokens only; 0: all."""
    top_p: float = 0.95
    """Sample among the likeliest tokens that together hold this probability; 1: all."""
    min_p: float = 0.0
    """Sample among the tokens that have at least this part of the likeliest one's probability; 0: all."""
    max_tokens: int = 200
    """Most tokens of an answer."""
    seed: int = 0
    """Seeds the sampling; the same seed and lines give the same conversation."""
    step: Step = None
    """Checkpoint to use; best: the one of the lowest validation loss, where the run keeps it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto: cuda where there is one."""


def main(argv: list[str], prog: str) -> int:
    args = parse(Args, argv, prog)
    from groundup.generate.chat import Chat, ChatSettings
    from groundup.train import load_run

    settings = ChatSettings(args.temperature, args.top_k, args.top_p, args.min_p, args.max_tokens, args.seed)
    model, tokenizer, _, step = load_run(args.run, step=args.step, device=args.device)
    chat = Chat(model, tokenizer, settings, note)
    if sys.stdin.isatty():
        note(f"{args.run} at step {step:,}, context {model.config.context_length} tokens; it continues what you write")
        note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D or /quit ends")
    for line in _typed() if sys.stdin.isatty() else _piped():
        if not _turn(chat, line):
            break
    return 0


def _turn(chat: "Chat", line: str) -> bool:
    """One line of the user's; False when it ends the conversation. What is wrong with a line ends only a script."""
    try:
        if line.startswith("/") and not line.startswith("//"):
            return chat.command(line)
        for piece in chat.say(line.removeprefix("/") if line.startswith("//") else line):
            print(piece, end="", flush=True)
        print(flush=True)
    except KeyboardInterrupt:
        print(flush=True)
        note("stopped")
    except UserError as error:
        if not sys.stdin.isatty():
            raise
        note(str(error))
    return True


def _typed() -> Iterator[str]:
    """Lines from a terminal, with editing and history; Ctrl-C at the prompt drops the line."""
    import readline  # noqa: F401  input() uses it; imported here because it may write to the terminal

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n/quit ends", flush=True)
        except UnicodeDecodeError:
            note("that line is not valid UTF-8; write it again")
        except EOFError:
            print(flush=True)
            return


def _piped() -> Iterator[str]:
    """Lines from a pipe or a file."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"line {number} of standard input is not valid UTF-8 at byte {error.start}") from None
