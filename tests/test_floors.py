"""The architecture as a test: imports point down the floors, no cycle, heavy libraries where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from slimectl.hooks import HOOKS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "slimectl"

FLOORS = [
    ["__init__", "errors", "system", "system.redaction", "types", "plugins", "migrate.stand_ins"],
    ["algorithms", "architectures", "chats", "rewards", "sandbox", "settings"],
    ["protocols", "data", "planner", "migrate.launch_scripts"],
    ["diagnosis", "stages", "migrate", "launchers"],
    [
        "agents", "agents.environments", "checkpoints", "engines", "engines.weight_sync", "executors", "hooks",
        "policies", "trackers",
    ],
    ["checkpoints.conversion"],
    ["runtime.builders", "recipes"],
    ["runtime", "planner.simulation", "sweeps"],
    ["cli.viewer", "migrate.slime"],
    ["cli", "__main__"],
]  # fmt: skip
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}
SAME_FLOOR = {
    ("errors", "system.redaction"), ("system", "errors"), ("system", "system.redaction"), ("plugins", "errors"),
    ("plugins", "system"), ("plugins", "migrate.stand_ins"),
    ("rewards", "chats"), ("rewards", "sandbox"), ("algorithms", "settings"),
    ("policies", "checkpoints"), ("engines", "checkpoints"), ("engines", "engines.weight_sync"),
    ("agents.environments", "agents"),
    ("__main__", "cli"),
}  # fmt: skip
"""Neighbours that may be imported: plain modules of a floor, in one direction each."""


def unit(module: str) -> str:
    """The longest name of a floor that a module's name begins with: `slimectl.data.jsonl` belongs to `data`."""
    parts = [*module.split("."), "__init__"][1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOOR), "__init__")


def unit_of(module: str) -> str | None:
    """The unit of our own module; None for another library's."""
    return unit(module) if module.startswith("slimectl.") else None


class Module(NamedTuple):
    """What the tests below ask of a file, which is parsed once."""

    docstring: str | None
    imports: list[tuple[str, bool]]
    """(module, whether it happens when the file is imported) for every import outside TYPE_CHECKING."""
    members: list[tuple[str, str]]
    """(module of ours, name) for every import of a name of it, lazily and for annotations, too."""


@cache
def parsed(path: Path) -> Module:
    def walk(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                yield from ((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = child.module or ""
                members = [f"{module}.{alias.name}" for alias in child.names]
                units = [name for name in members if module == "slimectl" or name.removeprefix("slimectl.") in FLOOR]
                yield from ((name, top) for name in units or [module])
            else:
                yield from walk(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    tree = ast.parse(path.read_text(encoding="utf-8"))
    members = [
        (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slimectl")
        for alias in node.names
    ]
    return Module(ast.get_docstring(tree), list(walk(tree, True)), members)


def imports(path: Path) -> list[tuple[str, bool]]:
    return parsed(path).imports


def files() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found.append((unit(".".join(("slimectl", *parts))), path))
    return found


@pytest.mark.parametrize(("owner", "path"), files(), ids=lambda value: str(value).removeprefix(str(ROOT)))
def test_imports_point_down_the_floors(owner: str, path: Path):
    for module, _ in imports(path):
        if module.startswith("slimectl."):
            target = unit(module)
            lower = FLOOR[target] < FLOOR[owner]
            allowed = target == owner or lower or (owner, target) in SAME_FLOOR
            assert allowed, f"{path.relative_to(ROOT)} (floor {FLOOR[owner]}) imports {module} (floor {FLOOR[target]})"


def test_the_unit_graph_has_no_cycle():
    graph: dict[str, set[str]] = {}
    for owner, path in files():
        targets = {unit(module) for module, _ in imports(path) if module.startswith("slimectl.")}
        graph.setdefault(owner, set()).update(targets - {owner})
    done: list[str] = []

    def visit(node: str, path: tuple[str, ...]) -> None:
        assert node not in path, " -> ".join([*path, node])
        if node not in done:
            for target in sorted(graph.get(node, ())):
                visit(target, (*path, node))
            done.append(node)

    for node in graph:
        visit(node, ())
    assert "runtime.builders" in done


def module_graph() -> dict[str, set[str]]:
    """Modules by the modules of ours that they import: lazily, and for annotations, too."""
    modules = {
        ".".join(("slimectl", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for _, path in files()
    }
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        members = ((module, f"{module}.{name}") for module, name in parsed(path).members)
        targets = {member if member in modules else module for module, member in members}
        graph[name] = targets & modules.keys() - {name}
    return graph


def test_no_module_imports_itself_by_way_of_others():
    graph = module_graph()
    while leaves := [name for name, targets in graph.items() if not targets]:
        graph = {name: targets - set(leaves) for name, targets in graph.items() if name not in leaves}
    assert graph == {}


def test_at_most_six_modules_stand_outside_a_package():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= 6, modules


def test_ray_is_imported_in_executors_only():
    for owner, path in files():
        if owner != "executors":
            assert not [module for module, _ in imports(path) if module.split(".")[0] == "ray"], path


def test_low_floors_know_no_distributed_torch():
    for owner, path in files():
        if FLOOR[owner] <= 3:
            assert not [module for module, _ in imports(path) if module.startswith("torch.distributed")], path


ADAPTERS = {"engines", "policies", "engines.weight_sync", "checkpoints", "executors", "trackers"}


def test_stages_read_no_setting_that_names_a_hook():
    # A sample may name its own reward function; all others are handed to the stages.
    keys = {setting.partition(".")[2] for setting in HOOKS} - {"custom_rm_path"}
    for owner, path in files():
        if owner == "stages":
            nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            assert not {node.attr for node in nodes if isinstance(node, ast.Attribute)} & keys, path


def test_adapters_never_import_stages():
    for owner, path in files():
        if owner in ADAPTERS:
            assert not [module for module, _ in imports(path) if unit_of(module) == "stages"], path


def test_adapters_are_named_where_parts_are_put_together_only():
    for owner, path in files():
        if owner not in ADAPTERS | {"runtime.builders", "checkpoints.conversion"}:
            named = {unit_of(module) for module, _ in imports(path)} & ADAPTERS
            assert not named, f"{path.relative_to(ROOT)} names {named}"


@pytest.mark.parametrize(
    "module",
    [
        "slimectl.cli.app",
        "slimectl.settings",
        "slimectl.recipes",
        "slimectl.data.metrics_catalogue",
        "slimectl.runtime.stage_functions",  # that is `slimectl score`
    ],
)
def test_command_line_starts_without_heavy_libraries(module: str):
    code = f"import sys, {module}; print([m for m in ('torch', 'ray', 'transformers', 'numpy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_module_says_what_it_is_for():
    for _, path in files():
        assert parsed(path).docstring, path


def test_every_test_file_has_a_test():
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert any(name.startswith("test_") for name in names), path
