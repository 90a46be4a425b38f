"""tools/readme_command.py: README blocks come out exactly as they stand."""

import doctest
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = """# Name

<!-- command: demo -->
```sh
python3 -m venv .venv && \\
  .venv/bin/minice demo
```

Text with `code` and a block without a marker:

```sh
rm -rf nothing
```

<!-- command: check -->

````
echo "```"
````
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("readme_command", ROOT / "tools" / "readme_command.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blocks_come_out_as_they_stand(tool):
    assert tool.readme_commands(TEXT) == {
        "demo": "python3 -m venv .venv && \\\n  .venv/bin/minice demo\n",
        "check": 'echo "```"\n',
    }
    assert doctest.testmod(tool).failed == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- command: demo -->\nno block\n\n```\nx\n```\n", "demo"),
        (TEXT + TEXT, "twice"),
    ],
)
def test_wrong_markers_are_errors(tool, text, problem):
    with pytest.raises(ValueError, match=problem):
        tool.readme_commands(text)


def test_main_prints_one_block_or_says_what_there_is(tool, tmp_path, capsys):
    readme = tmp_path / "README.md"
    readme.write_text(TEXT, encoding="utf-8")
    assert tool.main(["check", str(readme)]) == 0
    assert capsys.readouterr().out == 'echo "```"\n'
    assert tool.main(["chekc", str(readme)]) == 1
    assert "demo, check" in capsys.readouterr().err
    assert tool.main(["demo", str(tmp_path / "none.md")]) == 1
    assert tool.main([]) == 2


def test_the_readme_has_the_commands_that_ci_runs(tool):
    assert {"demo", "check"} <= tool.readme_commands((ROOT / "README.md").read_text(encoding="utf-8")).keys()
