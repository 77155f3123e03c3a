"""`appliance-client policy`: make a policy from a builder's reference values, and show what one accepts."""

from __future__ import annotations

from pathlib import Path

import click

from client_sdk.cli import console
from client_sdk.cli.console import EXIT_ACCEPT, Outcome, finish

_PATH = click.Path(path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")


@click.group()
def policy() -> None:
    """Make and read policies."""


@policy.command("init")
@click.option("--from", "reference_path", type=_FILE, required=True, help="Reference values from the builder.")
@click.option("-o", "--output", type=_PATH, required=True, help="The policy file to write.")
@click.option("--unsafe-accept-insecure", is_flag=True, help="Accept an appliance WITHOUT hardware protection.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@_json_option
def policy_init(reference_path: Path, output: Path, unsafe_accept_insecure: bool, force: bool, as_json: bool) -> int:
    """Make a policy that accepts exactly what a file of reference values names."""
    if output.exists() and not force:
        raise click.UsageError(f"{output} exists; --force replaces it")

    def work() -> Outcome:
        from client_sdk.offline.show import policy_facts
        from client_sdk.policy.policy import policy_from_reference
        from client_sdk.policy.reference_values import ReferenceValues

        reference = ReferenceValues.load(reference_path)
        made = policy_from_reference(reference, unsafe_accept_insecure=unsafe_accept_insecure)
        _write_text(output, made.to_toml())
        console.warn(f"These reference values say they come from: {reference.source}")
        console.warn("Take reference values from whoever built the appliance, never from the server you want to check.")
        return Outcome(
            result="accept",
            code="POLICY_WRITTEN",
            exit_code=EXIT_ACCEPT,
            message=str(output),
            facts=policy_facts(made),
            insecure=unsafe_accept_insecure,
        )

    return finish(work, as_json=as_json)


@policy.command("show")
@click.argument("path", metavar="FILE", type=_FILE)
@_json_option
def policy_show(path: Path, as_json: bool) -> int:
    """Read a policy file and show what it accepts."""

    def work() -> Outcome:
        from client_sdk.offline.show import policy_facts
        from client_sdk.policy.policy import Policy

        loaded = Policy.load(path)
        return Outcome(
            result="accept",
            code="POLICY_USABLE",
            exit_code=EXIT_ACCEPT,
            facts=policy_facts(loaded),
            insecure=loaded.insecure is not None,
        )

    return finish(work, as_json=as_json)


def _write_text(path: Path, text: str) -> None:
    try:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror}") from None
