"""appliance-client: attest, ask, verify again, show. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from client_sdk.checks import ShownFact
from client_sdk.cli import console
from client_sdk.cli.console import EXIT_ACCEPT, EXIT_BUG, EXIT_UNDECIDED, EXIT_USAGE, Outcome, finish, outcome_of
from client_sdk.cli.endorsements import endorsements as endorsements_group
from client_sdk.cli.evidence import parse_time, verify_air, verify_evidence
from client_sdk.cli.policy import policy
from client_sdk.errors import ApplianceError
from client_sdk.wire.names import STATUS_COMPLETE

if TYPE_CHECKING:
    from client_sdk.appraisal.verifier import AttestationResult
    from client_sdk.offline.saved import VerifiedSavedAnswer
    from client_sdk.receipts.verify import VerifiedReceipt
    from client_sdk.transport.protocol import VerifiedAnswer

EPILOG = """\b
Exit status:
  0   accepted
  10  rejected (in a stream: after the last verified text)
  20  undecided: no verdict, network trouble, or an error from the appliance;
      a refusal or a failed answer with a verified receipt is one of these: it is
      genuine, but no answer
  30  rejected because the bytes are malformed
  2   usage, or an unusable policy file
  1   a bug in this program
"""

EXIT_INTERRUPTED = 130

_PATH = click.Path(path_type=Path)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_policy_option = click.option("--policy", "policy_path", type=_FILE, required=True, help="Your policy (TOML).")
_endorsements_option = click.option(
    "--endorsements",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory of what vouches for evidence.",
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object.")


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit status."""
    if "--debug" not in arguments:
        sys.excepthook = _report_bug
    try:
        status = cli.main(args=arguments, prog_name="appliance-client", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except click.Abort:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # nobody reads on; the flush at exit must not fail
        return EXIT_UNDECIDED
    return status if isinstance(status, int) else EXIT_ACCEPT


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show a traceback for a bug in this program.")
def cli(debug: bool) -> None:
    """Ask a confidential inference appliance and believe only what verifies."""


@cli.command()
@click.argument("url")
@_policy_option
@_endorsements_option
@_json_option
def attest(url: str, policy_path: Path, endorsements: Path | None, as_json: bool) -> int:
    """Attest the appliance at URL under a policy.

    URL is https://host:port, vsock://CID:port, vsock+unix:///path:port or unix:///path.
    """
    _check_url(url)

    def work() -> Outcome:
        from client_sdk.client.client import Appliance

        with Appliance(url, policy=policy_path, endorsements=endorsements) as appliance:
            result = appliance.attest()
        return _accepted(result, None)

    return finish(work, as_json=as_json)


@cli.command()
@click.argument("url")
@click.argument("prompt")
@_policy_option
@click.option("--model", required=True, help="Name of the model, as pinned in the policy.")
@click.option("--system", help="A system message before the prompt.")
@click.option("--no-stream", is_flag=True, help="Wait for the whole answer.")
@click.option("--save", type=_PATH, help="Save the verified answer to this new directory.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
@click.option("--max-tokens", type=click.IntRange(min=1))
@click.option("--temperature", type=float)
@click.option("--top-p", type=float)
@click.option("--top-k", type=int)
@click.option("--seed", type=int)
@click.option("--stop", multiple=True, help="Stop at this text; may be repeated.")
@_endorsements_option
@_json_option
def chat(url: str, prompt: str, policy_path: Path, as_json: bool, **options: Any) -> int:
    """Ask one question (PROMPT; - reads it from stdin). The answer goes to stdout, everything else to stderr."""
    _check_url(url)
    if prompt == "-":
        prompt = _read_prompt()
    messages = [{"role": "user", "content": prompt}]
    if options["system"] is not None:
        messages.insert(0, {"role": "system", "content": options["system"]})
    api_key = _api_key(options["api_key_env"])
    kept: list[VerifiedAnswer] = []

    def work() -> Outcome:
        from client_sdk.client.client import Appliance

        given = options["endorsements"]
        with Appliance(url, policy=policy_path, api_key=api_key, save=kept.append, endorsements=given) as appliance:
            failure = None
            try:
                text = _ask(appliance, messages, options, show=not as_json)
            except ApplianceError as error:
                if not kept:
                    raise
                failure, text = error, ""
        return _answered(kept[-1], appliance.policy.digest, text, failure=failure, save=options["save"])

    return finish(work, as_json=as_json, tables_to_stderr=True)


@cli.command()
@click.argument("url")
@click.argument("texts", nargs=-1, required=True)
@_policy_option
@click.option("--model", required=True, help="Name of the model, as pinned in the policy.")
@click.option("--dimensions", type=click.IntRange(min=1), help="Only so many of the model's dimensions.")
@click.option("--save", type=_PATH, help="Save the verified answer to this new directory.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
@_endorsements_option
@_json_option
def embed(url: str, texts: tuple[str, ...], policy_path: Path, as_json: bool, **options: Any) -> int:
    """Get the vectors of TEXTS (- reads one from stdin): one JSON array a line on stdout, everything else to stderr."""
    _check_url(url)
    inputs = [_read_prompt() if text == "-" else text for text in texts]
    api_key, given = _api_key(options["api_key_env"]), options["endorsements"]
    params = {} if options["dimensions"] is None else {"dimensions": options["dimensions"]}
    kept: list[VerifiedAnswer] = []

    def work() -> Outcome:
        from client_sdk.client.client import Appliance

        with Appliance(url, policy=policy_path, api_key=api_key, save=kept.append, endorsements=given) as appliance:
            failure, vectors = None, []
            try:
                vectors = [list(vector) for vector in appliance.embed(inputs, model=options["model"], **params).vectors]
            except ApplianceError as error:
                if not kept:
                    raise
                failure = error
        answered = _answered(kept[-1], appliance.policy.digest, "", failure=failure, save=options["save"])
        if failure is not None:
            return answered
        if not as_json:
            console.write_answer("".join(json.dumps(vector) + "\n" for vector in vectors))
        facts = tuple(fact for fact in answered.facts if fact.name != "answer")
        return replace(answered, facts=facts, extra=(("vectors", vectors),))

    return finish(work, as_json=as_json, tables_to_stderr=True)


@cli.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_policy_option
@click.option("--now", metavar="TIME", help="Judge at this time (ISO 8601 with zone, or Unix seconds).")
@click.option(
    "--accept-redacted",
    is_flag=True,
    help="Accept a receipt without its salt: it says nothing about the saved request and response.",
)
@_endorsements_option
@_json_option
def verify(
    directory: Path,
    policy_path: Path,
    now: str | None,
    accept_redacted: bool,
    endorsements: Path | None,
    as_json: bool,
) -> int:
    """Verify a saved answer again, offline. Without --now, by the clock of the moment when it was first verified."""
    moment = None if now is None else parse_time(now)

    def work() -> Outcome:
        from client_sdk.endorsements.files import load_directory
        from client_sdk.offline.saved import verify_saved
        from client_sdk.policy.policy import Policy

        policy = Policy.load(policy_path)
        given = None if endorsements is None else load_directory(endorsements)
        verified = verify_saved(directory, policy, now=moment, endorsements=given, accept_redacted=accept_redacted)
        judged = ShownFact(
            name="judged at",
            value=_moment(verified.saved.attestation.verified_at if moment is None else moment),
            trust="holder-asserted" if moment is None else "caller",
        )
        return _verified_again(verified, policy.digest, judged)

    return finish(work, as_json=as_json)


@cli.command()
@click.argument("path", metavar="FILE", type=click.Path(exists=True, path_type=Path))
@_json_option
def show(path: Path, as_json: bool) -> int:
    """Show a receipt, checkpoint, channel proof, bundle, policy, reference file or saved answer. Verifies nothing."""

    def work() -> Outcome:
        from client_sdk.offline.show import describe

        kind, facts = describe(path)
        return Outcome(
            result="undecided",
            code="NOT_VERIFIED",
            exit_code=EXIT_ACCEPT,
            message=f"this is what the {kind} says; nothing was checked",
            facts=facts,
        )

    return finish(work, as_json=as_json)


cli.add_command(policy)
cli.add_command(verify_evidence)
cli.add_command(verify_air)
cli.add_command(endorsements_group)


def _ask(appliance: Any, messages: list[dict[str, str]], options: dict[str, Any], *, show: bool) -> str:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    params = {name: options[name] for name in names if options[name] is not None}
    if options["stop"]:
        params["stop"] = list(options["stop"])
    if options["no_stream"]:
        text: str = appliance.chat(messages, model=options["model"], **params).text
        if show:
            console.write_answer(text + "\n")
        return text
    stream = appliance.stream(messages, model=options["model"], **params)
    try:
        for piece in stream:
            if show:
                console.write_answer(piece)
    finally:
        if show and stream.text:
            console.write_answer("\n")
    return str(stream.text)


def _answered(
    answer: VerifiedAnswer, policy_digest: bytes, text: str, *, failure: ApplianceError | None, save: Path | None
) -> Outcome:
    from client_sdk.offline.saved import save_answer

    if save is not None:
        save_answer(save, answer, policy_digest=policy_digest)
    if failure is not None:
        outcome = outcome_of(failure)
        checks = (*answer.attestation.result.checks, *answer.receipt.checks)
        return Outcome(
            result=outcome.result,
            code=outcome.code,
            exit_code=outcome.exit_code,
            message=outcome.message,
            checks=checks,
            facts=_facts(answer.attestation.result, answer.receipt),
            insecure=answer.attestation.result.claims.mode == "insecure",
        )
    spoken = ShownFact(name="answer", value=text, trust="key-signed")
    return _accepted(answer.attestation.result, answer.receipt, extra=(spoken,))


def _verified_again(verified: VerifiedSavedAnswer, policy_digest: bytes, judged: ShownFact) -> Outcome:
    """Accepted, unless what was saved is genuine and still no answer: as `chat` says of it, so does `verify`."""
    notes, receipt = [], verified.receipt
    status = receipt.claims.response.status
    if status != STATUS_COMPLETE:
        notes.append(f"genuine, but no complete answer: the appliance ended it with status {status}")
    if not receipt.opened:
        notes.append("the receipt is redacted: the saved request and response were NOT compared with it")
    if verified.saved.policy_digest != policy_digest:
        notes.append("verified under another policy than the one it was saved under")
    outcome = _accepted(verified.attestation, receipt, message="; ".join(notes), extra=(judged,))
    if status == STATUS_COMPLETE:
        return outcome
    return replace(outcome, result="undecided", code="NO_COMPLETE_ANSWER", exit_code=EXIT_UNDECIDED)


def _accepted(
    attestation: AttestationResult,
    receipt: VerifiedReceipt | None,
    *,
    message: str = "",
    extra: tuple[ShownFact, ...] = (),
) -> Outcome:
    return Outcome(
        result="accept",
        code="OK",
        exit_code=EXIT_ACCEPT,
        message=message,
        checks=(*attestation.checks, *(receipt.checks if receipt is not None else ())),
        facts=(*_facts(attestation, receipt), *extra),
        insecure=attestation.claims.mode == "insecure",
    )


def _facts(attestation: AttestationResult, receipt: VerifiedReceipt | None) -> tuple[ShownFact, ...]:
    facts = [ShownFact(name=f"attestation: {f.name}", value=f.value, trust=f.trust) for f in attestation.facts]
    if receipt is not None:
        facts += [ShownFact(name=f"receipt: {f.name}", value=f.value, trust=f.trust) for f in receipt.facts]
    return tuple(facts)


def _moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def _check_url(url: str) -> None:
    from client_sdk.client.client import parse_appliance_url

    try:
        parse_appliance_url(url)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _read_prompt() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"standard input is no {error.encoding} text from byte {error.start} on") from None


def _api_key(name: str | None) -> str | None:
    if name is None:
        return None
    value = os.environ.get(name)  # noqa: TID251
    if not value:
        raise click.UsageError(f"the environment variable {name} is not set")
    from client_sdk.client.client import check_api_key

    try:
        check_api_key(value.strip())
    except ValueError as error:
        raise click.UsageError(f"the environment variable {name}: {error}") from None
    return value.strip()


def _report_bug(kind: type[BaseException], error: BaseException, _: TracebackType | None) -> None:
    """An unexpected exception is our bug: one line, and the interpreter exits with 1."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
        return
    sys.stderr.write(f"bug in appliance-client (status {EXIT_BUG}): {kind.__name__}; run again with --debug\n")


if __name__ == "__main__":
    main()
