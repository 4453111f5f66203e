"""The command line: one table of commands, one small module each, imported only when chosen.

`groundup COMMAND …` finds the longest name in `COMMANDS` that the words begin with, imports that one module and
calls its `main(argv, prog)`. The table is plain data, so `groundup --help` costs no import at all and a command
that only tokenizes never pays for torch; only `groundup bench` looks further, since each benchmark is a file of its
own. Every failure that input, machine or disk can cause ends here as one line on standard error; anything else is a
bug and keeps its traceback.
"""

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from groundup import __version__
from groundup.errors import UserError, nearest_name

COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("groundup.cli.quickstart", "from nothing to a talking model in three minutes"),
    "tokenizer train": ("groundup.cli.tokenizer_train", "learn a byte-level BPE vocabulary from text"),
    "tokenizer info": ("groundup.cli.tokenizer_info", "size, longest tokens, the merges of a word"),
    "tokenizer compare": ("groundup.cli.tokenizer_compare", "bytes a token and speed, side by side"),
    "tokenizer encode": ("groundup.cli.tokenizer_encode", "text on standard input to ids"),
    "tokenizer decode": ("groundup.cli.tokenizer_decode", "ids on standard input to text"),
    "tokenizer profile": ("groundup.cli.tokenizer_profile", "time and memory of training, by phase"),
    "tokenize": ("groundup.cli.tokenize", "turn text into token files"),
    "train": ("groundup.cli.train", "train a model on token files, or go on with a run"),
    "lr-range": ("groundup.cli.lr_range", "find a learning rate by a short sweep"),
    "ablate": ("groundup.cli.ablate", "what each part of a recipe is worth: runs and a table"),
    "evaluate": ("groundup.cli.evaluate", "loss, perplexity and bits per byte of a run"),
    "generate": ("groundup.cli.generate", "let a run's model continue a prompt"),
    "chat": ("groundup.cli.chat", "talk with a run's model in the terminal"),
    "export": ("groundup.cli.export", "write a run in Hugging Face's format"),
    "import": ("groundup.cli.import_", "make a run from a model in Hugging Face's format"),
    "plot": ("groundup.cli.plot", "draw the loss curves of one or more runs"),
    "account params": ("groundup.cli.account", "parameters by component"),
    "account flops": ("groundup.cli.account", "every matrix product with its shape"),
    "account memory": ("groundup.cli.account", "what stays, what autograd keeps, the peak of each phase"),
    "account throughput": ("groundup.cli.account", "time of a step, tokens a second, days and cost"),
    "bench table": ("groundup.cli.bench", "tables, plots and one JSON document from result files"),
    "bench diff": ("groundup.cli.bench", "two results side by side: ratio, and whether it is beyond the spread"),
    "bench check": ("groundup.cli.bench", "the account's predictions against measured steps"),
}
"""Command → (module with `main(argv, prog) -> int`, one line of help). A command may be two words. What `main` reads is
the module's `Args`, or `args_of(second word)` where a module has several commands."""
GROUPS = {
    "tokenizer": "a vocabulary: train, info, compare, encode, decode, profile",
    "account": "a model, predicted: params, flops, memory, throughput",
    "bench": "benchmarks, and of their results table, diff, check",
}
"""What the screen of all commands says of a group of two-word ones."""

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: training was told to stop and has saved; with --resume it goes on
BROKEN_PIPE = 141  # 128 + SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 after an error's line, 130 after Ctrl-C, 75 from a stopped run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?", it does not crash
    # Torch's threads would spin between two operations and starve each other wherever a core is shared: with busy
    # neighbours, steps on two threads were measured 4 to 15 times slower. Read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        if stop.code:
            raise
        return 0  # --help
    except UserError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("\ngroundup: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        line = _machine_failure(error)
        if line is None:
            raise
        return _fail(line)


def commands(first: str) -> dict[str, tuple[str, str]]:
    """The table; for the word bench also the benchmarks that there are."""
    if first != "bench":
        return COMMANDS
    from groundup.bench.benchmark import summaries

    return {f"bench {name}": ("groundup.cli.bench", text) for name, text in summaries().items()} | COMMANDS


def dispatch(argv: list[str]) -> int:
    """Run one command; what goes wrong is raised."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help(COMMANDS))
        return 0
    if argv[0] == "--version":
        print(f"groundup {__version__}")
        return 0
    known = commands(argv[0])
    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in known and len(argv) >= words:
            return import_module(known[name][0]).main(argv[words:], f"groundup {name}")
    group = {name: row for name, row in known.items() if name.startswith(argv[0] + " ")}
    if not group:
        firsts = {name.split()[0] for name in COMMANDS}
        raise UserError(f'no command "{argv[0]}"{nearest_name(argv[0], firsts)}; groundup --help lists them')
    if len(argv) == 1 or argv[1] in ("-h", "--help"):
        print(_help(group))
        return 0
    seconds = {name.split()[1] for name in group}
    raise UserError(f'no command "{argv[0]} {argv[1]}"{nearest_name(argv[1], seconds)}')


def _help(commands: dict[str, tuple[str, str]]) -> str:
    """All commands on one screen of 80 columns; a group of two-word commands takes one row among others."""
    rows = {name: text for name, (_, text) in commands.items()}
    if len({name.split()[0] for name in commands}) > 1:
        rows = {name.split()[0]: GROUPS.get(name.split()[0], text) for name, text in rows.items()}
    width = max(map(len, rows)) + 3
    listing = "\n".join(f"  {name:<{width}}{text}" for name, text in rows.items())
    return (
        "groundup: language models from the ground up\n\n"
        "usage: groundup COMMAND [OPTIONS]\n\n"
        f"{listing}\n\n"
        "groundup COMMAND --help   says what a command takes\n"
        "groundup --version        prints the version"
    )


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Our own warnings as one plain line; other libraries' as Python shows them."""
    ours = category is UserWarning and f"{os.sep}groundup{os.sep}" in filename
    text = f"groundup: note: {message}\n" if ours else warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(text)


def _fail(message: str) -> int:
    sys.stdout.flush()
    print(f"groundup: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def _machine_failure(error: Exception) -> str | None:
    """The line for a failure of disk or memory; None for a bug."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return "the GPU is out of memory; try a smaller --train.micro-batch-size or --model.context-length"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "out of memory; try a smaller --train.micro-batch-size, model or input"
    return None
