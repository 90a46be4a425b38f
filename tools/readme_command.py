"""Print a command block of README.md, so that it can be run exactly as it stands there.

A block is the fenced code right after a line ``<!-- command: NAME -->``.

Usage: python tools/readme_command.py NAME [README]
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
_BLOCK = re.compile(
    r"^<!-- command: (?P<name>[\w-]+) -->\n+(?P<fence>`{3,})[^\n`]*\n(?P<code>.*?)^(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def readme_commands(text: str) -> dict[str, str]:
    """Return the marked blocks of a Markdown text by name.

    Raises:
        ValueError: A marker stands twice, or has no fenced block right after it.

    >>> readme_commands("<!-- command: demo -->\\n```sh\\nminice demo\\n```\\n")
    {'demo': 'minice demo\\n'}
    """
    blocks: dict[str, str] = {}
    for block in _BLOCK.finditer(text):
        if block["name"] in blocks:
            raise ValueError(f"the marker of {block['name']!r} stands twice")
        blocks[block["name"]] = block["code"]
    markers = re.findall(r"<!-- command: ([\w-]+) -->", text)
    lonely = sorted(set(markers) - set(blocks))
    if lonely:
        raise ValueError(f"no fenced block right after the marker of {', '.join(lonely)}")
    return blocks


def main(arguments: list[str]) -> int:
    """Print the block that the first argument names."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    readme = Path(arguments[1]) if arguments[1:] else README
    try:
        blocks = readme_commands(readme.read_text(encoding="utf-8"))
        sys.stdout.write(blocks[arguments[0]])
    except (OSError, ValueError) as error:
        print(f"{readme}: {error}", file=sys.stderr)
        return 1
    except KeyError:
        print(f"{readme}: no command {arguments[0]!r}; there are: {', '.join(blocks) or 'none'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
