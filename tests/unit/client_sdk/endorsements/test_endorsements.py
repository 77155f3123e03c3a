"""Fetching endorsements from services on loopback, over TLS: polite, bounded, cached, and never a yes by itself."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import json
import os
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote as percent

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from client_sdk import Appliance, AsyncAppliance, Policy, UnsafeAcceptInsecure
from client_sdk.cli.main import run
from client_sdk.endorsements import sources as fetching
from client_sdk.endorsements.fetch import Services, fetch
from client_sdk.endorsements.files import load_directory, recognise_file
from client_sdk.endorsements.sources import Answer, Cache, Fetcher, Want, default_cache_directory, default_client
from client_sdk.errors import MalformedError, PolicyFileError, UndecidedError
from client_sdk.tee import x509 as sdk_x509
from client_sdk.tee.files import read_evidence
from client_sdk.tee.nvidia import abi as nvidia
from client_sdk.tee.snp import abi
from tests.simulators import intel
from tests.simulators.insecure_appliance import MODEL
from tests.simulators.wired_appliance import WiredAppliance

VECTORS = Path(__file__).parents[3] / "vectors" / "tee"
NOW = 1_750_000_000.0
Reply = tuple[int, dict[str, str], bytes]


class Service:
    """An HTTPS service whose answers a test scripts by path; it counts what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.replies: dict[str, Callable[[int], Reply]] = {}
        self.asked: list[str] = []
        self.certificate = directory / "service.pem"
        _write_identity(self.certificate)
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.asked.append(self.path)
                reply = service.replies.get(self.path.split("?")[0])
                count = service.asked.count(self.path)
                status, headers, body = reply(count) if reply else (404, {}, b"")
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "content-length" not in headers:
                    self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.url = f"https://127.0.0.1:{self._server.server_port}"

    def give(self, path: str, body: bytes, **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.replies[path] = lambda count: (200, named, body)

    def client(self, timeout_s: float = 5) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.certificate))
        return httpx.Client(verify=context, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _write_identity(path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(5)
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(private + made.public_bytes(Encoding.PEM))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with service.client() as made:
        yield made


class Clock:
    def __init__(self) -> None:
        self.now = NOW
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def fetcher(client: httpx.Client, clock: Clock, cache: Cache | None = None) -> Fetcher:
    return Fetcher(client, cache=cache, now=lambda: clock.now, monotonic=lambda: clock.now, sleep=clock.sleep)


def undecided(call: Callable[[], object]) -> UndecidedError:
    with pytest.raises(UndecidedError) as caught:
        call()
    return caught.value


def test_an_answer_is_fetched_once_and_kept_until_it_expires(
    service: Service, client: httpx.Client, tmp_path: Path
) -> None:
    service.give("/x", b"body", issuer_chain="a", other="b")
    clock, cache = Clock(), Cache(tmp_path / "cache")
    want = Want(url=f"{service.url}/x?q=1", ttl_s=100, keep=("issuer-chain",))
    for _ in range(3):
        answer = fetcher(client, clock, cache).get(want)
        assert answer == Answer(headers={"issuer-chain": "a"}, body=b"body")
    assert len(service.asked) == 1
    clock.now += 100
    fetcher(client, clock, cache).get(want)
    assert len(service.asked) == 2
    clock.now -= 1000  # a clock set back makes nothing last longer
    fetcher(client, clock, cache).get(want)
    assert len(service.asked) == 3
    (entry,) = cache.entries()
    assert (entry.url, entry.size, entry.expires - entry.fetched) == (want.url, 4, 100)
    for path in (tmp_path / "cache").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_an_answer_ends_when_it_says_so(service: Service, client: httpx.Client, tmp_path: Path) -> None:
    service.give("/x", b"body")
    clock, cache = Clock(), Cache(tmp_path / "cache")
    fetcher(client, clock, cache).get(Want(url=f"{service.url}/x", ttl_s=100, ends=lambda body: NOW + 10))
    assert cache.load(f"{service.url}/x", NOW + 9) is not None
    assert cache.load(f"{service.url}/x", NOW + 10) is None


def test_b175_busy_then_ok_is_asked_twice_and_waits_as_told(service: Service, client: httpx.Client) -> None:
    service.replies["/x"] = lambda n: (429, {"retry-after": "3"}, b"") if n == 1 else (200, {}, b"ok")
    clock = Clock()
    assert fetcher(client, clock).get(Want(url=f"{service.url}/x", ttl_s=1)).body == b"ok"
    assert (clock.slept, len(service.asked)) == ([3.0], 2)


@pytest.mark.parametrize(
    ("reply", "slept", "asked"),
    [
        ((503, {}, b""), [1.0, 2.0], 3),
        ((429, {"retry-after": "600"}, b""), [], 1),
        ((429, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, b""), [1.0, 2.0], 3),
        ((500, {}, b""), [], 1),
        ((302, {"location": "https://127.0.0.1/elsewhere"}, b""), [], 1),
        ((204, {}, b""), [], 1),
    ],
)
def test_what_is_no_answer_is_undecided(
    service: Service, client: httpx.Client, reply: Reply, slept: list[float], asked: int
) -> None:
    service.replies["/x"] = lambda count: reply
    clock = Clock()
    error = undecided(lambda: fetcher(client, clock).get(Want(url=f"{service.url}/x?chip=secret", ttl_s=1)))
    assert error.code == "ENDORSEMENTS_UNREACHABLE"
    assert "secret" not in str(error)
    assert (clock.slept, len(service.asked)) == (slept, asked)
    assert error.retry_after_s == (600 if reply[1].get("retry-after") == "600" else None)


def test_not_found_is_missing(service: Service, client: httpx.Client) -> None:
    error = undecided(lambda: fetcher(client, Clock()).get(Want(url=f"{service.url}/none", ttl_s=1)))
    assert (error.code, len(service.asked)) == ("ENDORSEMENTS_MISSING", 1)


def test_a_service_that_hangs_or_drips_or_floods(service: Service) -> None:
    stop = threading.Event()

    def hang(count: int) -> Reply:
        stop.wait(5)
        return 200, {}, b""

    service.replies["/hang"] = hang
    service.give("/flood", bytes((1 << 20) + 1))
    service.give("/slow", b"abc")
    with service.client(timeout_s=0.2) as client:
        started = time.monotonic()
        assert undecided(lambda: fetcher(client, Clock()).get(Want(url=f"{service.url}/hang", ttl_s=1)))
        assert time.monotonic() - started < 2
        error = undecided(lambda: fetcher(client, Clock()).get(Want(url=f"{service.url}/flood", ttl_s=1)))
        assert "larger" in str(error)
        ticks = iter([0.0, 100.0, 100.0])
        late = Fetcher(client, cache=None, now=lambda: NOW, monotonic=lambda: next(ticks), sleep=Clock().sleep)
        assert "no whole answer" in str(undecided(lambda: late.get(Want(url=f"{service.url}/slow", ttl_s=1))))
    stop.set()


def test_b060_tls_is_verified(service: Service) -> None:
    """A self-signed service is nobody: not over the default client, and never over plain HTTP."""
    service.give("/x", b"body")
    with default_client() as client:
        for url in (
            f"{service.url}/x",
            service.url.replace("https", "http") + "/x",
            "file:///etc/hostname",
            "https://[",
        ):
            error = undecided(lambda u=url: fetcher(client, Clock()).get(Want(url=u, ttl_s=1)))  # type: ignore[misc]
            assert error.code == "ENDORSEMENTS_UNREACHABLE"
    assert service.asked == []
    with service.client() as client:
        wrong_name = service.url.replace("127.0.0.1", "localhost")
        assert undecided(lambda: fetcher(client, Clock()).get(Want(url=f"{wrong_name}/x", ttl_s=1)))


def test_one_flight_for_one_address(service: Service, client: httpx.Client, tmp_path: Path) -> None:
    def slow(count: int) -> Reply:
        time.sleep(0.2)
        return 200, {}, b"body"

    service.replies["/x"] = slow
    shared = fetcher(client, Clock(), Cache(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: shared.get(Want(url=f"{service.url}/x", ttl_s=9)).body, range(8)))
    assert (answers, len(service.asked)) == ([b"body"] * 8, 1)
    assert shared._flights == {}


def test_a_damaged_cache_is_no_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert Cache(tmp_path / "none").entries() == ()
    cache.store("https://a/", Answer(headers={}, body=b"body"), now=NOW, expires=NOW + 10)
    body = tmp_path / hashlib.sha256(b"body").hexdigest()
    (index,) = tmp_path.glob("*.json")
    good = index.read_bytes()
    assert cache.load("https://a/", NOW) is not None
    for spoilt in (
        b"",
        b"[]",
        b"{}",
        good.replace(b"https://a/", b"https://b/"),
        good.replace(b'"version": 1', b'"version": 2'),
        good.replace(body.name.encode(), b"../../etc/passwd"),
        good.replace(body.name.encode(), b"00"),
        good.replace(b'"headers": {}', b'"headers": []'),
    ):
        index.write_bytes(spoilt)
        assert cache.load("https://a/", NOW) is None
    index.write_bytes(good)
    body.write_bytes(b"other")
    assert cache.load("https://a/", NOW) is None
    body.unlink()
    assert cache.load("https://a/", NOW) is None


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_MAX_ENTRIES", 3)
    cache = Cache(tmp_path)
    for number in range(6):
        cache.store(f"https://a/{number}", Answer(headers={}, body=bytes([number])), now=NOW, expires=NOW + 9)
        os.utime(cache._index(f"https://a/{number}"), (number, number))
    assert len(cache.entries()) == 3
    assert len(list(tmp_path.iterdir())) == 6


def test_a_cache_that_cannot_be_written_is_undecided(service: Service, client: httpx.Client, tmp_path: Path) -> None:
    service.give("/x", b"body")
    (tmp_path / "file").write_bytes(b"")
    broken = fetcher(client, Clock(), Cache(tmp_path / "file" / "cache"))
    assert undecided(lambda: broken.get(Want(url=f"{service.url}/x", ttl_s=1))).code == "ENDORSEMENTS_CACHE"


def test_where_the_cache_is() -> None:
    assert default_cache_directory({"XDG_CACHE_HOME": "/c"}) == Path("/c/attested-inference/endorsements")
    assert default_cache_directory({"XDG_CACHE_HOME": "c", "HOME": "/h"}).parts[:3] == ("/", "h", ".cache")


SNP_REPORT = (VECTORS / "snp/milan_v3_dstack.report.bin").read_bytes()


def milan(service: Service) -> None:
    path = abi.vcek_path(abi.parse_report(SNP_REPORT), "Milan").split("?")[0]
    service.give(path, sdk_x509.split((VECTORS / "snp/milan_v3_dstack.vcek.pem").read_bytes())[0][0])
    service.give("/vcek/v1/Milan/cert_chain", (VECTORS / "snp/chain_milan_ask_ark_asvk.pem").read_bytes())
    service.give("/vcek/v1/Milan/crl", (VECTORS / "snp/crl_milan.der").read_bytes())


def test_snp_from_a_fake_kds_verifies(
    service: Service, client: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    milan(service)
    old = (VECTORS / "snp/milan_v2_ok.report.bin").read_bytes()
    vcek = (VECTORS / "snp/milan_v2_ok.vcek.der").read_bytes()
    service.give(abi.vcek_path(abi.parse_report(old), "Milan").split("?")[0], vcek)
    found = fetch(
        "snp", old, [], fetcher(client, Clock(), Cache(tmp_path.parent / "kept")), Services(kds=service.url + "/")
    )
    assert [file.name for file in found] == ["vcek.der", "chain-milan.pem", "crl-milan.der"]
    for file in found:
        (tmp_path / file.name).write_bytes(file.content)
    (tmp_path / "service.pem").unlink()
    loaded = load_directory(tmp_path)
    assert (len(loaded.certificates), len(loaded.crls)) == (4, 1)
    policy = tmp_path.parent / f"{tmp_path.name}.toml"
    policy.write_text("version = 1\n[families.sev-snp]\n")
    report = VECTORS / "snp/milan_v2_ok.report.bin"
    arguments = [
        "--family",
        "snp",
        "--evidence",
        report,
        "--policy",
        policy,
        "--endorsement",
        tmp_path,
        "--report-only",
    ]
    assert run([str(a) for a in ("verify-evidence", *arguments, "--now", "2025-06-01T00:00:00Z")]) == 0
    assert run(["endorsements", "show", str(tmp_path)]) == 0
    assert "SEV-VCEK" in capsys.readouterr().out
    shutil.copy(VECTORS / "tdx/v4_b0c06f_uptodate.collateral.json", tmp_path)
    shutil.copy(VECTORS / "tdx/v4_90c06f_dstack.eventlog.json", tmp_path)
    shutil.copy(VECTORS / "nvidia/rim_driver_gh100_550.144.03.xml", tmp_path)
    assert run(["endorsements", "show", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("DCAP collateral", "dstack event log", "reference manifest"))


def test_snp_version_2_is_asked_for_by_each_product(service: Service, client: httpx.Client) -> None:
    old = (VECTORS / "snp/milan_v2_ok.report.bin").read_bytes()
    assert (
        undecided(lambda: fetch("snp", old, [], fetcher(client, Clock()), Services(kds=service.url))).code
        == "ENDORSEMENTS_MISSING"
    )
    assert len(service.asked) == 2
    milan(service)
    service.give(abi.vcek_path(abi.parse_report(old), "Milan").split("?")[0], b"vcek")
    assert fetch("snp", old, [], fetcher(client, Clock()), Services(kds=service.url))[0].content == b"vcek"
    service.replies.clear()
    service.replies[abi.vcek_path(abi.parse_report(old), "Milan").split("?")[0]] = lambda n: (500, {}, b"")
    assert (
        undecided(lambda: fetch("snp", old, [], fetcher(client, Clock()), Services(kds=service.url))).code
        == "ENDORSEMENTS_UNREACHABLE"
    )


def test_snp_of_an_unknown_processor(client: httpx.Client) -> None:
    unknown = SNP_REPORT[:0x188] + b"\x7f" + SNP_REPORT[0x189:]
    assert (
        undecided(lambda: fetch("snp", unknown, [], fetcher(client, Clock()), Services())).code == "UNSUPPORTED_VERSION"
    )
    with pytest.raises(MalformedError):
        fetch("snp", b"x", [], fetcher(client, Clock()), Services())


def test_dcap_from_a_fake_pccs_verifies(service: Service, client: httpx.Client) -> None:
    for side, family, kind in ((intel.Intel(), "tdx", "tdx"), (intel.Intel(tee=intel.SGX), "sgx", "sgx")):
        body = intel.TdBody() if family == "tdx" else intel.enclave_body()
        quote = intel.quote(side, body)
        made = json.loads(side.collateral())
        tcb = f'{{"tcbInfo":{made["tcb_info"]},"signature":"{made["tcb_info_signature"]}"}}'
        qe = f'{{"enclaveIdentity":{made["qe_identity"]},"signature":"{made["qe_identity_signature"]}"}}'
        chain = {"tcb_info_issuer_chain": percent(made["tcb_info_issuer_chain"])}
        service.give(f"/{kind}/certification/v4/tcb", tcb.encode(), **chain)
        chain = {"sgx_enclave_identity_issuer_chain": percent(made["qe_identity_issuer_chain"])}
        service.give(f"/{kind}/certification/v4/qe/identity", qe.encode(), **chain)
        chain = {"sgx_pck_crl_issuer_chain": percent(made["pck_crl_issuer_chain"])}
        service.give("/sgx/certification/v4/pckcrl", bytes.fromhex(made["pck_crl"]), **chain)
        service.give("/sgx/certification/v4/rootcacrl", made["root_ca_crl"].encode())
        (found,) = fetch(family, quote, [], fetcher(client, Clock()), Services(pcs=service.url))
        assert json.loads(found.content) == made
    assert (
        undecided(
            lambda: fetch(
                "tdx",
                quote if family == "tdx" else intel.quote(intel.Intel(), intel.TdBody()),
                [],
                fetcher(client, Clock()),
                Services(),
            )
        ).code
        == "ENDORSEMENTS_MISSING"
    )
    service.give("/sgx/certification/v4/rootcacrl", b"neither")
    with pytest.raises(MalformedError):
        fetch("sgx", quote, [], fetcher(client, Clock()), Services(pcs=service.url))


def test_nvidia_manifests_from_a_fake_service(service: Service, client: httpx.Client) -> None:
    report = (VECTORS / "nvidia/hopper_535.86.09.report.bin").read_bytes()
    chain = (VECTORS / "nvidia/hopper_535.86.09.chain.pem").read_bytes()
    vbios = (VECTORS / "nvidia/rim_vbios_96.00.5E.00.01.xml").read_bytes()
    service.give("/v1/rim/NV_GPU_DRIVER_GH100_535.86.09", b"<xml/>")
    service.give(
        "/v1/rim/NV_GPU_VBIOS_1010_0200_882_96005E0001", json.dumps({"rim": base64.b64encode(vbios).decode()}).encode()
    )
    found = fetch("nvidia", report, [chain], fetcher(client, Clock()), Services(rim=service.url))
    assert [file.content for file in found] == [b"<xml/>", vbios]
    service.give("/v1/rim/NV_GPU_VBIOS_1010_0200_882_96005E0001", b"{}")
    with pytest.raises(MalformedError):
        fetch("nvidia", report, [chain], fetcher(client, Clock()), Services(rim=service.url))


def test_a_switch_without_project_has_no_manifest_to_name(client: httpx.Client) -> None:
    evidence = (VECTORS / "nvidia/switch_ls10.evidence.json").read_bytes()
    assert fetch("nvidia", evidence, [], fetcher(client, Clock()), Services()) == []


def test_nvidia_evidence_that_names_no_manifest(client: httpx.Client) -> None:
    item = nvidia.parse_item(_items((VECTORS / "nvidia/hopper_590.12.evidence.json").read_bytes())[0])
    short = nvidia.encode_item(nvidia.NvidiaItem(request=item.request, response=item.response, chain=item.chain[:1]))
    with pytest.raises(MalformedError):
        fetch("nvidia", short, [], fetcher(client, Clock()), Services())
    later = b"\x12" + item.request[1:]
    newer = nvidia.encode_item(nvidia.NvidiaItem(request=later, response=item.response, chain=item.chain))
    assert (
        undecided(lambda: fetch("nvidia", newer, [], fetcher(client, Clock()), Services())).code
        == "UNSUPPORTED_VERSION"
    )


def _items(evidence: bytes) -> tuple[bytes, ...]:
    return read_evidence("nvidia", evidence, []).contents


def test_directories_name_the_file_at_fault(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_bytes(b"x")
    assert load_directory(tmp_path).certificates == ()
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(PolicyFileError, match="junk"):
        load_directory(tmp_path)
    with pytest.raises(PolicyFileError, match="gone"):
        recognise_file(tmp_path / "gone")
    with pytest.raises(PolicyFileError, match="gone"):
        load_directory(tmp_path / "gone")
    for number in range(257):
        (tmp_path / f"{number}").write_bytes(b"junk")
    with pytest.raises(PolicyFileError, match="more than"):
        load_directory(tmp_path)


def test_command_line(service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program trusts the system's roots alone, so a service of ours is unreachable to it: undecided."""
    report = VECTORS / "snp/milan_v3_dstack.report.bin"
    out, cache = tmp_path / "out", tmp_path / "cache"
    asked = ["endorsements", "fetch", "--family", "snp", "--evidence", report, "-o", out, "--kds", service.url]
    assert run([str(a) for a in (*asked, "--cache", cache, "--json")]) == 20
    assert json.loads(capsys.readouterr().out)["code"] == "ENDORSEMENTS_UNREACHABLE"
    Cache(cache).store("https://a/x", Answer(headers={}, body=b"y"), now=NOW, expires=1e300)
    Cache(cache).store("https://a/z", Answer(headers={}, body=b"y"), now=NOW, expires=1e9)
    assert run(["endorsements", "show", "--cache", str(cache), "--json"]) == 0
    assert "https://a/x" in json.loads(capsys.readouterr().out)["claims"]


def test_command_line_takes_what_the_cache_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache filled elsewhere is enough: no network is asked."""
    report, cache, out = VECTORS / "snp/milan_v3_dstack.report.bin", tmp_path / "cache", tmp_path / "out"
    base, kept = "https://kds.invalid", Cache(tmp_path / "cache")
    vcek = base + abi.vcek_path(abi.parse_report(SNP_REPORT), "Milan")
    chain = (VECTORS / "snp/chain_milan_ask_ark_asvk.pem").read_bytes()
    crl = (VECTORS / "snp/crl_milan.der").read_bytes()
    for url, body in (
        (vcek, (VECTORS / "snp/milan_v3_dstack.vcek.pem").read_bytes()),
        (f"{base}/vcek/v1/Milan/cert_chain", chain),
        (f"{base}/vcek/v1/Milan/crl", crl),
    ):
        kept.store(url, Answer(headers={}, body=body), now=NOW, expires=1e12)
    asked = [
        "endorsements",
        "fetch",
        "--family",
        "snp",
        "--evidence",
        report,
        "-o",
        out,
        "--kds",
        base,
        "--cache",
        cache,
    ]
    assert run([str(a) for a in asked]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["chain-milan.pem", "crl-milan.der", "vcek.der"]
    (tmp_path / "file").write_bytes(b"")
    blocked = [str(tmp_path / "file" / "inner") if a is out else str(a) for a in asked]
    capsys.readouterr()
    assert run(blocked) == 2


def test_sessions_read_their_directory_once_and_name_the_file_at_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, policy = tmp_path / "endorsements", tmp_path / "policy.toml"
    directory.mkdir()
    (directory / "chain.pem").write_bytes((VECTORS / "snp/chain_milan_ask_ark_asvk.pem").read_bytes())
    with WiredAppliance() as wired:
        pins = {MODEL: frozenset({wired.simulator.model.identity})}
        policy.write_text(Policy(models=pins, insecure=UnsafeAcceptInsecure()).to_toml())
        with Appliance(wired.url, policy=policy, endorsements=directory) as appliance:
            given = appliance._judge.session._endorsements
            assert given is not None
            assert len(given.certificates) == 3
            appliance.attest()
        arguments = [wired.url, "--policy", str(policy), "--endorsements", str(directory)]
        saved = tmp_path / "saved"
        assert run(["attest", *arguments]) == 0
        assert run(["chat", *arguments, "--model", MODEL, "--no-stream", "--save", str(saved), "2+2?"]) == 0
        assert run(["verify", str(saved), *arguments[1:]]) == 0
        (directory / "junk").write_bytes(b"junk")
        assert run(["attest", *arguments]) == 2
        assert "junk" in capsys.readouterr().err
        with pytest.raises(PolicyFileError, match="junk"):
            AsyncAppliance(wired.url, policy=policy, endorsements=directory)
