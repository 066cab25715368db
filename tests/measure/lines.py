"""Lines of code by room, without docstrings, comments and blank lines: `python -m tests.measure.lines`."""

from __future__ import annotations

from collections import defaultdict

from tests.surface.test_house import CORE, PACKAGE, num_code_lines


def main() -> None:
    rooms: dict[str, list[int]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parent.as_posix()
        rooms["gradsync" if room == "." else room].append(num_code_lines(path))
    for room, lines in rooms.items():
        print(f"{room:<24}{len(lines):>4} files{sum(lines):>7} lines")
    core = [one for room, lines in rooms.items() if room == "gradsync" or room.split("/")[0] in CORE for one in lines]
    print(f"{'the core':<24}{len(core):>4} files{sum(core):>7} lines")


if __name__ == "__main__":
    main()
