"""The rules of the house that no type checker knows: who imports whom, how long a module is, what text never says."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("appliance", "client_sdk")
LINES_AT_MOST = 450
FUNCTION_LINES_AT_MOST = 60
PARAMETERS_AT_MOST = 6

# The demo and the benchmark play both sides; everything else of the appliance knows the wire format alone.
PLAYS_BOTH_SIDES = {"appliance.cli.demo", "appliance.bench.asking", "appliance.bench.measure"}
OF_THE_SDK = re.compile(r"client_sdk\.wire(\.\w+)*|client_sdk\.tee\.\w+\.abi")

# Put together from pieces, so that this file does not hold what it looks for.
REGISTRIES = ("py" + "pi", "files.python" + "hosted", "registry.np" + "mjs", "deb.deb" + "ian")
MACHINE_TEXT = {
    "a path of one machine": re.compile(r"(?<![\w./<-])/(home/\w+|root/\.|wo" + r"rk)\b"),
    "the host of a package registry": re.compile(rf"\b({'|'.join(map(re.escape, REGISTRIES))})\.org\b"),
}


def modules() -> list[Path]:
    return sorted(path for package in (*PACKAGES, "image") for path in (ROOT / package).rglob("*.py"))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module that `path` imports anywhere, `from a import b` as both a and a.b where b may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{dotted(path)}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".split(".")
                is_module = (ROOT.joinpath(*inner)).is_dir() or ROOT.joinpath(*inner).with_suffix(".py").is_file()
                yield ".".join(inner) if is_module else str(node.module)


def is_command(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A click command takes one parameter for each of its options, however many it has."""
    return any(
        isinstance(d, ast.Call) and ast.unparse(d.func).endswith((".command", ".group")) for d in node.decorator_list
    )


def test_import_contracts_hold() -> None:
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([script, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_appliance_knows_only_the_wire_format_of_the_sdk() -> None:
    wrong = [
        f"{dotted(path)} imports {name}"
        for path in (ROOT / "appliance").rglob("*.py")
        if dotted(path) not in PLAYS_BOTH_SIDES
        for name in imports(path)
        if name.split(".")[0] == "client_sdk" and not OF_THE_SDK.fullmatch(name)
    ]
    assert wrong == []


def test_pure_layouts_import_nothing_of_ours_but_the_wire_format() -> None:
    pure = re.compile(r"client_sdk\.wire(\.\w+)*|client_sdk\.tee\.\w+\.abi")
    wrong = [
        f"{dotted(path)} imports {name}"
        for path in modules()
        if pure.fullmatch(dotted(path))
        for name in imports(path)
        if name.split(".")[0] in PACKAGES and not pure.fullmatch(name)
    ]
    assert wrong == []


def test_make_and_scripts_start_modules_that_are_there() -> None:
    started = [ROOT / "Makefile", *(ROOT / "scripts").rglob("*.sh"), ROOT / ".ci/run"]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in started)
    names = sorted(set(re.findall(r"-m ((?:appliance|client_sdk|image)[\w.]*)", texts)))
    assert "appliance.cli.demo" in names
    assert [
        name
        for name in names
        if not (found := ROOT / name.replace(".", "/")).is_dir() and not found.with_suffix(".py").is_file()
    ] == []


def test_the_architecture_names_files_that_are_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+\.(?:py|sh))(?::\w+)?`", text))
    there = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    assert len(named) > 20
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in there)] == []


def test_importing_the_sdk_loads_nothing_of_the_server() -> None:
    code = (
        "import json, sys\n"
        "import client_sdk\n"
        "from client_sdk import Appliance, Policy\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "client_sdk" in loaded
    assert loaded.isdisjoint(
        {"appliance", "fastapi", "starlette", "uvicorn", "pydantic", "torch", "numpy", "llama_cpp", "openai"}
    )


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_module_keeps_to_the_rules_of_style(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= LINES_AT_MOST, "too long: which two things does it do?"
    wrong: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {n.id for n in caught if isinstance(n, ast.Name)}
            reraises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            if node.type is None or "Exception" in names or ("BaseException" in names and not reraises):
                wrong.append(f"line {node.lineno}: catches everything")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_AT_MOST:
                wrong.append(f"line {node.lineno}: {node.name} has {length} lines")
            taken = [
                a for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls")
            ]
            if len(taken) > PARAMETERS_AT_MOST and node.name != "__init__" and not is_command(node):
                wrong.append(f"line {node.lineno}: {node.name} takes {len(taken)} parameters")
    assert wrong == []
    assert not re.search(r"\b(TODO|FIXME|XXX|NotImplementedError\(\))", text)


def test_tracked_text_names_no_machine_and_no_registry() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    wrong: list[str] = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary vector
        for what, pattern in MACHINE_TEXT.items():
            wrong += [f"{name}: {what}: {found[0]}" for found in pattern.finditer(text)]
    assert wrong == []


def test_every_python_file_is_in_a_package_that_ships_types() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file()
    for path in modules():
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (wanted for extra in project["optional-dependencies"].values() for wanted in extra)
    asked = {normal_name(wanted) for wanted in (*project["dependencies"], *extras)} - {project["name"]}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normal_name(line) for line in lines if "==" in line and not line.startswith("#")}
    assert asked - pinned == set()


def normal_name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement.split("==")[0], maxsplit=1)[0].lower().replace("_", "-")
