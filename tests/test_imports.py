"""Imports flow one way: down the list of rooms; and no file of the library imports in a circle."""

import ast
import graphlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = [
    "smcdecode.errors",
    "smcdecode_kernels",
    "smcdecode.infer",
    "smcdecode.potentials",
    "smcdecode.declare",
    "smcdecode.engine",
    "smcdecode.report",
    "smcdecode.sample",
    "smcdecode.stream",
    "smcdecode.exact",
    "smcdecode.planner",
    "smcdecode.distill",
    "smcdecode.integrations",
    "smcdecode.arguments",
    "smcdecode.cli",
]
SERVER, BATCH = ("smcdecode.integrations.server",), "smcdecode.integrations.batch"
FACADES = ("smcdecode", "smcdecode.__main__")  # they may import every room, and only cli and integrations import them
REPLICAS = tuple(f"smcdecode.integrations.ray.{name}" for name in ("front", "online", "replica", "router"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(f): f for room in ("smcdecode", "smcdecode_kernels") for f in sorted((ROOT / room).rglob("*.py"))}


def imports(name):
    """The library's own modules that a module imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively; write the full name"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {i for i in inside if i in FILES} or {node.module}
    return {module for module in found if module.split(".")[0] in ("smcdecode", "smcdecode_kernels")}


def room(name):
    return next((i for i, r in enumerate(ORDER) if name == r or name.startswith(r + ".")), None)


@pytest.mark.parametrize("name", [n for n in FILES if n not in FACADES])
def test_a_module_imports_only_from_rooms_above_its_own(name):
    assert room(name) is not None, f"{name} stands in no room of {ORDER}"
    for other in imports(name):
        if other in FACADES:
            assert room(name) >= ORDER.index("smcdecode.integrations"), f"{name} imports the public face {other}"
        else:
            assert other in FILES, f"{name} imports {other}, which does not exist"
            assert room(other) <= room(name), f"{name} imports {other}, which stands below it"


def test_no_imports_in_a_circle():
    graph = {name: imports(name) - {name} for name in FILES if name not in FACADES}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_what_is_optional_is_imported_where_it_is_used():
    """Arrow by no module as it is imported; Ray and the server's libraries by their own rooms alone."""
    served = (*SERVER, *REPLICAS)
    optional = {"ray": REPLICAS, "pyarrow": (), "fastapi": served, "uvicorn": SERVER, "pydantic": (*SERVER, BATCH)}
    for name, file in FILES.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in found:
                rooms = optional.get(module.split(".")[0], (name,))
                assert any(name == room or name.startswith(room + ".") for room in rooms), f"{name} imports {module}"


def test_the_kernels_stand_alone():
    assert not [m for n in FILES if n.startswith("smcdecode_kernels") for m in imports(n) if m.startswith("smcdecode.")]
