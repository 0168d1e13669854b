"""The README's two commands are what continuous integration runs and what it says they are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMANDS = re.findall(
    r"^```sh\n(.*?)^```$",
    (ROOT / "README.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


def test_there_are_two_commands():
    """The README starts with two shell blocks: the main job, and the tests."""
    main, tests, *_ = COMMANDS
    assert "docs/examples/images.py" in main
    assert "pytest" in tests


@pytest.mark.parametrize("command", COMMANDS[:2])
def test_a_command_is_one_line_with_its_own_environment(command):
    """A command is one line that makes an environment and installs the pinned torch in it."""
    line, newline, rest = command.partition("\n")
    assert (newline, rest) == ("\n", "")
    environment = re.match(r"python3 -m venv (\.venv-\w+) && ", line)
    assert environment
    assert f"{environment[1]}/bin/pip install torch==2.13.0 -e '.[" in line


def test_environments_are_apart_and_ignored():
    """Each command has a directory of its own for its environment, and git ignores both."""
    environments = [re.search(r"venv (\S+)", command)[1] for command in COMMANDS[:2]]
    assert len(set(environments)) == 2
    assert "/.venv*/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_ci_runs_the_test_command():
    """Continuous integration runs the README's test command, word for word."""
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert COMMANDS[1].strip() in [line.strip() for line in lines]
