"""The command line, run in this process against a simulated appliance: words, JSON, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Policy, UnsafeAcceptInsecure
from client_sdk.cli.console import plain
from client_sdk.cli.main import run
from client_sdk.policy.reference_values import ReferenceValues
from client_sdk.wire import cose, names
from client_sdk.wire.stream import encode_base64url
from tests.simulators.insecure_appliance import MODEL, Options
from tests.simulators.wired_appliance import Response, WiredAppliance


@pytest.fixture
def wired() -> Iterator[WiredAppliance]:
    with WiredAppliance() as appliance:
        yield appliance


@pytest.fixture
def policy(wired: WiredAppliance, tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    pins = {MODEL: frozenset({wired.simulator.model.identity})}
    path.write_text(Policy(models=pins, insecure=UnsafeAcceptInsecure()).to_toml())
    return path


class Ran:
    """Runs the command line and keeps what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        self.out, self.err = self._capsys.readouterr()
        return status

    def json(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        status = self(*arguments, "--json")
        assert self.out.count("\n") == 1
        said: dict[str, Any] = json.loads(self.out)
        assert {"result", "code", "checks", "claims"} <= said.keys()
        assert all(set(check) == {"name", "status", "detail"} for check in said["checks"])
        assert all({"value", "trust"} <= set(claim) for claim in said["claims"].values())
        return status, said


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Ran:
    return Ran(capsys)


def test_attest(cli: Ran, wired: WiredAppliance, policy: Path) -> None:
    assert cli("attest", wired.url, "--policy", policy) == 0
    assert "NO HARDWARE PROTECTION" in cli.out
    assert "not checked" in cli.out
    assert "ACCEPT OK" in cli.out
    status, said = cli.json("attest", wired.url, "--policy", policy)
    assert (status, said["result"], said["code"]) == (0, "accept", "OK")
    assert said["claims"]["attestation: mode"] == {"value": "insecure", "trust": "self-asserted"}


def test_attest_rejected(cli: Ran, wired: WiredAppliance, policy: Path) -> None:
    wired.simulator.model = replace(wired.simulator.model, identity=b"\x07" * 32)
    status, said = cli.json("attest", wired.url, "--policy", policy)
    assert (status, said["result"], said["code"]) == (10, "reject", "MODEL_NOT_ALLOWED")
    assert said["checks"][-1]["status"] == "failed"
    assert cli("attest", wired.url, "--policy", policy) == 10
    assert "REJECT MODEL_NOT_ALLOWED" in cli.out


def test_attest_malformed(cli: Ran, wired: WiredAppliance, policy: Path) -> None:
    wired.edit_bundle = lambda b: b + b"\x00"
    status, said = cli.json("attest", wired.url, "--policy", policy)
    assert (status, said["result"]) == (30, "reject")
    assert said["code"].startswith("MALFORMED_")


def test_attest_undecided(cli: Ran, wired: WiredAppliance, policy: Path) -> None:
    wired.attestation_response = Response(status=503)
    status, said = cli.json("attest", wired.url, "--policy", policy)
    assert (status, said["result"], said["code"]) == (20, "undecided", "ATTESTATION_UNAVAILABLE")
    status, said = cli.json("attest", "https://127.0.0.1:1", "--policy", policy)
    assert (status, said["result"], said["code"]) == (20, "undecided", "CONNECT_FAILED")


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_chat_prints_the_answer_alone_to_stdout(cli: Ran, wired: WiredAppliance, policy: Path, more: list[str]) -> None:
    arguments = ["chat", wired.url, "--policy", policy, "--model", MODEL, "2+2?", *more]
    assert cli(*arguments) == 0
    assert cli.out == "Four.\n"
    assert "NO HARDWARE PROTECTION" in cli.err
    assert "ACCEPT OK" in cli.err
    status, said = cli.json(*arguments)
    assert (status, said["result"]) == (0, "accept")
    assert said["claims"]["answer"] == {"value": "Four.", "trust": "key-signed"}


def test_chat_sends_what_was_asked(
    cli: Ran, wired: WiredAppliance, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "secret\n")
    options = ["--max-tokens", 5, "--temperature", 0.5, "--top-p", 0.9, "--top-k", 3, "--seed", 7, "--stop", "a"]
    arguments = ["--policy", policy, "--model", MODEL, "--system", "Be brief.", "--api-key-env", "THE_KEY"]
    assert cli("chat", wired.url, "2+2?", *arguments, *options, "--stop", "b") == 0
    sent = json.loads(wired.inference[0].body)
    assert [message["role"] for message in sent.pop("messages")] == ["system", "user"]
    assert sent.pop("stop") == ["a", "b"]
    assert sent == {
        "model": MODEL,
        "stream": True,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": 7,
    }
    assert wired.inference[0].headers["authorization"] == "Bearer secret"
    assert cli("chat", wired.url, "x", "--policy", policy, "--model", MODEL, "--api-key-env", "NOT_SET_HERE") == 2


def test_a_rejection_in_mid_stream_comes_after_the_last_verified_text(
    cli: Ran, wired: WiredAppliance, policy: Path
) -> None:
    wired.options = Options(checkpoint_every=1, pieces=("one ", "two ", "three "))
    wired.edit_response = lambda r: replace(r, chunks=tuple(x.replace(b"three", b"lies!") for x in r.chunks or ()))
    assert cli("chat", wired.url, "--policy", policy, "--model", MODEL, "count") == 10
    assert cli.out == "one two \n"
    assert "REJECT STREAM_CHAIN_MISMATCH" in cli.err


def test_refusals_are_undecided_and_say_whether_they_are_verified(
    cli: Ran, wired: WiredAppliance, policy: Path
) -> None:
    arguments = ["chat", wired.url, "--policy", policy, "--model", MODEL, "x", "--no-stream"]
    body = b'{"error":{"message":"no","type":"invalid_request_error","param":"messages","code":"refused"}}'
    wired.options = Options(status="refused", http_status=400, error_body=body)
    status, said = cli.json(*arguments)
    assert (status, said["result"], said["code"]) == (20, "undecided", "refused")
    assert "with a verified receipt" in said["message"]
    assert said["checks"][-1]["status"] == "passed"
    wired.edit_response = lambda r: Response(status=401, body=b'{"error":{"code":"bad_key","message":"who?"}}')
    status, said = cli.json(*arguments)
    assert (status, said["code"], said["checks"]) == (20, "bad_key", [])
    assert "without a receipt" in said["message"]


def test_save_verify_tamper(cli: Ran, wired: WiredAppliance, policy: Path, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    chat = ["chat", wired.url, "--policy", policy, "--model", MODEL, "2+2?", "--save", answer]
    assert cli(*chat) == 0
    assert cli("verify", answer, "--policy", policy) == 0
    status, said = cli.json("verify", answer, "--policy", policy)
    assert (status, said["result"]) == (0, "accept")
    assert said["claims"]["receipt: channel"]["trust"] == "holder-asserted"
    status, said = cli.json(*chat)
    assert (status, said["code"]) == (20, "NOT_SAVED")
    body = (answer / "response").read_bytes()
    (answer / "response").write_bytes(body.replace(b'"Fo"', b'"No"'))
    status, said = cli.json("verify", answer, "--policy", policy)
    assert (status, said["result"]) == (10, "reject")
    (answer / "response").unlink()
    status, said = cli.json("verify", answer, "--policy", policy)
    assert (status, said["code"]) == (30, "MALFORMED_SAVED_ANSWER")


def test_verify_says_of_a_saved_refusal_what_chat_said_of_it(
    cli: Ran, wired: WiredAppliance, policy: Path, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    body = b'{"error":{"message":"no","type":"invalid_request_error","param":null,"code":"refused"}}'
    wired.options = Options(status="refused", http_status=400, error_body=body)
    assert cli("chat", wired.url, "Hello", "--policy", policy, "--model", MODEL, "--no-stream", "--save", answer) == 20
    status, said = cli.json("verify", answer, "--policy", policy)
    assert (status, said["result"], said["code"]) == (20, "undecided", "NO_COMPLETE_ANSWER")


def test_verify_refuses_a_redacted_receipt_unless_told(
    cli: Ran, wired: WiredAppliance, policy: Path, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    assert cli("chat", wired.url, "Hello", "--policy", policy, "--model", MODEL, "--no-stream", "--save", answer) == 0
    receipt = answer / "receipt"
    receipt.write_bytes(cose.redacted(receipt.read_bytes(), limit_bytes=names.LIMIT_RECEIPT_BYTES))
    status, said = cli.json("verify", answer, "--policy", policy)
    assert (status, said["result"], said["code"]) == (10, "reject", "REQUIRED_CLAIM_MISSING")
    assert cli("verify", answer, "--policy", policy, "--accept-redacted") == 0
    assert "NOT compared" in cli.out


def test_verify_at_another_time_and_under_another_policy(
    cli: Ran, wired: WiredAppliance, policy: Path, tmp_path: Path
) -> None:
    answer, other = tmp_path / "answer", tmp_path / "other.toml"
    cli("chat", wired.url, "--policy", policy, "--model", MODEL, "2+2?", "--save", answer)
    assert cli("verify", answer, "--policy", policy, "--now", "2020-01-01T00:00:00Z") == 10
    assert cli("verify", answer, "--policy", policy, "--now", "0") == 10
    assert cli("verify", answer, "--policy", policy, "--now", "2020-01-01") == 2
    for never in ("soon", "nan", "inf", "-1", "1e12"):
        assert cli("verify", answer, "--policy", policy, "--now", never) == 2
    other.write_text(policy.read_text().replace("max_clock_skew_s = 300", "max_clock_skew_s = 299"))
    assert cli("verify", answer, "--policy", other) == 0
    assert "another policy" in cli.out


def test_show_says_what_would_bind_and_never_that_it_is_verified(
    cli: Ran, wired: WiredAppliance, policy: Path, tmp_path: Path
) -> None:
    answer = tmp_path / "answer"
    cli("chat", wired.url, "--policy", policy, "--model", MODEL, "2+2?", "--save", answer)
    header = tmp_path / "header.txt"
    header.write_bytes(encode_base64url((answer / "receipt").read_bytes()) + b"\n")
    reference = tmp_path / "reference.toml"
    reference.write_text(ReferenceValues(source="me", models={MODEL: b"\x01" * 32}).to_toml())
    for path, kind in (
        (answer / "receipt", "receipt"),
        (header, "receipt"),
        (answer / "attestation", "attestation bundle"),
        (policy, "policy"),
        (reference, "file of reference values"),
        (answer, "saved answer"),
    ):
        status, said = cli.json("show", path)
        assert (status, said["result"], said["code"]) == (0, "undecided", "NOT_VERIFIED")
        assert f"what the {kind} says" in said["message"]
        assert said["claims"]
        assert {claim["trust"] for claim in said["claims"].values()} <= {"holder-asserted", "caller"}
        assert cli("show", path) == 0
        assert "verified" not in cli.out.lower().replace("not_verified", "").replace("first verified at", "")


def test_show_checkpoints_and_proofs(cli: Ran, wired: WiredAppliance, policy: Path, tmp_path: Path) -> None:
    from client_sdk.wire.attestation import AttestationBundle
    from client_sdk.wire.stream import decode_base64url

    answer = tmp_path / "answer"
    cli("chat", wired.url, "--policy", policy, "--model", MODEL, "2+2?", "--save", answer)
    blocks = (answer / "response").read_bytes().split(b"\n\n")
    text = next(b for b in blocks if b.startswith(names.COMMENT_CHECKPOINT)).removeprefix(names.COMMENT_CHECKPOINT)
    bundle = AttestationBundle.parse((answer / "attestation").read_bytes())
    assert bundle.claims is not None
    for kind, content in (
        ("checkpoint", decode_base64url(text, limit_bytes=4096)),
        ("channel proof", bundle.channel_proof),
        ("attestation claims", bundle.claims),
    ):
        (tmp_path / "file").write_bytes(content)
        status, said = cli.json("show", tmp_path / "file")
        assert (status, f"what the {kind} says" in said["message"]) == (0, True)


@pytest.mark.parametrize("content", [b"", b"\xd2\x84", b"\xa0", b"hello world", b"\xff" * 100, b"abc"])
def test_show_of_something_else_is_malformed(cli: Ran, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    status, said = cli.json("show", tmp_path / "file")
    assert (status, said["result"]) == (30, "reject")
    assert said["code"].startswith("MALFORMED_")


def test_policy_init(cli: Ran, wired: WiredAppliance, tmp_path: Path) -> None:
    reference, output = tmp_path / "reference.toml", tmp_path / "made.toml"
    identity = wired.simulator.model.identity
    values = ReferenceValues(source="the builder's release page", models={MODEL: identity})
    reference.write_text(values.to_toml())
    make = ["policy", "init", "--from", reference, "-o", output]
    assert cli(*make) == 2
    assert not output.exists()
    assert cli(*make, "--unsafe-accept-insecure") == 0
    assert "the builder's release page" in cli.err
    assert "never from the server" in cli.err
    assert "NO HARDWARE PROTECTION" in cli.out
    assert Policy.load(output).models == {MODEL: frozenset({identity})}
    assert cli(*make, "--unsafe-accept-insecure") == 2
    status, said = cli.json(*make, "--unsafe-accept-insecure", "--force")
    assert (status, said["code"]) == (0, "POLICY_WRITTEN")
    status, said = cli.json("policy", "show", output)
    assert (status, said["code"]) == (0, "POLICY_USABLE")
    assert cli("attest", wired.url, "--policy", output) == 0


def test_an_unusable_policy_is_a_usage_error(cli: Ran, wired: WiredAppliance, policy: Path) -> None:
    policy.write_text("version = 1\nsurprise = 1\n")
    status, said = cli.json("attest", wired.url, "--policy", policy)
    assert (status, said["code"]) == (2, "POLICY_FILE")
    assert cli("policy", "show", policy) == 2
    assert "POLICY_FILE" in cli.err
    assert wired.connections == 0


def test_a_prompt_that_is_no_text_is_a_usage_error(
    cli: Ran, wired: WiredAppliance, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no UTF-8 on the command line comes as lone surrogates; from stdin it cannot be read at all."""
    chat = ("chat", wired.url, "--policy", policy, "--model", MODEL)
    for arguments in ((*chat, b"\xff".decode(errors="surrogateescape")), (*chat, "Hi", "--system", "\ud83d")):
        status, said = cli.json(*arguments)
        assert (status, said["code"]) == (2, "REQUEST")
        assert "lone surrogate" in said["message"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 secret"), encoding="utf-8"))
    assert cli(*chat, "-") == 2
    assert "standard input is no utf-8 text from byte 3 on" in cli.err
    assert "secret" not in cli.err
    assert wired.connections == 0


@pytest.mark.parametrize(
    "arguments", [["attest"], ["attest", "http://h:1"], ["nonsense"], ["verify", "/nowhere"], ["chat", "https://h"]]
)
def test_usage_errors(cli: Ran, policy: Path, arguments: list[str]) -> None:
    more = [] if arguments == ["nonsense"] else ["--policy", policy]
    assert cli(*arguments, *more) == 2
    assert "Error" in cli.err


def test_a_bug_is_one_line_and_status_one() -> None:
    code = (
        "import sys, client_sdk.cli.main as c; c.cli.commands['show'].callback = None; sys.exit(c.run(['show', '.']))"
    )
    code = code.replace("callback = None", "callback = lambda **_: 1 / 0")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.strip() == "bug in appliance-client (status 1): ZeroDivisionError; run again with --debug"


def test_control_characters_of_a_server_never_reach_the_terminal() -> None:
    assert plain("a\x1b[2Jb\u202ec\td\n") == "a\ufffd[2Jb\ufffdc\td\n"


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from client_sdk.cli.main import run; run(['--help']);"
        "assert not {'httpx', 'OpenSSL', 'rich', 'cryptography', 'openai'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Exit status" in ran.stdout
