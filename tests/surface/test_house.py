"""The shape of the package, read from its source: who imports what, how long files are, where state is kept."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradsync
import gradsync.functional

PACKAGE = Path(gradsync.__file__).parent
CORE = ("functional", "decorator", "ranks")
PROGRAMS = ("gradsync.bench", "gradsync.verify")  # which run in processes of their own
STATE = "gradsync._state"  # the one file that keeps state at module level
# What differs between versions of torch is written once; the audit asks engines of any kind, those not made here too.
MAY_IMPORT_PRIVATES = {("gradsync._audit.engines", "gradsync.engines._torch")}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = {name_of(path) for path in PACKAGE.rglob("__init__.py")}


def package_of(module: str) -> str:
    return module if module in PACKAGES else module.rpartition(".")[0]


def imports(tree: ast.Module) -> Iterator[str]:
    """What a module imports from the package, by full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def module_of(name: str) -> str | None:
    """The module that a full name is, or is of."""
    return name if name in MODULES else name.rpartition(".")[0] if name.rpartition(".")[0] in MODULES else None


def private_imports(module: str, tree: ast.Module) -> list[str]:
    """What it imports that is private to another package below `gradsync`."""
    found = []
    for name in imports(tree):
        parts = name.split(".")
        if parts[0] != "gradsync" or (module, module_of(name)) in MAY_IMPORT_PRIVATES:
            continue
        owners = [".".join(parts[:at]) for at in range(2, len(parts)) if parts[at].startswith("_")]
        home = f"{package_of(module)}."
        found += [name for owner in owners if owner in PACKAGES and not home.startswith(f"{owner}.")]
    return found


def loops(edges: dict[str, set[str]]) -> list[str]:
    """The nodes from which a way leads back to them."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += edges[node]
        return seen

    return [node for node in edges if node in reached(node)]


def num_code_lines(path: Path) -> int:
    """Lines with code on them: docstrings, comments and blank lines are not counted."""
    source = path.read_text(encoding="utf-8")
    nothing = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for token in tokens if token.type not in nothing for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


MUTABLE = {"deque", "defaultdict", "Counter", "count", "local", "Lock", "RLock", "ContextVar"}
MUTABLE |= {"set", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}


def state(tree: ast.Module) -> Iterator[str]:
    """What a module keeps that can change: empty containers, locks, `global`, caches."""
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        is_made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in MUTABLE
        if is_made or (isinstance(value, ast.Dict | ast.List) and ast.unparse(value) in {"{}", "[]"}):
            yield ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield ast.unparse(node)
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list]
            yield from (node.name for one in decorators if one in {"cache", "lru_cache"})


def test_no_package_imports_what_is_private_to_another() -> None:
    """The decorator, overlap and the others stand on the public names of `gradsync.functional`, as a user's would."""
    wrong = {module: found for module, tree in MODULES.items() if (found := private_imports(module, tree))}
    assert not wrong


@pytest.mark.parametrize(
    "line",
    ["from gradsync.functional._window.run import Run", "from gradsync.functional import _run", "import gradsync.engines._ddp"],
)
def test_a_private_import_is_found(line: str) -> None:
    assert private_imports("gradsync.decorator.call_runner", ast.parse(line))
    assert not private_imports("gradsync.decorator.call_runner", ast.parse("from gradsync.functional import Run"))
    assert not private_imports("gradsync.decorator.call_runner", ast.parse("from gradsync._errors import GradSyncError"))


def test_what_others_import_of_functional_is_public() -> None:
    used = {
        name.removeprefix("gradsync.functional.")
        for module, tree in MODULES.items()
        if not module.startswith("gradsync.functional")
        for name in imports(tree)
        if name.startswith("gradsync.functional.")
    }
    assert used <= set(gradsync.functional.__all__)


def test_imports_go_one_way() -> None:
    """Neither modules nor packages import each other in a circle; `gradsync` itself is the table of contents."""
    modules: dict[str, set[str]] = {module: set() for module in MODULES}
    packages: dict[str, set[str]] = {}
    for module, tree in MODULES.items():
        targets = {target for name in imports(tree) if (target := module_of(name)) not in {None, module, "gradsync"}}
        modules[module] |= targets
        home = package_of(module)
        packages.setdefault(home, set()).update(to for t in targets if (to := package_of(t)) not in {home, "gradsync"})
    packages.pop("gradsync")
    assert not loops(modules)
    assert not loops(packages)
    assert loops({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == ["a", "b"]


@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py")))
def test_each_room_has_a_map_of_all_its_files(room: str) -> None:
    text = (PACKAGE / room / "README.md").read_text(encoding="utf-8")
    files = [path.name for path in (PACKAGE / room).rglob("*.py") if path.name != "__init__.py"]
    assert set(re.findall(r"`(\w+\.py)`", text)) == set(files)
    assert len(set(files)) == len(files), "one name, one file"


def test_the_map_of_engines_tells_what_each_engine_of_a_ddp_overrides() -> None:
    """A cell has words where the class has the method, and is empty where it inherits it."""
    text = (PACKAGE / "engines" / "README.md").read_text(encoding="utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.count("|") == 7]
    (_, *heads), _, *rows = cells
    trees = [tree for module, tree in MODULES.items() if package_of(module) == "gradsync.engines"]
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    has = {name: {one.name for one in node.body if isinstance(one, ast.FunctionDef)} for name, node in classes.items()}
    values = {ast.unparse(node.targets[0]) for node in classes["Engine"].body if isinstance(node, ast.Assign)}
    asked = has["Engine"] - {"__init__"} | values | {"_complete_armed"}
    for column, name in enumerate(head.strip("`") for head in heads):
        told = {one for method, *words in rows if words[column] for one in re.findall(r"`(\w+)`", method)}
        assert told == has[name] & asked, name


def test_the_floors_of_functional_are_in_the_order_of_its_map() -> None:
    """Each of its rooms imports only rooms that stand below it there, and none is left out."""
    text = (PACKAGE / "functional" / "README.md").read_text(encoding="utf-8")
    floors = [f"gradsync.functional.{name}" for name in re.findall(r"^(_\w+)  ", text, re.MULTILINE)]
    assert set(floors) == {package for package in PACKAGES if package.startswith("gradsync.functional.")}
    for module, tree in MODULES.items():
        if (home := package_of(module)) in floors:
            homes = {package_of(target) for name in imports(tree) if (target := module_of(name)) is not None}
            assert homes.isdisjoint(["gradsync.functional", *floors[: floors.index(home)]]), module


def test_no_file_is_long() -> None:
    """At most 250 lines of code."""
    lines = {str(path.relative_to(PACKAGE)): num_code_lines(path) for path in PACKAGE.rglob("*.py")}
    assert not {name: number for name, number in lines.items() if number > 250}


def test_few_flags_in_the_core() -> None:
    """A boolean that is passed on and on is a type that is missing: fewer than ten parameters are one."""
    flags = [
        f"{module}.{function.name}({argument.arg})"
        for module, tree in MODULES.items()
        if module.split(".")[1:2] and module.split(".")[1] in CORE
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        if argument.annotation is not None and "bool" in ast.unparse(argument.annotation).split(" | ")
    ]
    assert len(flags) < 10, flags


def test_state_at_module_level_is_in_one_file() -> None:
    """Nothing that can change is kept by a module, but for what torch leaves no other place for."""
    kept = {(module, name) for module, tree in MODULES.items() for name in state(tree)}
    assert {module for module, _ in kept} == {STATE}, kept


@pytest.mark.parametrize(
    ("source", "kept"),
    [("A: dict[int, int] = {}", True), ("A = weakref.WeakSet()", True), ("A = {1: 2}", False), ("A = frozenset()", False),
     ("def f():\n    global A", True), ("@functools.cache\ndef f(): pass", True), ("def f():\n    a = {}", False)],
)  # fmt: skip
def test_state_is_found(source: str, kept: bool) -> None:
    assert bool(list(state(ast.parse(source)))) == kept


FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"}


def made_anywhere(tree: ast.Module) -> Iterator[str]:
    """The calls that make a tensor on the default device, which is the user's to set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("torch.") in FACTORIES:
            if ast.unparse(node.func).startswith("torch.") and "device" not in {word.arg for word in node.keywords}:
                yield ast.unparse(node)


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """`torch.set_default_device("cuda")` is a line of the user's. The programs' own models and data are not asked."""
    library = {module: tree for module, tree in MODULES.items() if not module.startswith(PROGRAMS)}
    assert not {module: found for module, tree in library.items() if (found := [*made_anywhere(tree)])}
    assert [*made_anywhere(ast.parse("torch.zeros(2); torch.ones(2, device=x)"))] == ["torch.zeros(2)"]
