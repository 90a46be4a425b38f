"""Command-line arguments: what a verb takes, and a parser that reports every mistake at once.

argparse stops at the first mistake and accepts abbreviations, which change meaning when an option is
added; this is smaller than bending it.
"""

import difflib
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from minice.errors import ConfigError

Arguments = dict[str, Any]
_UNKNOWN = "unknown option"  # how the message of that mistake starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Positional:
    """One argument that is known by its place.

    Attributes:
        name: As help and errors write it, in capitals; its value is stored under it in lower case.
        help: One line for ``--help``.
        required: Whether leaving it out is a mistake; optional ones come last and default to None.
        read: Makes the value from the text; a ValueError says what is wrong with it.
    """

    name: str
    help: str
    required: bool = True
    read: Callable[[str], object] = str

    @property
    def key(self) -> str:
        """What the parsed value is stored under."""
        return self.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One ``--name VALUE``, or a switch where ``metavar`` is None.

    Attributes:
        name: Without the dashes; its value is stored under it with underscores.
        help: One line for ``--help``.
        metavar: What help writes for the value.
        read: Makes the value from the text; a ValueError says what is wrong with it.
        default: The value when the option is not given; a switch that is not given is False.
    """

    name: str
    help: str
    metavar: str | None = None
    read: Callable[[str], object] = str
    default: object = None

    @property
    def key(self) -> str:
        """What the parsed value is stored under."""
        return self.name.replace("-", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One verb: what it takes, what ``--help`` says, and the function that does it.

    Attributes:
        name: The verb.
        summary: One line for the list of verbs.
        description: What ``--help`` says below the usage line.
        example: Command lines that help shows.
        run: Does the work with the parsed arguments and returns the exit code.
        positionals: In order.
        options: In the order of help.
        check: Finds values that do not go together; one sentence each.
    """

    name: str
    summary: str
    description: str
    example: str
    run: Callable[[Arguments], int]
    positionals: tuple[Positional, ...] = ()
    options: tuple[Option, ...] = ()
    check: Callable[[Arguments], Iterable[str]] = lambda arguments: ()


class HelpRequested(Exception):
    """``--help`` stands among the arguments."""


def utf8_arguments(argv: Sequence[str]) -> list[str]:
    """Decode the process's arguments as UTF-8, whatever the locale decoded them as.

    Bytes that are not UTF-8 stay as lone surrogates: a file may be called that, a query may not.
    """
    return [os.fsencode(argument).decode("utf-8", "surrogateescape") for argument in argv]


def local_path(text: str) -> str:
    """Return the path that opens the file: a UTF-8 argument, as the locale would have decoded it."""
    return os.fsdecode(text.encode("utf-8", "surrogateescape"))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None.

    Args:
        name: What was written.
        known: What could have been.

    >>> nearest("--topn", ["--top-n", "--fields"])
    '--top-n'
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def read_text(text: str) -> str:
    """Accept any text that is valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("not valid UTF-8") from None
    return text


def read_count(minimum: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from ``minimum`` up, written in plain digits."""

    def read(text: str) -> int:
        # isdecimal alone would let other scripts' digits through, int() alone "1_0" and " 3".
        if not (text.isascii() and text.isdecimal() and len(text) < 19 and int(text) >= minimum):
            raise ValueError(f"expected a whole number of at least {minimum}, got {text!r}")
        return int(text)

    return read


def read_choice(*choices: str) -> Callable[[str], str]:
    """Return a reader that accepts exactly these words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"expected {' or '.join(choices)}, got {text!r}")
        return text

    return read


def parse(command: Command, argv: Sequence[str]) -> Arguments:
    """Read a verb's arguments.

    ``--name value`` and ``--name=value`` are the same; ``--`` ends the options; ``-`` is a positional.
    Names are not abbreviated, and giving an option twice is a mistake.

    Args:
        command: The verb.
        argv: What stands behind the verb.

    Returns:
        Every positional and option of the verb by its key.

    Raises:
        HelpRequested: ``--help`` or ``-h`` stands before any ``--``.
        ConfigError: Every mistake, one on each line.
    """
    words, given, mistakes = _split(command, argv)
    arguments: Arguments = {positional.key: None for positional in command.positionals}
    for option in command.options:
        arguments[option.key] = option.default if option.metavar else False
    for option, text in given:
        if not option.metavar:
            arguments[option.key] = True
            continue
        try:
            arguments[option.key] = option.read(text)
        except ValueError as error:
            mistakes.append(f"--{option.name}: {error}")
    for positional, word in zip(command.positionals, words, strict=False):
        try:
            arguments[positional.key] = positional.read(word)
        except ValueError as error:
            mistakes.append(f"{positional.name}: {error}")
    mistakes += [
        f"{positional.name} is missing: {positional.help}"
        for positional in command.positionals[len(words) :]
        if positional.required
    ]
    # The value of an option that nobody knows looks like one word too many, and is no mistake of its own.
    if (extra := words[len(command.positionals) :]) and not any(map(_is_unknown, mistakes)):
        last = command.positionals[-1].name if command.positionals else ""
        hint = f" (one {last} only; put quotes around a value with spaces)" if last else ""
        mistakes.append(f"unexpected: {' '.join(map(repr, extra))}{hint}")
    mistakes += command.check(arguments)
    if mistakes:
        raise ConfigError("\n".join([*mistakes, f"Run: minice {command.name} --help"]))
    return arguments


def _split(command: Command, argv: Sequence[str]) -> tuple[list[str], list[tuple[Option, str]], list[str]]:
    """Tell positionals from options: the words, the options with their texts, the mistakes."""
    options = {f"--{option.name}": option for option in command.options}
    words: list[str] = []
    given: list[tuple[Option, str]] = []
    mistakes: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return words + rest, given, mistakes
        if word in ("-h", "--help"):
            raise HelpRequested
        if word == "-" or not word.startswith("-"):
            words.append(word)
            continue
        name, equals, text = word.partition("=")
        meant = name if name in options else nearest(name, options)
        if name not in options:
            mistakes.append(f"{_UNKNOWN} {name!r}: {_unknown_hint(command, name, meant)}")
        elif any(options[name] is earlier for earlier, _ in given):
            mistakes.append(f"{name} is given twice")
        # A misspelt option takes its value along, or that would be reported as a second mistake.
        if meant and options[meant].metavar and not equals:
            if rest and (rest[0] == "-" or not rest[0].startswith("--")):
                text = rest.pop(0)
            elif name in options:
                mistakes.append(f"{name} needs a value: {options[name].help}")
                continue
        elif equals and name in options and not options[name].metavar:
            mistakes.append(f"{name} takes no value, got {text!r}")
        if name in options:
            given.append((options[name], text))
    return words, given, mistakes


def _is_unknown(mistake: str) -> bool:
    return mistake.startswith(_UNKNOWN)


def _unknown_hint(command: Command, name: str, meant: str | None) -> str:
    if meant:
        return f"did you mean {meant}?"
    if re.fullmatch("--[a-z]+(-[a-z]+)*", name):
        return f"{command.name} takes no such option"
    return "put -- before a text that starts with a dash"


def usage(command: Command) -> str:
    """Return the ``--help`` text of a verb."""
    places = [p.name if p.required else f"[{p.name}]" for p in command.positionals]
    rows = [(p.name, p.help) for p in command.positionals]
    rows += [(f"--{o.name} {o.metavar or ''}".rstrip(), o.help) for o in command.options]
    rows.append(("--help", "show this text"))
    width = max(len(name) for name, _ in rows)
    lines = [
        f"usage: {' '.join(['minice', command.name, *places, '[options]'])}",
        "",
        command.description,
        "",
    ]
    for name, help_text in rows:
        first, *more = textwrap.wrap(help_text, 100 - width)
        lines += [f"  {name:<{width}}  {first}", *(" " * (width + 4) + line for line in more)]
    lines += ["", "example:", *(f"  {line}" for line in command.example.splitlines())]
    return "\n".join(lines) + "\n"
