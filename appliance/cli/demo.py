"""`make demo`: a newcomer's first five minutes, with the same commands they would type themselves.

Exit status 0 only if the honest answer was accepted AND the tampered one was rejected.
"""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel

MODEL = "smollm2-135m-instruct"
QUESTION = "In one sentence: why should I verify an answer before I trust it?"
OUTPUT = Path("demo-output")
EXIT_REJECT = 10
_START_LIMIT_S = 180
_STOP_LIMIT_S = 30


class Failed(Exception):
    """A step of the demo did not end as it must."""


class Demo:
    """Runs the steps. Every command it runs is shown first, so that it can be repeated by hand."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._port = _free_port()
        self._url = f"https://127.0.0.1:{self._port}"
        self._policy = OUTPUT / "policy.toml"
        self._answer = OUTPUT / "answer"

    def run(self) -> None:
        if OUTPUT.exists():
            shutil.rmtree(OUTPUT)
        OUTPUT.mkdir(mode=0o700)
        self._step("1. Fetch the model (98 MB, pinned by its SHA-256)")
        self._call("appliance", "models", "pull", MODEL)
        self._step("2. Offline: what this appliance must be, and the caller's policy from it")
        reference = OUTPUT / "reference-values.toml"
        text = self._call("appliance", "reference-values", "--model", MODEL, "--attester", "insecure", save=reference)
        self._console.print(text.rstrip(), style="dim", markup=False, soft_wrap=True)
        self._call(
            "appliance-client",
            "policy",
            "init",
            "--from",
            str(reference),
            "-o",
            str(self._policy),
            "--unsafe-accept-insecure",
        )
        self._step("3. Start the appliance (no TEE: attester 'insecure', and it says so)")
        server = self._start_server()
        try:
            self._step("4. Attest it: nonce, TLS exporter, evidence, channel proof, policy")
            self._call("appliance-client", "attest", self._url, "--policy", str(self._policy))
            self._step("5. Ask it: text appears once a signed checkpoint covers it")
            self._ask()
        finally:
            self._stop(server)
        self._step("6. Verify the saved answer again, offline: the appliance is gone")
        self._verify(0)
        self._step("7. Now tamper: change one byte of the saved answer, and verify once more")
        self._tamper()
        self._verify(EXIT_REJECT)

    def _ask(self) -> None:
        self._call(
            "appliance-client",
            "chat",
            self._url,
            "--policy",
            str(self._policy),
            "--model",
            MODEL,
            "--max-tokens",
            "48",
            "--temperature",
            "0",
            "--save",
            str(self._answer),
            QUESTION,
        )

    def _verify(self, expected: int) -> None:
        self._call("appliance-client", "verify", str(self._answer), "--policy", str(self._policy), expected=expected)

    def _tamper(self) -> None:
        """Flip one letter inside the text of the answer, where a forger would."""
        path = self._answer / "response"
        content = bytearray(path.read_bytes())
        at = content.index(b'"content":"', content.index(b'"content":"') + 1) + len(b'"content":"')
        content[at] ^= 0x01
        path.write_bytes(content)
        self._console.print(f"Flipped one bit of byte {at} of {path}", style="yellow")

    def _start_server(self) -> subprocess.Popen[bytes]:
        command = [*_program("appliance"), "serve", "--model", MODEL, "--attester", "insecure"]
        command += ["--listen", f"127.0.0.1:{self._port}"]
        self._show("appliance", command[len(_program("appliance")) :])
        server = subprocess.Popen(command)
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline and server.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return server
        self._stop(server)
        raise Failed("the appliance did not start")

    def _stop(self, server: subprocess.Popen[bytes]) -> None:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()

    def _call(self, program: str, *arguments: str, expected: int = 0, save: Path | None = None) -> str:
        shown = list(arguments) + (["> " + str(save)] if save else [])
        self._show(program, shown)
        stdout = subprocess.PIPE if save else None
        result = subprocess.run([*_program(program), *arguments], stdout=stdout, text=True, check=False)
        if result.returncode != expected:
            raise Failed(f"`{program} {arguments[0]}` ended with {result.returncode} instead of {expected}")
        if save:
            save.write_text(result.stdout)
        return result.stdout or ""

    def _step(self, title: str) -> None:
        self._console.print()
        self._console.rule(f"[bold]{title}", align="left")

    def _show(self, program: str, arguments: Sequence[str]) -> None:
        text = " ".join(a if a.startswith("> ") else shlex.quote(a) for a in arguments)
        self._console.print(f"$ {program} {text}", style="cyan", markup=False, soft_wrap=True)


def _program(name: str) -> list[str]:
    modules = {"appliance": "appliance", "appliance-client": "client_sdk.cli.main"}
    return [sys.executable, "-m", modules[name]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    console = Console(highlight=False)
    try:
        Demo(console).run()
    except Failed as error:
        console.print(Panel(f"The demo failed: {error}.", style="bold red"))
        return 1
    console.print()
    console.print(
        Panel(
            "The honest answer was accepted and the tampered one was rejected.\n"
            "Proven: this model, this configuration and this request gave this answer, over this channel, signed by "
            "the key that was attested.\nNot proven here: that a TEE guards that key. For this, run on one and take "
            "[bold]--unsafe-accept-insecure[/bold] out of the policy.",
            title="Done",
            style="green",
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
