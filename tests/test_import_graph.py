"""Dependencies point one way: no layer imports one above it, no modules import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

LAYERS: tuple[tuple[str, ...], ...] = (
    ("vmm", "kernels"),
    ("errors", "checks", "config", "params", "outputs", "prompts", "token_bound", "interrupts", "units"),
    ("kv", "attention", "models", "sampling", "metrics"),
    ("engine",),
    ("llm", "hf"),
    ("scale", "serve"),
    ("lab",),
    ("commands", "cli"),
)
"""From the bottom up: a module may import its own layer and those below. What is not named here lies beside
`llm`."""

KNOWN_ARROWS_UP = {
    ("vattn.config", "vattn.kv.layout"): "KVCacheConfig.shape makes a KVShape",
    ("vattn.config", "vattn.kv.backends"): "KVCacheConfig.backend names one",
}
"""Imports of an upper layer that are still there, each with its reason. This list may only shrink."""


class Imports(NamedTuple):
    """What a module imports, by full name."""

    on_import: set[str]
    """By statements that run when the module is imported."""
    in_functions: set[str]
    """By statements that run when one of its functions is called."""


def read_package(folder: Path, name: str) -> dict[str, Imports]:
    """Every module of a package, by full name. Imports for type checkers alone are left out."""
    files = {module_name(path, folder, name): path for path in python_files(folder)}
    return {
        module: imports_of(
            ast.parse(path.read_text()),
            files,
            module if path.stem == "__init__" else module.rpartition(".")[0],
        )
        for module, path in files.items()
    }


@cache
def vattn() -> dict[str, Imports]:
    return read_package(ROOT / "vattn", "vattn")


def python_files(folder: Path) -> Iterator[Path]:
    """Follows links to folders: `vattn/vmm` and `vattn/kernels` are such."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            yield from python_files(path)
        elif path.suffix == ".py":
            yield path


def module_name(path: Path, folder: Path, package: str) -> str:
    parts = [package, *path.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.Module, modules: Mapping[str, object], package: str) -> Imports:
    """`package`: what relative imports count from."""
    found = Imports(set(), set())

    def visit(node: ast.AST, inside: bool) -> None:
        names = found.in_functions if inside else found.on_import
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for statement in child.orelse:
                    visit(ast.Module([statement], []), inside)
            elif isinstance(child, ast.Import):
                names.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                full = [f"{base}.{alias.name}" for alias in child.names]
                names.update(name if name in modules else base for name in full)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                visit(child, inside or function)

    visit(tree, inside=False)
    return found


def layer(module: str) -> int:
    """Index in LAYERS. The package itself is imported by everybody and lies on top only by what it shows."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else "cli"
    beside_llm = next(i for i, rooms in enumerate(LAYERS) if "llm" in rooms)
    return next((i for i, rooms in enumerate(LAYERS) if room in rooms), beside_llm)


def arrows_up(package: Mapping[str, Imports]) -> set[tuple[str, str]]:
    """(module, imported) of imports at import time that point to an upper layer."""
    return {
        (module, other)
        for module, imports in package.items()
        for other in imports.on_import
        if other in package and "." in other and layer(other) > layer(module)
    }


def circles(package: Mapping[str, Imports]) -> list[list[str]]:
    """Strongly connected components of more than one module, at import time (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def connect(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in sorted(package[module].on_import & package.keys()):
            if other not in index:
                connect(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], index[other])
        if lowest[module] == index[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for module in package:
        if module not in index:
            connect(module)
    return found


def test_no_module_imports_an_upper_layer() -> None:
    found = arrows_up(vattn())
    assert not found - KNOWN_ARROWS_UP.keys(), "new imports of an upper layer"
    assert not KNOWN_ARROWS_UP.keys() - found, "mended: take these out of KNOWN_ARROWS_UP"


def test_no_modules_import_each_other() -> None:
    assert circles(vattn()) == []


def test_nothing_below_reaches_into_the_lab_or_the_commands_even_later() -> None:
    """An engine must run without what measures it; `vattn` itself only names what is to be had."""
    package = vattn()
    lab = next(i for i, rooms in enumerate(LAYERS) if "lab" in rooms)
    reaching = {
        (module, other)
        for module, imports in package.items()
        for other in imports.on_import | imports.in_functions
        if layer(module) < lab <= layer(other) and other in package and "." in other
    }
    assert reaching == set()


def test_driver_and_kernel_code_stand_alone() -> None:
    for name, other in (("vmm", "kernels"), ("kernels", "vmm")):
        for module, imports in read_package(ROOT / name, name).items():
            roots = {found.split(".")[0] for found in imports.on_import | imports.in_functions}
            assert other not in roots, module
            assert "vattn" not in roots, module


def write(folder: Path, files: Mapping[str, str]) -> dict[str, Imports]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_package(folder, "vattn")


def test_an_import_of_an_upper_layer_is_found_wherever_it_stands(tmp_path: Path) -> None:
    package = write(
        tmp_path,
        {
            "__init__.py": "",
            "llm.py": "",
            "lab/bench.py": "import vattn.llm",
            "engine/a.py": "try:\n    from vattn import llm\nexcept ImportError:\n    pass",
            "engine/b.py": "class B:\n    import vattn.lab.bench",
            "engine/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vattn.llm",
            "engine/d.py": "def d():\n    import vattn.llm",
            "engine/e.py": "from .. import llm\nfrom . import a\nfrom .b import B",
        },
    )
    assert arrows_up(package) == {
        ("vattn.engine.a", "vattn.llm"),
        ("vattn.engine.b", "vattn.lab.bench"),
        ("vattn.engine.e", "vattn.llm"),
    }
    assert package["vattn.engine.e"].on_import == {"vattn.llm", "vattn.engine.a", "vattn.engine.b"}
    assert package["vattn.engine.d"].in_functions == {"vattn.llm"}


def test_a_circle_is_found_and_one_closed_by_a_function_is_none(tmp_path: Path) -> None:
    package = write(
        tmp_path,
        {
            "kv/a.py": "import vattn.kv.b",
            "kv/b.py": "import vattn.kv.c",
            "kv/c.py": "import vattn.kv.a",
            "kv/d.py": "import vattn.kv.e",
            "kv/e.py": "def e():\n    import vattn.kv.d",
        },
    )
    assert circles(package) == [["vattn.kv.a", "vattn.kv.b", "vattn.kv.c"]]
