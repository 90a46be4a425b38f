"""The ``minice`` command: finds the verb, and turns what went wrong into a message and an exit code."""

import sys
from collections.abc import Sequence

from minice import __version__
from minice.cli import demo, doctor, fetch, lock, models, quantize, rerank, score, verify
from minice.cli.arguments import Command, HelpRequested, nearest, parse, usage, utf8_arguments
from minice.cli.writing import complain, discard_stdout, flush, write
from minice.errors import ConfigError, MiniceError, ModelNotFoundError

COMMANDS: dict[str, Command] = {
    module.COMMAND.name: module.COMMAND
    for module in (rerank, score, demo, models, fetch, verify, quantize, lock, doctor)
}
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Results go to stdout, everything else to stderr. No mistake of the user's ends in a traceback.

    Args:
        argv: The arguments behind the program's name; those of the process by default.

    Returns:
        The exit code: 0, or that of the error (see ``minice.errors``); 1 if the system refused to read
        or write; 130 after Ctrl-C. A reader that closed the pipe has what it wanted: 0.
    """
    try:
        code = _dispatch(utf8_arguments(sys.argv[1:]) if argv is None else list(argv))
        flush()
        return code
    except MiniceError as error:
        # A line that says what to run is no mistake of its own.
        lines = str(error).splitlines()
        complain("\n".join(f"{'' if line.startswith('Run: ') else 'minice: error: '}{line}" for line in lines))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_stdout()
        return 0
    except OSError as error:
        complain(f"minice: error: {error}")
        discard_stdout()  # what is left in the buffer would fail again at exit
        return 1


def _dispatch(argv: list[str]) -> int:
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        write(_overview())
        return 0
    if name == "--version":
        write(f"minice {__version__}\n")
        return 0
    if name not in COMMANDS:
        raise ConfigError(_no_such_verb(name))
    try:
        arguments = parse(COMMANDS[name], rest)
    except HelpRequested:
        write(usage(COMMANDS[name]))
        return 0
    try:
        return COMMANDS[name].run(arguments)
    except (ConfigError, ModelNotFoundError) as error:
        options = {option.key: f"--{option.name}" for option in COMMANDS[name].options}
        if error.where not in options:
            raise
        # The library names its own argument; here it was an option.
        raise type(error)(error.message, where=options[error.where]) from error


def _no_such_verb(name: str) -> str:
    verbs = f"expected one of {', '.join(COMMANDS)}"
    if not name:
        return f"a verb is missing: {verbs}\nRun: minice --help"
    if name.startswith("-"):
        return f"unknown option {name!r}: a verb comes first; {verbs}"
    meant = nearest(name, COMMANDS)
    return f"unknown verb {name!r}: {f'did you mean {meant}?' if meant else verbs}"


def _overview() -> str:
    verbs = "\n".join(f"  {command.name:<9} {command.summary}" for command in COMMANDS.values())
    return f"""\
usage: minice VERB [arguments]

Reranks passages for a query with a cross-encoder: offline, with a model whose bytes were checked.

{verbs}

  minice VERB --help    what a verb takes, with an example
  minice --version      the version

example:
  minice rerank "how do I undo the last commit" notes.jsonl --top-n 3
"""
