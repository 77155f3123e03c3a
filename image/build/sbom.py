"""What the image is made of, for people and scanners: an SPDX 2.3 document (spdx-tools) and a list of licences.

Sources: the lock for names, versions and digests; DEP-5 copyright files of Debian's packages and the metadata of Python
packages for licences; the commit for the project's own code, the store's manifest for the model. A licence is what its
package declares; nobody here concluded more.
"""

from __future__ import annotations

import datetime
import hashlib
import io
import re
import tarfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from license_expression import ExpressionError, get_spdx_licensing
from spdx_tools.spdx.model.actor import Actor, ActorType
from spdx_tools.spdx.model.checksum import Checksum, ChecksumAlgorithm
from spdx_tools.spdx.model.document import CreationInfo, Document
from spdx_tools.spdx.model.package import Package
from spdx_tools.spdx.model.relationship import Relationship, RelationshipType
from spdx_tools.spdx.model.spdx_no_assertion import SpdxNoAssertion
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.json.json_writer import write_document_to_stream

from image.build import contents
from image.build.errors import BuildError
from image.build.lock import Input, Lock, digest, sha256_file
from image.build.run import environment, run
from image.build.wheels import wheel_metadata

# Of the tools, what is in initrd and unified kernel image.
_BOOTED: Final = (
    "busybox-static",
    "dmsetup",
    "libcap2",
    "libdevmapper1.02.1",
    "libpcre2-8-0",
    "libselinux1",
    "libudev1",
    "systemd-boot-efi",
)
_DEP5 = re.compile(r"^License:[ \t]*(\S[^\n]*)$", re.MULTILINE)
_LICENSING = get_spdx_licensing()
_UNSAFE_IN_ID = re.compile(r"[^A-Za-z0-9.-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """`licence` as declared, "" where nothing is; `sha256` of the locked file: of the source of what is compiled."""

    kind: str
    name: str
    version: str
    sha256: bytes
    licence: str
    comment: str = ""


def write(lock: Lock, compiled: Sequence[Path], own: Sequence[Component], work: Path) -> None:
    """sbom.spdx.json and licences.txt; `own` is what no lock has. Raises BuildError where the document is not valid."""
    components = sorted((*_components(lock, compiled), *own), key=lambda one: (one.kind, one.name))
    (work / "sbom.spdx.json").write_text(spdx_text(lock, components), encoding="utf-8")
    lines = [f"{one.kind:<6} {one.name} {one.version}: {one.licence or 'see its files'}\n" for one in components]
    head = (
        "Licences as the packages declare them. Full texts: /usr/share/doc/*/copyright and *.dist-info in the root.\n\n"
    )
    (work / "licences.txt").write_text(head + "".join(lines), encoding="utf-8")


def spdx_text(lock: Lock, components: Sequence[Component]) -> str:
    """The document as JSON; the same components give the same text. Raises BuildError where it is not valid SPDX."""
    document = _document(lock, components)
    messages = validate_full_spdx_document(document)
    if messages:
        raise BuildError(f"the SPDX document is not valid: {messages[0].validation_message}")
    text = io.StringIO()
    write_document_to_stream(document, text, validate=False)
    return text.getvalue() + "\n"


def project(pyproject: bytes, files: Mapping[str, bytes]) -> Component:
    """The project's own code, from its pyproject.toml and its files in the image by path. Raises BuildError."""
    match tomllib.loads(pyproject.decode()):
        case {"project": {"name": str(name), "version": str(version), "license": str(licence)}}:
            lines = [f"{hashlib.sha256(content).hexdigest()}  {path}\n" for path, content in sorted(files.items())]
            return Component(
                kind="own",
                name=name,
                version=version,
                sha256=hashlib.sha256("".join(lines).encode()).digest(),
                licence=licence,
                comment="The checksum is that of a list of files as sha256sum prints it, sorted by path: "
                + ", ".join(sorted({path.split("/", 1)[0] for path in files})),
            )
        case _:
            raise BuildError("pyproject.toml names no project, version and licence")


def model(manifest: Mapping[str, object]) -> Component:
    """The model, by its manifest in the store: what it is called, its bytes, its licence."""
    digest = str(manifest["sha256"])
    return Component(
        kind="model",
        name=str(manifest["name"]),
        version=digest[:12],
        sha256=bytes.fromhex(digest),
        licence=str(manifest["licence"]),
        comment=f"source: {manifest['source']}",
    )


def _components(lock: Lock, compiled: Sequence[Path]) -> list[Component]:
    found = [
        Component(kind="deb", name=o.name, version=o.version, sha256=o.sha256, licence=_deb_licence(o))
        for o in dict.fromkeys((*lock.group("root"), *booted(lock)))
    ]
    sources = {one.name: one.sha256 for one in lock.inputs if one.kind == "sdist"}
    for path in (*(one.cached() for one in contents.wheels(lock)), *compiled):
        fields = wheel_metadata(path)
        name = fields["name"].lower().replace("_", "-")
        found.append(
            Component(
                kind="python",
                name=name,
                version=fields["version"],
                sha256=sources.get(name) or sha256_file(path),
                licence=fields["licence"],
            )
        )
    return found


def booted(lock: Lock) -> tuple[Input, ...]:
    """The packages in kernel, initrd and unified kernel image."""
    return (*lock.group("kernel"), *(one for one in lock.group("tools") if one.name in _BOOTED))


def copyright_file(one: Input) -> bytes:
    """The package's copyright file, empty where it has none of its own."""
    archive = run(["dpkg-deb", "--fsys-tarfile", one.cached()], environ=environment(0))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if re.fullmatch(r"\./usr/share/doc/[^/]+/copyright", member.name) and member.isfile():
                file = tar.extractfile(member)
                return b"" if file is None else file.read()
    return b""


def _deb_licence(one: Input) -> str:
    """The short names in the package's machine-readable copyright file, "" where it has none (DEP-5)."""
    text = copyright_file(one).decode("utf-8", "replace")
    return ", ".join(sorted(set(_DEP5.findall(text)))) if "Format:" in text else ""


def _document(lock: Lock, components: Sequence[Component]) -> Document:
    created = datetime.datetime.fromtimestamp(lock.source_date_epoch, tz=datetime.UTC).replace(tzinfo=None)
    info = CreationInfo(
        spdx_version="SPDX-2.3",
        spdx_id="SPDXRef-DOCUMENT",
        name="attested-inference-image",
        document_namespace=f"urn:attested-inference:image:{digest(lock.inputs).hex()}",
        creators=[Actor(ActorType.TOOL, "attested-inference-image-build")],
        created=created,
    )
    packages = [_package(one) for one in components]
    describes = [Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, package.spdx_id) for package in packages]
    return Document(info, packages=packages, relationships=describes)


def _package(one: Component) -> Package:
    try:
        declared = _LICENSING.parse(one.licence, validate=True) if one.licence else SpdxNoAssertion()
    except ExpressionError:
        declared = SpdxNoAssertion()
    return Package(
        spdx_id=f"SPDXRef-{one.kind}-{_UNSAFE_IN_ID.sub('-', one.name)}",
        name=one.name,
        version=one.version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, one.sha256.hex())],
        license_concluded=SpdxNoAssertion(),
        license_declared=declared if declared is not None else SpdxNoAssertion(),
        license_comment=f"declared as: {one.licence}" if one.licence else None,
        comment=one.comment or None,
        copyright_text=SpdxNoAssertion(),
    )
