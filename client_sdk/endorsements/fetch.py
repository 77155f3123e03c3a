"""Which endorsements a piece of evidence needs, and where the vendors keep them.

Addresses are explicit: AMD's and NVIDIA's own by default; for Intel's collateral the caller names Intel's service or a
PCCS. Chip ids of AMD and FMSPCs of Intel go out with the questions.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from client_sdk.endorsements.sources import Answer, Fetcher, Want
from client_sdk.errors import MalformedError, UndecidedError
from client_sdk.tee import x509
from client_sdk.tee.dcap import pcs
from client_sdk.tee.dcap.abi import COLLATERAL_HEADERS, TEE_SGX, TEE_TDX, SignatureSection
from client_sdk.tee.files import FAMILY_NAMES, read_evidence
from client_sdk.tee.nvidia import abi as nvidia
from client_sdk.tee.nvidia import product
from client_sdk.tee.sgx import abi as sgx
from client_sdk.tee.snp import abi as snp
from client_sdk.tee.tdx import abi as tdx
from client_sdk.wire.errors import WireError

AMD_KDS = f"https://{snp.KDS_HOST}"
NVIDIA_RIM = "https://rim.attestation.nvidia.com"
FETCHABLE = ("snp", "tdx", "sgx", "nvidia")
CERTIFICATE_TTL_S = 30 * 86_400.0
LIST_TTL_S = 86_400.0
_PROJECT, _PROJECT_SKU, _CHIP_SKU = 17, 18, 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Base addresses. `pcs` None: Intel's collateral is not fetched, since nobody said from whom."""

    kds: str = AMD_KDS
    pcs: str | None = None
    rim: str = NVIDIA_RIM


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """One endorsement file: a name for people, and its bytes."""

    name: str
    content: bytes


def fetch(family: str, evidence: bytes, beside: list[bytes], fetcher: Fetcher, services: Services) -> list[Fetched]:
    """All that the vendor has for this evidence. `family` by its name on the command line, as are the files.

    Raises UndecidedError where something cannot be fetched, MalformedError for evidence or answers that are none.
    """
    try:
        contents = read_evidence(family, evidence, beside).contents
        return [found for content in contents for found in _SOURCES[FAMILY_NAMES[family]](content, fetcher, services)]
    except WireError as error:
        raise MalformedError.of(error) from None


def _fetch_snp(content: bytes, fetcher: Fetcher, services: Services) -> Iterator[Fetched]:
    report = snp.parse_report(content)
    candidates = snp.possible_products(report)
    if not candidates:
        raise UndecidedError("UNSUPPORTED_VERSION", "unsupported version of an SNP processor")
    base = services.kds.rstrip("/")
    product_name, vek = _first_vcek(report, candidates, fetcher, base)
    yield Fetched(name="vcek.der", content=vek)
    chain = fetcher.get(Want(url=base + snp.chain_path(product_name), ttl_s=CERTIFICATE_TTL_S))
    yield Fetched(name=f"chain-{product_name.lower()}.pem", content=chain.body)
    crl = fetcher.get(Want(url=base + snp.crl_path(product_name), ttl_s=LIST_TTL_S, ends=_crl_end))
    yield Fetched(name=f"crl-{product_name.lower()}.der", content=crl.body)


def _first_vcek(report: snp.Report, candidates: tuple[str, ...], fetcher: Fetcher, base: str) -> tuple[str, bytes]:
    """Reports of version 2 do not name the product: then both are asked for, and one has this chip."""
    missing: UndecidedError | None = None
    for name in candidates:
        try:
            answer = fetcher.get(Want(url=base + snp.vcek_path(report, name), ttl_s=CERTIFICATE_TTL_S))
        except UndecidedError as error:
            if error.code != "ENDORSEMENTS_MISSING":
                raise
            missing = error
            continue
        return name, answer.body
    assert missing is not None
    raise missing


def _fetch_tdx(content: bytes, fetcher: Fetcher, services: Services) -> Iterator[Fetched]:
    return _fetch_collateral(tdx.parse_quote(content).section, TEE_TDX, fetcher, services)


def _fetch_sgx(content: bytes, fetcher: Fetcher, services: Services) -> Iterator[Fetched]:
    return _fetch_collateral(sgx.parse_quote(content).section, TEE_SGX, fetcher, services)


def _fetch_collateral(
    section: SignatureSection, tee_type: int, fetcher: Fetcher, services: Services
) -> Iterator[Fetched]:
    if services.pcs is None:
        raise UndecidedError("ENDORSEMENTS_MISSING", "name the collateral service: Intel's PCS or a PCCS")
    urls = pcs.collateral_urls(section, tee_type, services.pcs)

    def get(url: str, ends: Callable[[bytes], float | None] = lambda body: None) -> pcs.Answer:
        answer: Answer = fetcher.get(Want(url=url, ttl_s=LIST_TTL_S, keep=COLLATERAL_HEADERS, ends=ends))
        return pcs.Answer(headers=answer.headers, body=answer.body)

    text = pcs.assemble(
        tcb_info=get(urls.tcb_info),
        qe_identity=get(urls.qe_identity),
        pck_crl=get(urls.pck_crl, _crl_end),
        root_crl=get(urls.root_crl, _crl_end),
    )
    yield Fetched(name="collateral.json", content=text.encode())


def _fetch_nvidia(content: bytes, fetcher: Fetcher, services: Services) -> Iterator[Fetched]:
    item = nvidia.parse_item(content)
    chain = [x509.parse_certificate(encoded) for encoded in item.chain]
    if len(chain) < 2:
        raise WireError("MALFORMED_EVIDENCE", "the device's chain has no device certificate")
    report = _report(item)
    for identifier in _rim_ids(report, product.of(chain[1])):
        answer = fetcher.get(Want(url=f"{services.rim.rstrip('/')}/v1/rim/{identifier}", ttl_s=LIST_TTL_S))
        yield Fetched(name=f"{identifier}.xml", content=_rim(answer.body))


def _report(item: nvidia.NvidiaItem) -> nvidia.Report:
    try:
        return nvidia.parse_report(item.request, item.response)
    except nvidia.UnsupportedReport as error:
        raise UndecidedError("UNSUPPORTED_VERSION", str(error)) from None


def _rim_ids(report: nvidia.Report, device: product.Product) -> Iterator[str]:
    """Names of the manifests, as NVIDIA's service and their own tags have them."""
    driver, vbios = report.driver_version, report.vbios_version
    if driver is not None:
        yield f"NV_GPU_DRIVER_{device.chip}_{driver}"
    parts = [report.text(field, "project") for field in (_PROJECT, _PROJECT_SKU, _CHIP_SKU)]
    if vbios is not None and all(parts):
        kind = "SWITCH_BIOS" if device.kind == "switch" else "GPU_VBIOS"
        yield f"NV_{kind}_{'_'.join(part for part in parts if part)}_{vbios.replace('.', '')}"


def _rim(body: bytes) -> bytes:
    """The manifest in {"id", "rim": base64, ...}; XML as such where a mirror serves it."""
    if body.lstrip()[:1] == b"<":
        return body
    try:
        return base64.b64decode(json.loads(body)["rim"], validate=True)
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error):
        raise WireError("MALFORMED_ENDORSEMENT", "the answer is no reference manifest") from None


def _crl_end(body: bytes) -> float | None:
    """When a revocation list ends; the verifier judges it, the cache only must not keep it longer."""
    try:
        der = body if body[:1] == b"\x30" else bytes.fromhex(body.decode("ascii"))
        return x509.parse_crl(der).next_update
    except (ValueError, WireError):
        return None


_SOURCES: Mapping[str, Callable[[bytes, Fetcher, Services], Iterator[Fetched]]] = {
    "sev-snp": _fetch_snp,
    "tdx": _fetch_tdx,
    "sgx": _fetch_sgx,
    "nvidia": _fetch_nvidia,
}
