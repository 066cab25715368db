"""The documentation is a program: whatever looks like code in it is run.

The ```python blocks of a Markdown file run in order in one namespace, as if typed into one interpreter from top to bottom.
What a reader has anyway (a model, a loader) may stand in an HTML comment that begins with `<!-- python`: it runs in its
place, and does not show. There is no way to mark a block as not to be run.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import gradsync

ROOT = Path(__file__).parents[2]
PACKAGE = Path(gradsync.__file__).parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted(PACKAGE.rglob("*.md"))]
NEEDS = {"overlap.md": ("overlap", "compress"), "parts.md": ("fit",)}  # keywords of accumulating that a document is about
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    language: str
    line: int  # of its first line of code
    code: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, and the hidden ones, in order."""
    found, opening, lines = [], None, []
    for number, line in enumerate(text.splitlines(), start=1):
        if opening is None:
            opening = re.match(r"\s*(?:(?P<fence>```+)|(?P<hidden><!--) *(?=python\b))(?P<language>.*)", line)
            lines = []
        elif line.strip() == (opening["fence"] or "-->"):
            found.append(Block(opening["language"].strip(), number - len(lines), textwrap.dedent("\n".join(lines))))
            opening = None
        else:
            lines.append(line)
    assert opening is None, "a code block has no end"
    return found


def execute(text: str, file: str) -> int:
    """Run the Python blocks; the number of those that a reader sees."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    torch.manual_seed(0)
    for block in blocks(text):
        if not re.match(r"py", block.language, re.IGNORECASE):
            continue
        assert block.language == "python", f"{file}:{block.line}: a block runs as ```python, not ```{block.language}"
        # Blank lines above it, so that a traceback shows the document's own line numbers.
        exec(compile("\n" * (block.line - 1) + block.code, file, "exec"), namespace)  # noqa: S102
    return len(re.findall(r"^\s*```+python\s*$", text, re.MULTILINE))


@pytest.fixture(autouse=True)
def _undo() -> object:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


# -- Markdown -----------------------------------------------------------------------------------------------------------


def skip_if_not_there(document: Path) -> None:
    missing = set(NEEDS.get(document.name, ())) - set(inspect.signature(gradsync.accumulating).parameters)
    if missing:
        pytest.skip(f"accumulating has no keyword {', '.join(sorted(missing))} yet")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_blocks_of_a_document_run(document: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    skip_if_not_there(document)
    monkeypatch.chdir(tmp_path)  # files that the examples write are nobody's
    shown = execute(document.read_text(encoding="utf-8"), str(document))
    assert shown or document.name != "README.md" or document.parent != ROOT, "the README has no ```python block"


def execute_on_a_rank(document: Path, folder: Path) -> None:
    found = Path.cwd()
    mine = folder / str(dist.get_rank())
    mine.mkdir()
    os.chdir(mine)
    try:
        execute(document.read_text(encoding="utf-8"), str(document))
    finally:
        os.chdir(found)
        torch.set_default_dtype(torch.float32)


FOR_RANKS = [document for document in DOCUMENTS if document.parent == ROOT / "docs" or document.name == "README.md"]


@pytest.mark.parametrize("document", FOR_RANKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_blocks_of_a_document_run_on_two_ranks(ranks, document: Path, tmp_path: Path) -> None:
    """A reader copies them into a program for several ranks: nothing in them is for a single rank only."""
    skip_if_not_there(document)
    ranks(2).run(execute_on_a_rank, document, tmp_path)


def commands(text: str) -> list[tuple[int, list[str]]]:
    """The words of each command in the shell blocks, with its line."""
    found = []
    for block in blocks(text):
        if block.language not in {"bash", "sh", "shell", "console"}:
            continue
        code = re.sub(r"\\\n", "  ", block.code)
        for offset, line in enumerate(code.splitlines()):
            for part in re.split(r"&&|\|\|?|;", line.removeprefix("$ ")):
                words = shlex.split(part, comments=True)
                if words:
                    found.append((block.line + offset, words))
    return found


def problem(words: list[str]) -> str | None:
    """What does not exist of what a command names: files, modules, options of the examples, extras."""
    for word in words:
        path = word.removeprefix("./")
        looks_local = re.match(r"(\./|examples/|tests/|gradsync/|\.ci/)", word)
        if looks_local and not (ROOT / path.split("[")[0].split("::")[0]).exists():
            return f"there is no file {word}"
        extras = re.fullmatch(r"(?:\.|gradsync|-e\.)\[(.+)\]", word)
        for extra in extras[1].split(",") if extras else ():
            if not re.search(rf"^{extra.strip()} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE):
                return f"there is no extra {extra}"
    modules = [after for word, after in zip(words, words[1:], strict=False) if word == "-m"]
    for module in modules:
        if module.startswith(("gradsync", "tests")) and importlib.util.find_spec(module) is None:
            return f"there is no module {module}"
    words = words[: words.index("--")] if "--" in words else words  # what follows is another program's
    scripts = [position for position, word in enumerate(words) if script_of(word) is not None]
    if scripts:
        known = options(script_of(words[scripts[-1]]))
        unknown = [word for word in words[scripts[-1] + 1 :] if word.startswith("-") and word.split("=")[0] not in known]
        if unknown:
            return f"{words[scripts[-1]]} has no option {unknown[0]}"
    return None


def script_of(word: str) -> Path | None:
    """The file of a script, or of a module or package of the tests that is run by `-m`."""
    path = ROOT / word.replace(".", "/") if word.startswith("tests.") else None
    names = [ROOT / word] if word.endswith(".py") else [path.with_suffix(".py"), path / "__main__.py"] if path else []
    return next((name for name in names if name.is_file()), None)


def options(script: Path) -> set[str]:
    """The options that a script, or a module beside it that it imports, adds to its parser."""
    source = script.read_text(encoding="utf-8")
    beside = [script.parent / f"{name}.py" for name in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)]
    sources = [source, *(path.read_text(encoding="utf-8") for path in beside if path.is_file())]
    return {"-h", "--help", *re.findall(r"add_argument\(\s*\"(-[\w-]+)\"", "\n".join(sources))}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_the_shell_commands_of_a_document_name_exists(document: Path) -> None:
    found = commands(document.read_text(encoding="utf-8"))
    assert found or document != ROOT / "README.md", "the README has no ```bash block"
    wrong = [f"{document.name}:{line}: {what}" for line, words in found if (what := problem(words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_relative_links_of_a_document_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


def test_the_test_that_contributing_shows_is_run() -> None:
    [shown] = [block.code for block in blocks((ROOT / "CONTRIBUTING.md").read_text()) if block.language == "python"]
    assert Path(__file__).with_name("test_shown.py").read_text().strip().endswith(shown.strip())


def test_the_documents_are_found() -> None:
    names = {document.name for document in DOCUMENTS}
    assert names >= {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "how-it-works.md", "recipes.md"}


# -- docstrings -----------------------------------------------------------------------------------------------------------


def modules() -> list[str]:
    return ["gradsync", *(found.name for found in pkgutil.walk_packages([str(PACKAGE)], "gradsync."))]


def examples() -> list[doctest.DocTest]:
    """The docstrings with examples, of every module but `__main__`, which would run."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for name in modules():
        if not name.endswith("__main__"):
            module = importlib.import_module(name)
            found += finder.find(module, extraglobs={"gradsync": gradsync, "torch": torch})
    return [test for test in found if test.examples]


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_a_docstring_shows_what_happens(test: doctest.DocTest) -> None:
    torch.manual_seed(0)
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=said.append)
    assert results.attempted
    assert not results.failed, "".join(said)


def test_no_docstring_is_overlooked() -> None:
    """A finder passes over what it does not know (a wrapped function, a module that isn't imported); the source doesn't."""
    written = 0
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                written += len(doctest.DocTestParser().get_examples(ast.get_docstring(node) or ""))
    run = sum(len(test.examples) for test in examples())
    assert run == written > 0


# -- these tests themselves ---------------------------------------------------------------------------------------------

SAMPLE = """
Text, and what a reader has anyway:

<!-- python
numbers = [1, 2]
-->
```python
total = sum(numbers)
```
- in a list:
  ```python
  if total != {expected}:
      raise ValueError(total)
  ```
```bash
# a comment
python {script}   # another
```
"""


def test_blocks_share_a_namespace_and_hidden_ones_run_too() -> None:
    assert execute(SAMPLE.format(expected=3, script=""), "sample.md") == 2


def test_a_failing_block_is_found_at_its_own_line() -> None:
    with pytest.raises(ValueError, match="3") as caught:
        execute(SAMPLE.format(expected=4, script=""), "sample.md")
    assert caught.traceback[-1].lineno == 12  # counted from 0


@pytest.mark.parametrize("language", ["python no-run", "py", "Python", "pycon"])
def test_a_block_that_would_not_run_is_refused(language: str) -> None:
    with pytest.raises(AssertionError, match="runs as ```python"):
        execute(f"```{language}\n1 / 0\n```\n", "sample.md")


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("examples/gpt.py --quick --steps=3", None),
        ("-m torch.distributed.run --standalone examples/gpt.py --double", None),
        ("examples/none.py", "there is no file examples/none.py"),
        ("examples/gpt.py --slow", "examples/gpt.py has no option --slow"),
        ("-m gradsync.nothing", "there is no module gradsync.nothing"),
        ("-m tests.nothing", "there is no module tests.nothing"),
        ("-m tests.programs --programs 5", None),
        ("-m tests.programs --fast", "tests.programs has no option --fast"),
        ("-m tests.measure.speed --rounds 3", None),
        ("-m tests.measure.speed -- -k fsdp2", None),
        ("-m pip install -e '.[test,nothing]'", "there is no extra nothing"),
    ],
)
def test_a_command_that_names_what_is_not_there_is_found(script: str, what: str | None) -> None:
    [(line, words)] = commands(SAMPLE.format(expected=3, script=script))
    assert line == 17
    assert problem(words) == what
