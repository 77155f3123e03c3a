"""`appliance-client` as processes of its own: every command, every exit status, the one JSON object, saved answers."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_sdk import Policy, VerificationError
from client_sdk.offline.saved import verify_saved
from tests.e2e.glass import GlassAppliance, Sent
from tests.e2e.programs import MODEL, Served, free_port, outcome, run_client, run_program

pytestmark = pytest.mark.model
YEARS_LATER = "2041-01-01T00:00:00Z"
RESULTS = {0: "accept", 10: "reject", 20: "undecided", 30: "reject", 2: "undecided"}


def checked(result: subprocess.CompletedProcess[str], status: int, code: str) -> dict[str, Any]:
    """The JSON outcome, after its shape: one object on stdout, nothing else, results as the exit status says."""
    assert result.returncode == status, result.stderr
    assert result.stdout.count("\n") == 1
    value = outcome(result)
    assert list(value) == ["result", "code", "message", "checks", "claims"]
    assert (value["result"], value["code"]) == (RESULTS[status], code)
    assert isinstance(value["message"], str)
    for check in value["checks"]:
        assert list(check) == ["name", "status", "detail"]
        assert check["status"] in ("passed", "failed", "not checked")
    for fact in value["claims"].values():
        assert set(fact) in ({"value", "trust"}, {"value", "trust", "bound_by"})
        assert all(isinstance(text, str) for text in fact.values())
    if status in (10, 30):
        assert [c for c in value["checks"] if c["status"] == "failed"] == value["checks"][-1:], "the failed one is last"
    return value


def ask(url: str, policy: Path, prompt: str, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
    arguments = ["chat", url, "--policy", str(policy), "--model", MODEL, "--max-tokens", "24", *more, prompt]
    return run_client(*arguments, **options)


@pytest.fixture(scope="module")
def saved(server: Served, policy_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two saved answers, `stream` and `whole`, whose appliance nobody asks again."""
    directory = tmp_path_factory.mktemp("saved")
    for name, more in (("stream", []), ("whole", ["--no-stream"])):
        result = ask(server.url, policy_file, "What is a receipt?", "--save", str(directory / name), *more)
        assert result.returncode == 0, result.stderr
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Path(shutil.copytree(saved / getattr(request, "param", "stream"), tmp_path / "answer"))


def verify(directory: Path, policy: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run_client("verify", str(directory), "--policy", str(policy), "--json", *more)


def test_attest(server: Served, policy_file: Path) -> None:
    value = checked(run_client("attest", server.url, "--policy", str(policy_file), "--json"), 0, "OK")
    assert value["claims"]["attestation: mode"] == {"value": "insecure", "trust": "self-asserted"}
    shown = run_client("attest", server.url, "--policy", str(policy_file))
    assert shown.returncode == 0
    assert "NO HARDWARE PROTECTION" in shown.stdout


def test_chat_prints_the_answer_alone(server: Served, policy_file: Path) -> None:
    greedy = ("--temperature", "0")
    streamed = ask(server.url, policy_file, "Say hello.", *greedy)
    whole = ask(server.url, policy_file, "Say hello.", "--no-stream", *greedy)
    asked = ask(server.url, policy_file, "-", *greedy, stdin="Say hello.")
    assert streamed.stdout == whole.stdout == asked.stdout != ""
    assert "ACCEPT OK" in streamed.stderr
    value = checked(ask(server.url, policy_file, "Say hello.", "--json", *greedy), 0, "OK")
    assert value["claims"]["answer"] == {"value": streamed.stdout.removesuffix("\n"), "trust": "key-signed"}
    assert value["claims"]["receipt: status"]["value"] == "complete, HTTP 200"


def test_every_parameter_reaches_the_receipt(server: Served, policy_file: Path) -> None:
    more = ["--seed", "9", "--top-p", "0.5", "--top-k", "3", "--stop", "zzz", "--system", "Be brief.", "--json"]
    value = checked(ask(server.url, policy_file, "Hi", *more), 0, "OK")
    names = ("seed", "top_p", "top_k", "max_tokens")
    assert [value["claims"][f"receipt: decoding {name}"]["value"] for name in names] == ["9", "0.5", "3", "24"]


def test_a_refusal_is_undecided(server: Served, policy_file: Path) -> None:
    """20: genuine, with a receipt, but no answer."""
    result = ask(server.url, policy_file, "Hi", "--temperature", "99", "--json")
    assert result.returncode == 20
    value = outcome(result)
    assert value["result"] == "undecided"
    assert "with a verified receipt" in value["message"]


def test_nobody_there(policy_file: Path) -> None:
    url = f"https://127.0.0.1:{free_port()}"
    checked(run_client("attest", url, "--policy", str(policy_file), "--json"), 20, "CONNECT_FAILED")
    checked(ask(url, policy_file, "Hi", "--json"), 20, "CONNECT_FAILED")


def test_another_policy(server: Served, policy_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "policy.toml"
    other.write_text(re.sub(r'(?m)^("smollm2.*?")[0-9a-f]{64}', lambda m: m[1] + "ab" * 32, policy_file.read_text()))
    assert other.read_text() != policy_file.read_text()
    checked(run_client("attest", server.url, "--policy", str(other), "--json"), 10, "MODEL_NOT_ALLOWED")
    checked(ask(server.url, other, "Hi", "--json"), 10, "MODEL_NOT_ALLOWED")


def test_usage(server: Served, policy_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("version = 1\n")
    checked(run_client("attest", server.url, "--policy", str(bad), "--json"), 2, "POLICY_FILE")
    for arguments in (
        ["attest"],
        ["attest", "http://127.0.0.1:1", "--policy", str(policy_file)],
        ["attest", server.url, "--policy", str(tmp_path / "absent")],
        ["verify", str(tmp_path), "--policy", str(policy_file), "--now", "yesterday"],
        ["verify", str(tmp_path), "--policy", str(policy_file), "--now", "2026-11-29T16:00:00"],
        ["policy", "init", "--from", str(bad), "-o", str(bad)],
        ["chat", server.url, "--policy", str(policy_file), "--model", MODEL, "--api-key-env", "NOT_SET_ANYWHERE", "x"],
        ["nonsense"],
    ):
        result = run_client(*arguments)
        assert result.returncode == 2, arguments
        assert result.stderr
        assert "Traceback" not in result.stderr


def test_policy_init_and_show(policy_file: Path, tmp_path: Path) -> None:
    reference, made = policy_file.with_name("reference-values.toml"), tmp_path / "policy.toml"
    init = ["policy", "init", "--from", str(reference), "-o", str(made), "--json"]
    checked(run_client(*init), 2, "POLICY_FILE")
    assert not made.exists()
    checked(run_client(*init, "--unsafe-accept-insecure"), 0, "POLICY_WRITTEN")
    assert made.read_text() == policy_file.read_text()
    value = checked(run_client("policy", "show", str(made), "--json"), 0, "POLICY_USABLE")
    assert value["claims"]["unsafe_accept_insecure"]["value"] == "yes"
    assert run_client(*init, "--unsafe-accept-insecure").returncode == 2, "an existing file needs --force"
    checked(run_client(*init, "--unsafe-accept-insecure", "--force"), 0, "POLICY_WRITTEN")


def test_saved_files_are_private(saved: Path) -> None:
    for directory in (saved / "stream", saved / "whole"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_an_answer_is_never_overwritten(server: Served, policy_file: Path, saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in (saved / "stream").iterdir()}
    result = ask(server.url, policy_file, "Hi", "--save", str(saved / "stream"), "--json")
    checked(result, 20, "NOT_SAVED")
    assert before == {path.name: path.read_bytes() for path in (saved / "stream").iterdir()}


def test_verify_offline_years_later(saved: Path, policy_file: Path, server: Served) -> None:
    """No network, no clock: by the moment of the first verification. A clock of today refuses claims from the past."""
    for name in ("stream", "whole"):
        value = checked(verify(saved / name, policy_file), 0, "OK")
        assert value["claims"]["receipt: channel"]["trust"] == "holder-asserted"
        assert value["claims"]["attestation: channel binder"]["trust"] == "holder-asserted"
        checked(verify(saved / name, policy_file, "--now", YEARS_LATER), 10, "CLOCK_SKEW")
    first = json.loads((saved / "stream" / "answer.json").read_text())["attestation"]["verified-at"]
    checked(verify(saved / "stream", policy_file, "--now", str(first)), 0, "OK")


FLIPS = [
    ("request", b"receipt", b"recEipt", 10, "STREAM_CHECKPOINT_MISMATCH"),
    ("response", b'"finish_reason":null', b'"finish_reason":nul1', 30, "MALFORMED_STREAM"),
    ("receipt", b"complete", b"cancelle", 30, "MALFORMED_SAVED_ANSWER"),
    ("attestation", b"instance", b"instancE", 30, "MALFORMED_ATTESTATION_CLAIMS"),
    ("answer.json", b'"method": "POST"', b'"method": "PUT!"', 10, "REQUEST_MISMATCH"),
]


@pytest.mark.parametrize(("name", "old", "new", "status", "code"), FLIPS)
def test_a_saved_file_changed(
    copy: Path, policy_file: Path, name: str, old: bytes, new: bytes, status: int, code: str
) -> None:
    path = copy / name
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    checked(verify(copy, policy_file), status, code)


@pytest.mark.parametrize("copy", ["stream", "whole"], indirect=True)
@pytest.mark.parametrize("name", ["request", "response", "receipt", "attestation"])
def test_any_flipped_bit(copy: Path, policy: Policy, name: str) -> None:
    """Bits all over each file: all rejected, but for the padding between the frames of a stream."""
    path = copy / name
    content = path.read_bytes()
    for at in range(0, len(content), max(1, len(content) // 101)):
        changed = content[:at] + bytes((content[at] ^ 1 << at % 7,)) + content[at + 1 :]
        path.write_bytes(changed)
        if name == "response" and _unpadded(changed) == _unpadded(content):
            continue
        with pytest.raises(VerificationError):
            verify_saved(copy, policy)
    path.write_bytes(content)
    assert verify_saved(copy, policy).receipt.opened


def _unpadded(stream: bytes) -> list[bytes]:
    return [block for block in stream.split(b"\n\n") if not block.startswith(b": p ")]


@pytest.mark.parametrize("copy", ["stream", "whole"], indirect=True)
def test_one_letter_of_the_answer_changed(copy: Path, policy_file: Path) -> None:
    content = bytearray((copy / "response").read_bytes())
    start = [match.end() for match in re.finditer(rb'"content":\s*"', content)]
    at = start[min(1, len(start) - 1)]  # the first delta of a stream is empty
    content[at] ^= 0x01
    (copy / "response").write_bytes(content)
    codes = {"STREAM_CHAIN_MISMATCH", "RESPONSE_MISMATCH"}
    result = verify(copy, policy_file)
    assert result.returncode == 10
    assert outcome(result)["code"] in codes


@pytest.mark.parametrize("name", ["request", "response", "receipt", "attestation", "answer.json"])
def test_a_saved_file_missing_or_empty(copy: Path, policy_file: Path, name: str) -> None:
    (copy / name).unlink()
    value = checked(verify(copy, policy_file), 30, "MALFORMED_SAVED_ANSWER")
    assert name in value["message"]
    (copy / name).write_bytes(b"")
    result = verify(copy, policy_file)
    assert result.returncode in (10, 30)
    assert outcome(result)["result"] == "reject"


@pytest.mark.parametrize("field", ["nonce", "spki", "exported"])
def test_the_channel_as_the_holder_tells_it(copy: Path, policy_file: Path, field: str) -> None:
    manifest = json.loads((copy / "answer.json").read_text())
    value = manifest["attestation"][field]
    manifest["attestation"][field] = value[:-1] + ("0" if value[-1] != "0" else "1")
    (copy / "answer.json").write_text(json.dumps(manifest))
    codes = {"nonce": "NONCE_MISMATCH", "spki": "TLS_KEY_MISMATCH", "exported": "BINDER_MISMATCH"}
    result = verify(copy, policy_file)
    assert outcome(result)["code"] == codes[field]


def test_files_of_two_answers_mixed(saved: Path, copy: Path, policy_file: Path) -> None:
    shutil.copy(saved / "whole" / "receipt", copy / "receipt")
    assert verify(copy, policy_file).returncode in (10, 30)
    shutil.copy(saved / "stream" / "receipt", copy / "receipt")
    checked(verify(copy, policy_file), 0, "OK")
    shutil.copy(saved / "whole" / "attestation", copy / "attestation")
    assert verify(copy, policy_file).returncode == 10


def test_show_everything(saved: Path, policy_file: Path) -> None:
    """Nothing is verified, and every line says what would bind it."""
    paths = [saved / "stream", *(saved / "stream" / name for name in ("receipt", "attestation"))]
    for path in paths:
        value = checked_show(run_client("show", str(path), "--json"))
        assert all(fact["bound_by"] for fact in value["claims"].values())
    for path in (policy_file, policy_file.with_name("reference-values.toml")):
        checked_show(run_client("show", str(path), "--json"))
    rubbish = policy_file.with_name("rubbish")
    rubbish.write_bytes(b"\xff\xfe")
    result = run_client("show", str(rubbish), "--json")
    assert result.returncode in (2, 30)


def checked_show(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr
    value = outcome(result)
    assert (value["result"], value["code"]) == ("undecided", "NOT_VERIFIED")
    return value


@pytest.fixture
def honest(glass: GlassAppliance) -> Iterator[GlassAppliance]:
    yield glass
    glass.tamper = None


def test_a_lie_in_mid_stream(honest: GlassAppliance, policy_file: Path) -> None:
    """10, after the last verified text: stdout has the beginning of the answer and nothing that was not verified."""
    greedy = ("--temperature", "0", "--max-tokens", "60")
    truth = ask(honest.url, policy_file, "Count from one to thirty in words.", *greedy).stdout

    def rewrite_late(sent: Sent) -> Sent:
        blocks = sent.blocks
        frames = [i for i, block in enumerate(blocks) if block.startswith(b"data: {")]
        late = frames[-4]
        blocks[late] = blocks[late].replace(b'"created":', b'"created":1')
        return sent.with_blocks(blocks)

    honest.tamper = rewrite_late
    told = ask(honest.url, policy_file, "Count from one to thirty in words.", *greedy)
    assert told.returncode == 10
    assert "REJECT STREAM_CHAIN_MISMATCH" in told.stderr
    text = told.stdout.removesuffix("\n")
    assert text
    assert truth.startswith(text)
    assert len(text) < len(truth)
    checked(
        ask(honest.url, policy_file, "Count from one to thirty in words.", "--json", *greedy),
        10,
        "STREAM_CHAIN_MISMATCH",
    )


def test_malformed_is_thirty(honest: GlassAppliance, policy_file: Path) -> None:
    honest.tamper = lambda sent: sent.with_header("x-execution-receipt", "!!")
    checked(ask(honest.url, policy_file, "Hi", "--no-stream", "--json"), 30, "MALFORMED_BASE64")


def test_the_server_program(policy_file: Path) -> None:
    """The commands of `appliance` that answer and end."""
    assert "insecure" in run_program("appliance", "doctor").stdout
    assert MODEL in run_program("appliance", "models", "list").stdout
    printed = run_program("appliance", "config", "--model", MODEL, "--attester", "insecure").stdout
    digest = re.search(r"# configuration digest: ([0-9a-f]{64})", printed)
    assert digest is not None
    assert digest[1] in policy_file.read_text()
    auto = run_program("appliance", "serve", "--model", MODEL, "--listen", "127.0.0.1:0")
    assert auto.returncode == 1, "without attestation hardware nothing is served"
    assert auto.stderr.startswith("appliance: ")
