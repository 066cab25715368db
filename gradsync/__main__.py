"""`python -m gradsync bench`."""

import sys


def main(arguments: list[str]) -> int:
    """Hand the arguments to the command that the first of them names."""
    if arguments[:1] == ["bench"]:
        from gradsync.bench._cli import main as bench

        return bench(arguments[1:])
    sys.stderr.write("usage: python -m gradsync bench [--help]\n")
    return 0 if arguments in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
