"""`appliance keys`: new, list, revoke."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from appliance.keys import SCOPES, KeyEntry, KeyFile, KeyFileError, new_key

_DAY_S = 86_400


@click.group("keys")
@click.option(
    "--file", "path", required=True, type=click.Path(path_type=Path), help="The key file that the configuration names."
)
@click.pass_context
def keys(context: click.Context, path: Path) -> None:
    """Make, list and revoke the API keys that guard the appliance."""
    context.obj = KeyFile(path=path)


@keys.command("new")
@click.option("--label", default="", help="A note for you: whose key it is.")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(sorted(SCOPES)), help="[default: inference, receipts]"
)
@click.option("--expires-days", type=click.IntRange(1, 36_500), help="[default: never]")
@click.pass_obj
def new_command(file: KeyFile, label: str, scopes: tuple[str, ...], expires_days: int | None) -> None:
    """Make a key. It goes to stdout, once; only its SHA-256 is kept."""
    now = int(time.time())  # noqa: TID251 - this command line is a composition root
    expires = now + expires_days * _DAY_S if expires_days is not None else None
    chosen = frozenset(scopes) or frozenset({"inference", "receipts"})
    with _reported():
        text, entry = new_key(
            label=label,
            scopes=chosen,
            now=now,
            expires=expires,
            random_bytes=os.urandom,  # noqa: TID251 - composition root
        )
        file.add(entry)
    click.echo(text)
    click.echo(f"{entry.key_id}: kept in {file.path}. The key above is not shown again.", err=True)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_obj
def list_command(file: KeyFile, as_json: bool) -> None:
    """Show all keys, the ended ones too; never a key itself."""
    now = time.time()  # noqa: TID251 - composition root
    with _reported():
        entries = file.entries()
    if as_json:
        click.echo(json.dumps([_as_json(entry, now) for entry in entries], indent=2))
        return
    table = Table("id", "state", "scopes", "created", "expires", "label", box=None, pad_edge=False)
    for entry in entries:
        scopes = ",".join(sorted(entry.scopes))
        row = (entry.key_id, _state(entry, now), scopes, _date(entry.created), _date(entry.expires), entry.label)
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


@keys.command("revoke")
@click.argument("key_id")
@click.pass_obj
def revoke_command(file: KeyFile, key_id: str) -> None:
    """End a key for good; a running appliance refuses it from the next request on."""
    with _reported():
        entry = file.revoke(key_id, int(time.time()))  # noqa: TID251 - composition root
    click.echo(f"{entry.key_id}: revoked")


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except (KeyFileError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _state(entry: KeyEntry, now: float) -> str:
    if entry.revoked is not None:
        return "revoked"
    return "live" if entry.is_live(now) else "expired"


def _date(at: int | None) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d") if at is not None else "never"


def _as_json(entry: KeyEntry, now: float) -> dict[str, object]:
    return {
        "id": entry.key_id,
        "state": _state(entry, now),
        "label": entry.label,
        "scopes": sorted(entry.scopes),
        "created": entry.created,
        "expires": entry.expires,
        "revoked": entry.revoked,
    }
