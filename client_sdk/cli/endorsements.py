"""`appliance-client endorsements`: fill a directory and the cache with what vendors vouch, and show what is there."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import click

from client_sdk.checks import ShownFact
from client_sdk.cli.console import EXIT_ACCEPT, Outcome, finish
from client_sdk.cli.evidence import read_file
from client_sdk.system import of_this_process

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")


@click.group()
def endorsements() -> None:
    """Fetch what vouches for evidence, for this machine or one without a network."""


@endorsements.command("fetch")
@click.option("--family", type=click.Choice(("snp", "tdx", "sgx", "nvidia")), required=True)
@click.option("--evidence", "evidence_path", type=_FILE, required=True, help="The evidence to fetch for.")
@click.option("--endorsement", "beside_paths", type=_FILE, multiple=True, help="Files that belong to the evidence.")
@click.option("-o", "--output", type=_DIRECTORY, required=True, help="Directory that gets the files.")
@click.option("--kds", metavar="URL", help="AMD's key distribution service or a mirror.")
@click.option("--pcs", metavar="URL", help="Intel's PCS, or a PCCS; needed for tdx and sgx.")
@click.option("--rim", metavar="URL", help="NVIDIA's RIM service or a mirror.")
@click.option("--cache", "cache_path", type=_DIRECTORY, help="Instead of the one under XDG_CACHE_HOME.")
@_json_option
def fetch_endorsements(
    family: str,
    evidence_path: Path,
    beside_paths: tuple[Path, ...],
    output: Path,
    kds: str | None,
    pcs: str | None,
    rim: str | None,
    cache_path: Path | None,
    as_json: bool,
) -> int:
    """Fetch the endorsements of one piece of evidence. They are not verified here, but whenever they are used."""
    evidence, beside = read_file(evidence_path), [read_file(path) for path in beside_paths]

    def work() -> Outcome:
        from client_sdk.endorsements.fetch import AMD_KDS, NVIDIA_RIM, Services, fetch
        from client_sdk.endorsements.sources import Cache, Fetcher, default_cache_directory, default_client

        directory = cache_path or default_cache_directory(os.environ)  # noqa: TID251
        around = of_this_process()
        with default_client() as client:
            fetcher = Fetcher(
                client, cache=Cache(directory), now=around.now, monotonic=around.monotonic, sleep=time.sleep
            )
            services = Services(kds=kds or AMD_KDS, pcs=pcs, rim=rim or NVIDIA_RIM)
            found = fetch(family, evidence, beside, fetcher, services)
        for file in found:
            _write(output / file.name, file.content)
        facts = tuple(
            ShownFact(name=file.name, value=f"{len(file.content)} bytes", trust="not verified") for file in found
        )
        return Outcome(
            result="accept", code="ENDORSEMENTS_FETCHED", exit_code=EXIT_ACCEPT, message=str(output), facts=facts
        )

    return finish(work, as_json=as_json)


@endorsements.command("show")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), required=False)
@click.option("--cache", "cache_path", type=_DIRECTORY, help="Instead of the one under XDG_CACHE_HOME.")
@_json_option
def show_endorsements(directory: Path | None, cache_path: Path | None, as_json: bool) -> int:
    """List the endorsement files of DIRECTORY, or without it what the cache holds. Verifies nothing."""

    def work() -> Outcome:
        from client_sdk.endorsements.sources import Cache, default_cache_directory

        if directory is not None:
            facts = _files(directory)
        else:
            cache = Cache(cache_path or default_cache_directory(os.environ))  # noqa: TID251
            facts = tuple(
                ShownFact(
                    name=entry.url, value=f"{entry.size} bytes, until {_iso(entry.expires)}", trust="not verified"
                )
                for entry in cache.entries()
            )
        message = "this is what is there; nothing was checked"
        return Outcome(result="undecided", code="NOT_VERIFIED", exit_code=EXIT_ACCEPT, message=message, facts=facts)

    return finish(work, as_json=as_json)


def _files(directory: Path) -> tuple[ShownFact, ...]:
    from client_sdk.endorsements.files import recognise_file

    facts = []
    for path in sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith(".")):
        found = recognise_file(path)
        kinds = [f"certificate {one.common_name()!r} until {_iso(one.not_after)}" for one in found.certificates]
        kinds += [
            f"revocation list until {'no end' if one.next_update is None else _iso(one.next_update)}"
            for one in found.crls
        ]
        kinds += ["DCAP collateral"] * len(found.collateral) + ["reference manifest"] * len(found.rims)
        kinds += [f"{one.kind} event log" for one in found.event_logs]
        text = "; ".join(kinds) or "other endorsement"
        facts.append(ShownFact(name=path.name, value=text, trust="not verified"))
    return tuple(facts)


def _iso(moment: float) -> str:
    try:
        return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return str(moment)


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from None
