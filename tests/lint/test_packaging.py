"""What a wheel installs: one package, with the linked parts inside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Paths inside a wheel built from a copy of this tree, so that no earlier build is in the way."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    run = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(tree)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    [wheel] = folder.glob("vattn-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_one_package_is_installed(names: list[str]) -> None:
    """Above all nothing called `kernels`, the name of a package that transformers imports."""
    top = {name.split("/")[0] for name in names}
    assert "vattn" in top
    [info] = top - {"vattn"}
    assert info.startswith("vattn-") and info.endswith(".dist-info")


@pytest.mark.parametrize("part", ["vattn", "vmm", "kernels"])
def test_every_module_is_in_the_wheel(names: list[str], part: str) -> None:
    folder = ROOT / part
    inside = "vattn" if part == "vattn" else f"vattn/{part}"
    modules = {f"{inside}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
    assert modules and modules <= set(names)


def test_types_are_marked(names: list[str]) -> None:
    assert "vattn/py.typed" in names


def test_importing_parts_is_cheap() -> None:
    """`kernels` and `vmm` may be imported by others by accident, so they bring nothing along."""
    script = "import sys, kernels, vmm; print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert run.stdout.strip() == "[]", run.stderr
