"""`appliance`: serve, models, keys, reference-values, config, doctor, bench, replay. Reads argv and the machine."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce, wraps
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from appliance.cli.bench import bench
from appliance.cli.keys import keys
from appliance.cli.models import models
from appliance.cli.replay import replay
from appliance.cli.vsock import vsock_forward
from appliance.config import settings as configuration
from appliance.config.settings import Config
from appliance.errors import BootError
from appliance.models.store import ModelStore, default_store_root
from client_sdk.wire.names import MODE_INSECURE

if TYPE_CHECKING:
    from appliance.inference.service import Surroundings

_ENVIRON = os.environ  # noqa: TID251 - composition root
_INSECURE_BANNER = (
    "INSECURE MODE: no hardware vouches for anything. Evidence, receipts and results all say so, and clients refuse it "
    "unless their own policy admits it."
)

LoadConfig = Callable[[], Config]
"""Reads the configuration that the options of a command name. Raises what `appliance.config.settings.load` raises."""

_OPTIONS = (
    click.option(
        "--config", "config_path", type=click.Path(path_type=Path, dir_okay=False), help="TOML configuration file."
    ),
    click.option("--model", "model_names", multiple=True, help="Model to serve, by its name in the store."),
    click.option(
        "--listen",
        multiple=True,
        help="HOST:PORT, vsock:PORT, vsock:CID:PORT, unix:/PATH or systemd[:NAME]; may be given several times.",
    ),
    click.option(
        "--unsafe-plain-http-listen",
        "plain",
        multiple=True,
        help="Like --listen, without TLS: no channel is bound, and no policy admits it.",
    ),
)


def takes_configuration(attester_help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that name a configuration, for every command alike: they decide its digest together."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(
            config_path: Path | None,
            model_names: tuple[str, ...],
            attester: str | None,
            listen: tuple[str, ...],
            plain: tuple[str, ...],
            **others: object,
        ) -> None:
            command(partial(_load, config_path, model_names, attester, listen=listen, plain=plain), **others)

        options = (*_OPTIONS, click.option("--attester", help=attester_help))
        return reduce(lambda made, option: option(made), reversed(options), run)

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="attested-inference")
def cli() -> None:
    """Confidential inference: attested channel, bounded resources, a signed receipt for every answer."""


cli.add_command(models)
cli.add_command(keys)
cli.add_command(vsock_forward)
cli.add_command(bench)
cli.add_command(replay)


@cli.command()
@takes_configuration('"auto" (never falls back to insecure), "insecure", or a hardware family.')
def serve(load: LoadConfig) -> None:
    """Serve models over RA-TLS."""
    with _reported():
        asyncio.run(_serve(load()))


@cli.command("reference-values")
@takes_configuration("As for serve: the configuration digest covers it.")
@click.option(
    "--on-this-machine",
    is_flag=True,
    help="Also print what only this machine can tell: device digest, TPM key, registers.",
)
def reference_values(load: LoadConfig, on_this_machine: bool) -> None:
    """Print the digests a caller pins, computed offline from configuration and model files, as TOML."""
    from appliance.boot.identities import device_facts, offline_identity
    from appliance.models.progress import fractions, terminal_progress

    with _reported(), terminal_progress() as progress:
        config = load()
        if not config.models:
            raise BootError("no model is configured: name one with --model or [[models]]")
        store = _store(config)
        identities = {m.name: offline_identity(m, store, fractions(progress)) for m in config.models}
    lines = ["version = 1", 'source = "appliance reference-values"', f'config = "{config.digest().hex()}"']
    if on_this_machine:
        lines.append(f"# device digest of this machine, for people: {device_facts().digest.hex()}")
    lines += ["", "[models]", *(f'"{name}" = "{identity.hex()}"' for name, identity in sorted(identities.items()))]
    if on_this_machine:
        from appliance.boot.boot import machine_lines

        with _reported():
            lines += machine_lines(config, _surroundings())
    click.echo("\n".join(lines))


@cli.command("config")
@takes_configuration("As for serve.")
def show_config(load: LoadConfig) -> None:
    """Print the effective configuration as TOML, and the digest that receipts carry."""
    with _reported():
        config = load()
        click.echo(config.to_toml())
        click.echo(f"# configuration digest: {config.digest().hex()}")


@cli.command()
def doctor() -> None:
    """What this machine can attest and compute with, and what is missing."""
    from appliance.attestation.attester import ATTESTERS, DEVICES
    from appliance.boot.hygiene import find_unsafe_environment, no_swap_warning
    from appliance.engine.inspection import engine_lines

    with _reported():
        config = _load(None, (), None, listen=(), plain=()).attestation
    table = Table("check", "result", box=None, pad_edge=False)
    hardware = 0
    for name, family in ATTESTERS.items():
        reason = family.missing(config)
        hardware += name != MODE_INSECURE and reason is None
        table.add_row(f"attester {name}", "usable" if reason is None else f"missing: {reason}")
    for name, create in DEVICES.items():
        try:
            create()
        except BootError as error:
            table.add_row(f"devices {name}", f"missing: {error}")
        else:
            table.add_row(f"devices {name}", "usable")
    table.add_row("attestation hardware", "found" if hardware else "none: only --attester insecure can serve here")
    unsafe = find_unsafe_environment(_ENVIRON, allowed=frozenset())
    table.add_row("environment", f"unsafe: {', '.join(unsafe)}" if unsafe else "clean")
    table.add_row("swap", no_swap_warning() or "off")
    table.add_row("usable cores", str(len(os.sched_getaffinity(0))))
    for name, found in engine_lines(sys.executable):
        table.add_row(name, found)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


async def _serve(config: Config) -> None:
    from appliance.boot import serve as serving
    from appliance.boot.boot import Host, boot, choose_attester
    from appliance.boot.hygiene import check_environment, harden_process, no_swap_warning
    from appliance.keys import KeyRing
    from appliance.listener.sockets import inherited_sockets
    from appliance.models.progress import fractions, terminal_progress

    console = Console(stderr=True)
    surroundings = _surroundings()
    attester = choose_attester(config, surroundings)
    insecure = attester.mode == MODE_INSECURE
    allowed = frozenset(config.hygiene.allowed_environment)
    unsafe = check_environment(_ENVIRON, allowed=allowed, insecure=insecure)
    harden_process()
    if insecure:
        console.print(_INSECURE_BANNER, style="bold red")
    if unsafe:
        console.print(f"Unsafe environment, accepted in insecure mode only: {', '.join(unsafe)}", style="yellow")
    if (warning := no_swap_warning()) is not None:
        console.print(warning, style="yellow")
    host = Host(
        store=_store(config),
        key_ring=KeyRing.load(Path(config.keys.file)) if config.keys.file else None,
        python=sys.executable,
        surroundings=surroundings,
    )
    listeners = serving.bind_listeners(config, inherited_sockets(_ENVIRON, os.getpid()))
    try:
        with terminal_progress() as progress:
            appliance = await boot(config, host, attester, fractions(progress))
    except BaseException:
        listeners.close()
        raise
    addresses = [bound.url for bound in listeners.attested]
    addresses += [f"{bound.url} (plain HTTP, not attested)" for bound in listeners.plain]
    names = ", ".join(appliance.service.models)

    def ready() -> None:
        console.print(f"Serving {names} on {' '.join(addresses)} (attester: {attester.family}). Stop with Ctrl-C.")

    try:
        await serving.run(appliance, config, listeners, ready)
    finally:
        await appliance.close()


def _surroundings() -> Surroundings:
    from appliance.inference.service import Surroundings

    return Surroundings(
        clock=time.time,  # noqa: TID251 - composition root
        monotonic=time.monotonic,
        random_bytes=os.urandom,  # noqa: TID251 - composition root
    )


def _load(
    path: Path | None,
    model_names: tuple[str, ...],
    attester: str | None,
    *,
    listen: tuple[str, ...],
    plain: tuple[str, ...],
) -> Config:
    server: dict[str, object] = {}
    if plain:
        server = {"unsafe_plain_http_listen": list(plain), "listen": []}  # instead of RA-TLS, unless both are asked for
    if listen:
        server["listen"] = list(listen)
    overrides: dict[str, dict[str, object]] = {"server": server}
    if attester:
        overrides["attestation"] = {"attester": attester}
    return configuration.load_file(path, environ=_ENVIRON, overrides=overrides, models=model_names)


def _store(config: Config) -> ModelStore:
    directory = config.store.models_dir
    root = Path(directory) if directory else default_store_root(_ENVIRON.get("XDG_DATA_HOME"), _ENVIRON.get("HOME"))
    return ModelStore(root)


@contextmanager
def _reported() -> Iterator[None]:
    """A refusal to start is one clear line and exit status 1, not a traceback."""
    try:
        yield
    except BootError as error:
        click.echo(f"appliance: {error}", err=True)
        sys.exit(1)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cli()
