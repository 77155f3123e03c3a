"""The command line as a stranger types it: each in a process of its own, most of them refused."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from appliance.config.settings import load
from tests.unit.appliance.engine.weights.test_gguf import GOOD, gguf

CLEAN = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
SHA256 = hashlib.sha256(GOOD).hexdigest()


def appliance(
    *arguments: str, environ: dict[str, str] | None = None, cwd: Path | None = None, umask: int = -1
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "appliance", *arguments],
        env={**CLEAN, **(environ or {})},
        cwd=cwd,
        umask=umask,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line that says what is wrong, exit status 1, nothing on stdout."""
    assert done.returncode == 1, done
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("appliance: ")
    for word in words:
        assert word in done.stderr
    assert done.stdout == ""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return add(tmp_path / "models", tmp_path / "tiny.gguf")


def add(root: Path, path: Path, content: bytes = GOOD, *, umask: int = -1) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    done = appliance(
        "models", "--store", str(root), "add", str(path), "--name", "tiny", "--sha256", sha256, umask=umask
    )
    assert done.returncode == 0, done.stderr
    return root


def at(store: Path) -> dict[str, str]:
    return {"APPLIANCE_STORE_MODELS_DIR": str(store)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def closed(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


# config


def test_config_prints_what_is_in_force_and_its_digest(tmp_path: Path) -> None:
    path = tmp_path / "appliance.toml"
    path.write_text("[server]\nissuer = 'file'\n[[models]]\nname = 'tiny'\ncontext_length = 32\n")
    environ = {"APPLIANCE_ENGINE_THREADS": "3"}
    done = appliance(
        "config", "--config", str(path), "--listen", "127.0.0.1:1", "--attester", "insecure", environ=environ
    )
    assert done.returncode == 0, done.stderr
    printed = load(done.stdout, environ={})
    assert (printed.server.issuer, printed.engine.threads, printed.attestation.attester) == ("file", 3, "insecure")
    assert printed.server.listen == ("127.0.0.1:1",)
    assert done.stdout.splitlines()[-1] == f"# configuration digest: {printed.digest().hex()}"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (("config", "--config", "absent.toml"), {}, ["absent.toml", "cannot be read"]),
        (("config",), {"APPLIANCE_LIMITS_CONNECTIONS": "ten"}, ["APPLIANCE_LIMITS_CONNECTIONS", "integer"]),
        (("config",), {"APPLIANCE_RA_TLS": "ture"}, ["APPLIANCE_RA_TLS"]),
        (("config", "--listen", "0.0.0.0:8443"), {}, ["0.0.0.0:8443", "no API keys"]),
        (("config", "--listen", "8443"), {}, ["expected HOST:PORT"]),
        (("config", "--listen", "vsock:abc"), {}, ["server.listen", "'abc' is no vsock port"]),  # B099
        (("config",), {"APPLIANCE_SERVER_LISTEN": "vsock:4294967296"}, ["server.listen", "is no vsock port"]),
        (("config", "--unsafe-plain-http-listen", "0.0.0.0:80"), {}, ["unsafe_plain_http_listen", "loopback"]),
        (("config", "--model", "a", "--model", "a"), {}, ["a name appears twice"]),
        (("reference-values",), {}, ["no model is configured"]),
    ],
)
def test_what_is_wrong_is_named(arguments: tuple[str, ...], environ: dict[str, str], words: list[str]) -> None:
    refused(appliance(*arguments, environ=environ), *words)


def test_usage_errors_are_exit_2() -> None:
    assert appliance("serve", "--bogus").returncode == 2


# reference-values


def test_b178_the_same_digests_from_another_place_time_and_umask(store: Path, tmp_path: Path) -> None:
    other = add(tmp_path / "elsewhere" / "deep", tmp_path / "elsewhere" / "renamed.gguf", umask=0o002)
    for path in other.rglob("*"):
        os.utime(path, (1, 1))
    texts = []
    for root, cwd, umask in ((store, tmp_path, 0o077), (other, Path("/"), 0o000)):
        done = appliance("reference-values", "--model", "tiny", environ=at(root), cwd=cwd, umask=umask)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    values = tomllib.loads(texts[0])
    assert set(values) == {"version", "source", "config", "models"}
    assert len(values["models"]["tiny"]) == len(values["config"]) == 64


def test_b170_another_model_or_template_is_another_identity(store: Path, tmp_path: Path) -> None:
    def identity(root: Path, config: str = "") -> str:
        path = tmp_path / "c.toml"
        path.write_text(f"[[models]]\nname = 'tiny'\n{config}")
        done = appliance("reference-values", "--config", str(path), environ=at(root))
        assert done.returncode == 0, done.stderr
        value: str = tomllib.loads(done.stdout)["models"]["tiny"]
        return value

    (tmp_path / "t.jinja").write_text("{{ messages }}")
    changed = add(tmp_path / "changed", tmp_path / "changed.gguf", GOOD + b"\0")
    template = f"chat_template_file = '{tmp_path / 't.jinja'}'\n"
    assert len({identity(store), identity(changed), identity(store, template)}) == 3
    assert identity(store, "context_length = 32\n") == identity(store), "the configuration digest covers that one"


def test_reference_values_are_of_the_bytes_not_of_the_manifest(store: Path) -> None:
    weights = next(path for path in store.rglob("*") if path.is_file() and path.read_bytes() == GOOD)
    weights.chmod(0o600)
    weights.write_bytes(gguf(version=2))
    refused(appliance("reference-values", "--model", "tiny", environ=at(store)))


def test_the_device_is_printed_only_when_asked(store: Path) -> None:
    done = appliance("reference-values", "--model", "tiny", "--on-this-machine", environ=at(store))
    assert "# device digest" in done.stdout
    tomllib.loads(done.stdout)


# doctor


def test_doctor_says_what_is_missing() -> None:
    done = appliance("doctor", environ={"LD_PRELOAD": "", "GGML_X": "1"})
    assert done.returncode == 0
    for words in (
        "attester tdx",
        "attester nitro",
        "no /dev/sev-guest either",
        "devices nvidia",
        "missing: ",
        "/dev/nsm",
    ):
        assert words in done.stdout
    for words in ("attester insecure", "only --attester insecure can serve here", "GGML_X, LD_PRELOAD", "usable cores"):
        assert words in done.stdout


# serve


def test_b053_without_evidence_nothing_ever_listens(store: Path) -> None:
    port = free_port()
    for arguments in ((), ("--attester", "auto"), ("--attester", "snp")):
        done = appliance("serve", "--model", "tiny", "--listen", f"127.0.0.1:{port}", *arguments, environ=at(store))
        refused(done, "attest")
        assert closed(port)


def test_serve_refuses_a_port_that_is_taken(store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        done = appliance("serve", "--attester", "insecure", "--model", "tiny", "--listen", listen, environ=at(store))
        refused(done, f"cannot listen on {listen}", "Address already in use")


@pytest.mark.parametrize("listen", ["203.0.113.7:1", "a..b:1"])
def test_serve_refuses_an_address_that_is_not_here(store: Path, listen: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys" / "keys.json"
    assert appliance("keys", "--file", str(keys), "new").returncode == 0
    environ = {**at(store), "APPLIANCE_KEYS_FILE": str(keys)}
    refused(
        appliance("serve", "--attester", "insecure", "--model", "tiny", "--listen", listen, environ=environ),
        f"cannot listen on {listen}",
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (("--model", "absent"), {}, ["absent"]),
        (("--model", "../../etc"), {}, ["not a model name"]),
        ((), {}, ["no model is configured"]),
        (("--model", "tiny"), {"APPLIANCE_KEYS_FILE": "/nonexistent/keys.json"}, ["/nonexistent/keys.json"]),
        (("--model", "tiny"), {}, ["model"]),  # a file llama.cpp cannot load: no tensors
    ],
)
def test_serve_refuses_before_it_listens(
    store: Path, arguments: tuple[str, ...], environ: dict[str, str], words: list[str]
) -> None:
    port = free_port()
    done = appliance(
        "serve", "--attester", "insecure", "--listen", f"127.0.0.1:{port}", *arguments, environ={**at(store), **environ}
    )
    refused(done, *words)
    assert "INSECURE MODE" in done.stderr
    assert "Serving" not in done.stderr
    assert closed(port)


def test_insecure_mode_lists_an_unsafe_environment(store: Path) -> None:
    done = appliance("serve", "--attester", "insecure", environ={**at(store), "LLAMA_X": "1"})
    refused(done, "LLAMA_X", "insecure mode only")
