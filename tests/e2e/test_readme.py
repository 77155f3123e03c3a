"""The README, typed in: every block is run as it stands, with the port of the test's appliance in place of 8443."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.programs import Served, environment, run_program

pytestmark = pytest.mark.model
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = [(language, body) for language, body in re.findall(r"(?m)^```(\w+)\n(.*?)^```$", README, flags=re.DOTALL)]
# What a test of the README cannot run inside itself: it ends never, installs, or is the test itself.
NOT_HERE = {"make demo", "make test", "make serve"}


@pytest.fixture(scope="module")
def desk(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty directory in which the reader types."""
    assert server.port
    return tmp_path_factory.mktemp("desk")


def adapted(body: str, port: int) -> str:
    return body.replace("127.0.0.1:8443", f"127.0.0.1:{port}")


def shell(command: str, desk: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = f"set -euo pipefail\n{command}"
    return subprocess.run(
        ["bash", "-c", script],
        cwd=desk,
        env=environment({"PATH": path}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def commands(body: str) -> list[str]:
    """The commands of a block, without comments, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", body)
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_blocks_are_the_ones_this_test_knows() -> None:
    kinds = [language for language, _ in BLOCKS]
    assert set(kinds) == {"sh", "python"}
    assert kinds.count("python") >= 2
    typed = [command for language, body in BLOCKS if language == "sh" for command in commands(body)]
    for start in (
        "make demo",
        "make test",
        "appliance serve",
        "appliance reference-values",
        "curl",
        "appliance-client",
    ):
        assert any(command.startswith(start) for command in typed), start


def test_the_shell_blocks(server: Served, desk: Path) -> None:
    ran = []
    for command in [c for language, body in BLOCKS if language == "sh" for c in commands(body)]:
        if command in NOT_HERE or command.startswith("appliance serve "):
            continue
        if command.startswith("curl ") and shutil.which("curl") is None:
            continue
        result = shell(adapted(command, server.port), desk)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        ran.append(command)
    assert len(ran) >= 7
    assert (desk / "answer").is_dir()


def test_the_appliance_is_served_as_the_readme_says() -> None:
    """The fixture's appliance runs with the options of the README's command."""
    (command,) = [c for language, body in BLOCKS for c in commands(body) if c.startswith("appliance serve ")]
    words = command.split()[2:]
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        **dict(zip(Served.arguments[::2], Served.arguments[1::2], strict=True)),
        "--listen": "127.0.0.1:8443",
    }


def test_one_letter_of_the_saved_answer(desk: Path) -> None:
    """The tamper step that the README promises: 10."""
    path = desk / "answer" / "response"
    content = path.read_bytes()
    frame = content.index(b'"content":"', content.index(b'"content":"') + 1) + len(b'"content":"')
    path.write_bytes(content[:frame] + bytes((content[frame] ^ 1,)) + content[frame + 1 :])
    result = shell("appliance-client verify answer --policy policy.toml", desk)
    assert result.returncode == 10
    path.write_bytes(content)
    assert shell("appliance-client verify answer --policy policy.toml", desk).returncode == 0


@pytest.mark.parametrize("number", range(sum(language == "python" for language, _ in BLOCKS)))
def test_the_python_blocks(server: Served, desk: Path, number: int) -> None:
    code = [body for language, body in BLOCKS if language == "python"][number]
    result = subprocess.run(
        [sys.executable, "-c", adapted(code, server.port)],
        cwd=desk,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_the_demo(tmp_path: Path) -> None:
    """What `make demo` runs: an honest answer accepted, a tampered one rejected, and only then 0."""
    result = run_program("appliance.cli.demo", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.index("ACCEPT OK") < result.stdout.index("REJECT STREAM_CHAIN_MISMATCH")


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
