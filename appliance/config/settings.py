"""The only reader of the configuration file and of the environment: one frozen tree, closed at every level.

Precedence: default < file < environment (`APPLIANCE_<SECTION>_<KEY>`) < command line. An unknown key, a wrong type or a
value out of range is a BootError that names the setting and where it came from; nothing falls back to a default because
it could not be read.
"""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from appliance.config import toml
from appliance.config import values as config_values
from appliance.config.addresses import (
    Address,
    HybridAddress,
    InheritedSockets,
    TcpAddress,
    UnixAddress,
    VsockAddress,
    parse_address,
)
from appliance.errors import BootError
from client_sdk.wire import digests
from client_sdk.wire.vsock import CID_ANY, parse_cid

_ENV_PREFIX = "APPLIANCE_"


def _setting(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    digest: bool = True,
    words: tuple[str, ...] = (),
) -> Any:
    """A field with bounds; those of a text count its bytes in UTF-8.

    A text may be limited to `words`. `digest=False` keeps addresses, paths and secrets out of the pinned configuration
    digest.
    """
    metadata = {"low": low, "high": high, "digest": digest, "words": words}
    if isinstance(default, list | dict):
        raise TypeError("use tuples for defaults")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """`listen` has the addresses of the attested listener, in the forms of `appliance.config.addresses`.

    `unsafe_plain_http_listen` has those of one without TLS: no channel is bound there, so no policy admits it.
    """

    listen: tuple[str, ...] = _setting(("127.0.0.1:8443",), digest=False)
    unsafe_plain_http_listen: tuple[str, ...] = _setting((), digest=False)
    issuer: str = _setting("attested-inference", low=1, high=1024)
    max_body_bytes: int = _setting(4 << 20, low=1024, high=256 << 20)
    max_request_s: float = _setting(600.0, low=1.0, high=86400.0)
    grace_s: float = _setting(10.0, low=0.0, high=600.0)
    stream_padding_bytes: int = _setting(256, low=0, high=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Connection limits of protocol section 7."""

    handshake_s: float = _setting(10.0, low=0.1, high=300.0)
    head_s: float = _setting(10.0, low=0.1, high=300.0)
    head_bytes: int = _setting(16384, low=1024, high=1 << 20)
    body_idle_s: float = _setting(30.0, low=0.1, high=3600.0)
    keep_alive_s: float = _setting(75.0, low=0.1, high=3600.0)
    connections: int = _setting(256, low=1, high=65536)
    connections_per_peer: int = _setting(64, low=1, high=65536)
    connections_per_cid: int = _setting(256, low=1, high=65536)
    backlog: int = _setting(512, low=1, high=65536)


@dataclass(frozen=True, slots=True, kw_only=True)
class VsockConfig:
    """`allowed_cids`: context ids that may connect over vsock, as numbers, "host" or "local"; empty = all."""

    allowed_cids: tuple[str, ...] = _setting((), digest=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttestationConfig:
    attester: str = _setting("auto")
    devices: str = _setting("none")
    """Whose evidence comes beside the CPU's: "none" or "nvidia"."""
    certificate_lifetime_s: int = _setting(86400, low=600, high=86400)
    certificate_evidence: bool = _setting(False)
    max_continued_s: int = _setting(600, low=0, high=86400)
    quotes_per_s: float = _setting(0.0, low=0.0, high=10000.0)
    """0 = derived from the measured time of one quote."""
    max_waiting: int = _setting(64, low=1, high=4096)
    endorsement_relay: str = _setting("", digest=False)
    """Address of a CONNECT proxy through which certificates are fetched that the host does not hand over."""
    tpm2_tcti: str = _setting("device:/dev/tpmrm0", digest=False)
    """How the TPM is reached, in the words of tpm2-tss."""
    tpm2_pcrs: tuple[str, ...] = _setting(("0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "11"))
    """Registers of the SHA-256 bank that quotes cover."""
    tpm2_key_handle: str = _setting("", digest=False)
    """A persistent attestation key, such as 0x81010002; empty: the TPM's primary key of a fixed template."""
    tpm2_ak_certificate: str = _setting("", digest=False)
    """DER file with the certificate of the attestation key; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`threads` and `kv_tokens` are "auto" (measured at the start; enough for four whole contexts) or numbers."""

    threads: int | Literal["auto"] = _setting("auto", low=1, high=1024)
    batch_tokens: int = _setting(63, low=1, high=65536)
    """Rows of one step. From 64 on llama.cpp computes attention in tiles, which give other bits."""
    kernels: str = _setting("auto", words=("auto", "plain", "avx2", "avx-vnni", "avx512-vnni", "amx-int8"))
    """The variant of this project's kernels; "auto" takes the largest that the processor has. No bit depends on it."""
    selftest_limit_s: float = _setting(60.0, low=1.0, high=3600.0)
    slots: int = _setting(16, low=1, high=255)
    kv_tokens: int | Literal["auto"] = _setting("auto", low=2, high=1 << 28)
    determinism: str = _setting("per-request", words=("per-request", "always"))
    speculation: str = _setting("auto", words=("auto", "off", "prompt-lookup", "n-gram", "draft-model"))
    draft_tokens: int = _setting(7, low=1, high=64)
    draft_widths: str = _setting("adaptive", words=("adaptive", "fixed"))
    prefix_cache_entries: int = _setting(64, low=0, high=65536)
    prefix_cache_mib: int = _setting(128, low=1, high=1 << 20)
    prefix_cache_ttl_s: float = _setting(600.0, low=1.0, high=86400.0)
    max_active: int = _setting(16, low=1, high=4096)
    max_active_per_key: int = _setting(0, low=0, high=4096)
    """0 = no limit but `max_active`."""
    stall_s: float = _setting(60.0, low=1.0, high=3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One served model, by its name in the store. `context_length` 0 = the smaller of 4096 and the model's own.

    `pooling`: "auto" = vectors or text, as the model's metadata say; "none" = text; else vectors, pooled that way.
    """

    name: str = _setting("")
    context_length: int = _setting(0, low=0, high=1 << 24)
    chat_template_file: str = _setting("", digest=False)
    pooling: str = _setting("auto", words=("auto", "none", "mean", "cls", "last"))
    tool_format: str = _setting("auto", words=("auto", "hermes"))
    reasoning: str = _setting("auto", words=("auto", "none"))
    reasoning_tags: tuple[str, ...] = _setting(())
    draft_model: str = _setting("", digest=False)
    """The model in the store that guesses ahead, or `draft_file`; either way `draft_sha256` in hex says which one."""
    draft_file: str = _setting("", digest=False)
    draft_sha256: str = _setting("")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    models_dir: str = _setting("", digest=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    """API keys. An empty `file` means that none are configured (allowed on loopback listeners only)."""

    file: str = _setting("", digest=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptsConfig:
    """`air`: issue receipts of the AIR profile beside ours, on Intel TDX and AWS Nitro (docs/air.md)."""

    stored_per_identity: int = _setting(1024, low=1, high=1 << 20)
    air: bool = _setting(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """`listen` HOST:PORT of a plain-HTTP listener for Prometheus; empty = none."""

    listen: str = _setting("", digest=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HygieneConfig:
    allowed_environment: tuple[str, ...] = _setting(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server: ServerConfig = field(default_factory=ServerConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    vsock: VsockConfig = field(default_factory=VsockConfig)
    attestation: AttestationConfig = field(default_factory=AttestationConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    models: tuple[ModelConfig, ...] = ()
    store: StoreConfig = field(default_factory=StoreConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    receipts: ReceiptsConfig = field(default_factory=ReceiptsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    hygiene: HygieneConfig = field(default_factory=HygieneConfig)

    def pinned(self) -> dict[str, object]:
        """What the configuration digest covers: all but addresses, paths and secrets (docs/operations.md lists them).

        What is resolved at run time is not in it: `threads = "auto"` stays "auto".
        """
        tree: dict[str, object] = {
            section.name: _section_map(getattr(self, section.name), pinned_only=True)
            for section in fields(self)
            if section.name != "models"
        }
        tree["models"] = [_section_map(model, pinned_only=True) for model in self.models]
        kinds = {
            "tls": self.server.listen,
            "plain": self.server.unsafe_plain_http_listen,
            "plain-metrics": self.metrics.listen,
        }
        tree["listeners"] = [kind for kind, addresses in kinds.items() if addresses]
        tree["api-keys"] = bool(self.keys.file)
        return {name: value for name, value in tree.items() if value not in ({}, [])}

    def digest(self) -> bytes:
        return digests.config_digest(self.pinned())

    def to_toml(self) -> str:
        """The effective configuration as a file that `load` reads back to the same tree."""
        lines: list[str] = []
        for section in fields(self):
            value = getattr(self, section.name)
            if section.name == "models":
                for model in value:
                    lines += ["[[models]]", *toml.lines(_section_map(model, pinned_only=False)), ""]
            else:
                lines += [f"[{section.name}]", *toml.lines(_section_map(value, pinned_only=False)), ""]
        return "\n".join(lines)


def load(
    text: str | None,
    *,
    environ: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, object]] | None = None,
    models: tuple[str, ...] = (),
) -> Config:
    """Build the configuration. `text` is the TOML file (None: no file), `overrides` comes from the command line.

    Model names given on the command line replace the file's list but keep the settings of models named there.
    """
    tree = _parse_toml(text)
    sections = {entry.name: entry for entry in fields(Config)}
    unknown = sorted(set(tree) - set(sections))
    if unknown:
        raise BootError(f"configuration file: unknown section {unknown[0]!r}; known: {', '.join(sections)}")
    from_environment = _environment(environ)
    built: dict[str, object] = {}
    for name, entry in sections.items():
        if name == "models":
            built[name] = _models(tree.get("models", []), models)
            continue
        layers = [("configuration file", tree.get(name, {})), ("environment", from_environment.get(name, {}))]
        layers.append(("command line", dict((overrides or {}).get(name, {}))))
        built[name] = _section(typing.cast(type, entry.default_factory), name, layers)
    config = Config(**built)  # type: ignore[arg-type]
    _check(config)
    return config


def load_file(path: Path | None, **rest: Any) -> Config:
    """Like `load`, reading the file. Raises BootError naming the path."""
    if path is None:
        return load(None, **rest)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BootError(f"configuration file {path} cannot be read: {error.__class__.__name__}") from error
    return load(text, **rest)


def allowed_cids(config: Config) -> frozenset[int] | None:
    """The context ids that may connect over vsock; None for all. Raises BootError naming what is none."""
    try:
        return frozenset(map(parse_cid, config.vsock.allowed_cids)) or None
    except ValueError as error:
        raise BootError(f"vsock.allowed_cids: {error}") from None


def needs_keys(entry: str, *, keys_file: str) -> None:
    """Refuse `entry`, which other machines reach, while there are no keys."""
    if not keys_file:
        raise BootError(
            f"server.listen {entry!r} is reachable from other machines and no API keys are configured; "
            "create some with `appliance keys new` and set keys.file, or listen on 127.0.0.1, vsock or a unix socket"
        )


def _check(config: Config) -> None:
    server = config.server
    if not server.listen and not server.unsafe_plain_http_listen:
        raise BootError("server.listen is empty: nothing would be served")
    for entry in server.listen:
        address = _server_address("server.listen", entry)
        if isinstance(address, TcpAddress) and not address.loopback:
            needs_keys(entry, keys_file=config.keys.file)
    for entry in server.unsafe_plain_http_listen:
        address = _server_address("server.unsafe_plain_http_listen", entry)
        if isinstance(address, InheritedSockets) or (isinstance(address, TcpAddress) and not address.loopback):
            raise BootError(
                f"server.unsafe_plain_http_listen {entry!r}: without TLS an appliance listens on loopback, vsock and "
                "unix sockets only"
            )
    if config.metrics.listen and not isinstance(parse_address(config.metrics.listen), TcpAddress):
        raise BootError(f"metrics.listen {config.metrics.listen!r}: expected HOST:PORT")
    if config.attestation.endorsement_relay:
        _check_relay(config.attestation.endorsement_relay)
    allowed_cids(config)
    names = [model.name for model in config.models]
    if len(set(names)) != len(names):
        raise BootError("models: a name appears twice")


def _check_relay(entry: str) -> None:
    try:
        address = parse_address(entry)
    except BootError as error:
        raise BootError(f"attestation.endorsement_relay: {error}") from None
    match address:
        case TcpAddress(port=port) if port:
            return
        case VsockAddress(cid=cid) if cid != CID_ANY:
            return
        case UnixAddress():
            return
    raise BootError(
        f"attestation.endorsement_relay {entry!r}: expected where to connect: HOST:PORT, vsock:CID:PORT or unix:/PATH"
    )


def _server_address(setting: str, entry: str) -> Address:
    try:
        address = parse_address(entry)
    except BootError as error:
        raise BootError(f"{setting}: {error}") from None
    if isinstance(address, HybridAddress):
        raise BootError(f"{setting} {entry!r}: inside the virtual machine this is vsock:{address.port}")
    return address


def _parse_toml(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BootError(f"configuration file is not valid TOML: {error}") from error


def _environment(environ: Mapping[str, str]) -> dict[str, dict[str, object]]:
    known = {
        f"{_ENV_PREFIX}{section.name}_{entry.name}".upper(): (section.name, entry.name)
        for section in fields(Config)
        if section.name != "models"
        for entry in fields(typing.cast(Any, section.default_factory))
    }
    found: dict[str, dict[str, object]] = {}
    for variable, text in environ.items():
        if not variable.startswith(_ENV_PREFIX):
            continue
        if variable not in known:
            raise BootError(f"environment variable {variable} is not a known setting")
        section_name, key = known[variable]
        found.setdefault(section_name, {})[key] = _from_text(section_name, key, text, variable)
    return found


def _from_text(section_name: str, key: str, text: str, variable: str) -> object:
    """Read an environment variable as the type of its setting, strictly: "ten" for a number is an error."""
    section = next(entry for entry in fields(Config) if entry.name == section_name)
    kind = get_type_hints(typing.cast(type, section.default_factory))[key]
    return config_values.from_text(kind, text, f"environment variable {variable}")


def _models(entries: object, wanted: tuple[str, ...]) -> tuple[ModelConfig, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BootError("configuration file: models must be a list of tables ([[models]])")
    listed = tuple(_section(ModelConfig, f"models[{i}]", [("configuration file", e)]) for i, e in enumerate(entries))
    for index, model in enumerate(listed):
        if not model.name:
            raise BootError(f"configuration file: models[{index}].name is missing")
    if not wanted:
        return listed
    by_name = {model.name: model for model in listed}
    return tuple(by_name.get(name, ModelConfig(name=name)) for name in wanted)


def _section(kind: type, where: str, layers: list[tuple[str, Any]]) -> Any:
    hints = get_type_hints(kind)
    known = {entry.name: entry for entry in fields(kind)}
    values: dict[str, object] = {}
    for source, layer in layers:
        if not isinstance(layer, dict):
            raise BootError(f"{source}: {where} must be a table")
        for key, value in layer.items():
            if key not in known:
                raise BootError(f"{source}: unknown setting {where}.{key}; known: {', '.join(known)}")
            values[key] = config_values.checked(value, hints[key], known[key].metadata, f"{source}: {where}.{key}")
    return kind(**values)


def _section_map(section: object, *, pinned_only: bool) -> dict[str, object]:
    assert is_dataclass(section)
    values: dict[str, object] = {}
    for entry in fields(section):
        if pinned_only and not entry.metadata.get("digest", True):
            continue
        value = getattr(section, entry.name)
        values[entry.name] = list(value) if isinstance(value, tuple) else value
    return values
