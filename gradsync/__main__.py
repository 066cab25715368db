"""`python -m gradsync COMMAND`."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand."""

    module: str
    """It has a `main(arguments)` that returns the exit code. It is imported when it is called."""
    summary: str


COMMANDS: Mapping[str, Command] = {
    "bench": Command("gradsync.bench._cli", "what synchronising costs here, in every way to write the loop"),
    "verify": Command("gradsync.verify", "the library's promises, tried on these machines"),
}


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    commands = {name: it for name, it in COMMANDS.items() if importlib.util.find_spec(it.module) is not None}
    lines = [f"  {name:<8}{command.summary}" for name, command in commands.items()]
    usage = "\n".join(["usage: python -m gradsync COMMAND [--help]", "", *lines, ""])
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(usage)
        return 0
    if not arguments:
        sys.stderr.write(usage)
        return 2
    if arguments[0] not in commands:
        sys.stderr.write(
            f"gradsync: There is no command {arguments[0]!r}. The commands are {' and '.join(commands)}; "
            "`python -m gradsync --help` says what they do.\n"
        )
        return 2
    code: int = importlib.import_module(commands[arguments[0]].module).main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
