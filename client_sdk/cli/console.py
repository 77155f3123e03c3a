"""What the command line says: one outcome per run, as a table for people or as one JSON object for programs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from client_sdk.checks import ShownFact
from client_sdk.errors import (
    ApplianceError,
    Check,
    MalformedError,
    PolicyFileError,
    RequestError,
    SdkError,
    TransportError,
    UndecidedError,
    VerificationError,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXIT_ACCEPT = 0
EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_REJECT = 10
EXIT_UNDECIDED = 20
EXIT_MALFORMED = 30

Result = Literal["accept", "reject", "undecided"]

_MARKS = {"passed": "✓", "failed": "✗", "not checked": "·"}
_STYLES = {"passed": "green", "failed": "bold red", "not checked": "yellow"}
_RESULT_STYLES = {"accept": "bold green", "reject": "bold red", "undecided": "bold yellow"}
_FILE_COLUMNS = 150
_WHOLE_DIGEST_COLUMNS = 130
_LONG_HEX = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{16,}([0-9a-f]{4})\b")
INSECURE_BANNER = (
    "INSECURE: this appliance has no hardware protection. Its evidence is a key it made up itself: anybody who runs "
    "that machine can read the prompts and forge the answers. Your policy accepts that."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The one result of a run. `extra` are fields of the JSON that only some commands have."""

    result: Result
    code: str
    exit_code: int
    message: str = ""
    checks: tuple[Check, ...] = ()
    facts: tuple[ShownFact, ...] = field(default=())
    insecure: bool = False
    extra: tuple[tuple[str, object], ...] = ()


def outcome_of(error: SdkError) -> Outcome:
    """The outcome a typed error stands for. Raises the error again if it is not one of the SDK's tree."""
    if isinstance(error, VerificationError):
        malformed = isinstance(error, MalformedError)
        exit_code = EXIT_MALFORMED if malformed else EXIT_REJECT
        return Outcome(
            result="reject",
            code=str(error.code),
            exit_code=exit_code,
            message=str(error).removeprefix(f"{error.code}: "),
            checks=error.checks,
        )
    if isinstance(error, ApplianceError):
        word = "with a verified receipt" if error.verified else "without a receipt, so by whoever holds the connection"
        message = f"the appliance refused {word}: HTTP {error.status} {error.message}"
        return Outcome(result="undecided", code=error.code, exit_code=EXIT_UNDECIDED, message=message)
    if isinstance(error, UndecidedError) and error.retry_after_s is not None:
        message = f"{error.message}; try again in {error.retry_after_s:.0f} s"
        return Outcome(result="undecided", code=error.code, exit_code=EXIT_UNDECIDED, message=message)
    if isinstance(error, UndecidedError):
        return Outcome(
            result="undecided",
            code=error.code,
            exit_code=EXIT_UNDECIDED,
            message=error.message,
            checks=error.checks,
        )
    if isinstance(error, TransportError):
        return Outcome(result="undecided", code=error.code, exit_code=EXIT_UNDECIDED, message=error.message)
    if isinstance(error, PolicyFileError):
        return Outcome(result="undecided", code="POLICY_FILE", exit_code=EXIT_USAGE, message=str(error))
    if isinstance(error, RequestError):
        return Outcome(result="undecided", code="REQUEST", exit_code=EXIT_USAGE, message=str(error))
    return Outcome(result="undecided", code="NOT_SAVED", exit_code=EXIT_UNDECIDED, message=str(error))


def finish(
    work: Callable[[], Outcome],
    *,
    as_json: bool,
    tables_to_stderr: bool = False,
    otherwise: tuple[tuple[str, object], ...] = (),
) -> int:
    """Do the work of a command, print its outcome and return the exit status; `otherwise` is `extra` of a failure."""
    try:
        outcome = work()
    except SdkError as error:
        outcome = replace(outcome_of(error), extra=otherwise)
    print_outcome(outcome, as_json=as_json, tables_to_stderr=tables_to_stderr)
    return outcome.exit_code


def print_outcome(outcome: Outcome, *, as_json: bool, tables_to_stderr: bool = False) -> None:
    """Print the outcome: JSON to stdout, or tables to stdout (stderr where stdout is the answer itself)."""
    if as_json:
        sys.stdout.write(json.dumps(_json(outcome), ensure_ascii=False) + "\n")
        return
    console = _console(to_stderr=tables_to_stderr or outcome.exit_code == EXIT_USAGE)
    if outcome.insecure:
        print_banner(console)
    if outcome.facts:
        _print_facts(console, outcome.facts)
    if outcome.checks:
        _print_checks(console, outcome.checks)
    from rich.text import Text

    line = Text(f"{outcome.result.upper()} {plain(outcome.code)}", style=_RESULT_STYLES[outcome.result])
    if outcome.message:
        line.append(f"  {plain(outcome.message)}", style="default not bold")
    console.print(line, soft_wrap=True)


def print_banner(console: Console) -> None:
    from rich.panel import Panel

    console.print(Panel(INSECURE_BANNER, style="bold white on red", title="NO HARDWARE PROTECTION"))


def warn(message: str) -> None:
    """One line of advice to stderr."""
    from rich.text import Text

    _console(to_stderr=True).print(Text(plain(message), style="yellow"), soft_wrap=True)


def plain(text: str) -> str:
    """Text of a server as printable characters only: no control sequence reaches the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def write_answer(text: str) -> None:
    """A piece of the answer to stdout: exact when piped, without control characters on a terminal."""
    sys.stdout.write(plain(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _console(*, to_stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    # A log or a file has no width of its own: leave digests whole there.
    width = None if stream.isatty() else _FILE_COLUMNS
    return Console(stderr=to_stderr, highlight=False, width=width)


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _fitting(value: str, console: Console) -> str:
    """Digests shortened where they would not fit on a line; `--json` and files have them whole."""
    text = plain(value)
    return text if console.width >= _WHOLE_DIGEST_COLUMNS else _LONG_HEX.sub(r"\1…\2", text)


def _print_checks(console: Console, checks: Sequence[Check]) -> None:
    from rich.text import Text

    table = _table("Checks", "check", "status", "detail")
    for check in checks:
        status = Text(f"{_MARKS[check.status]} {check.status}", style=_STYLES[check.status])
        table.add_row(Text(plain(check.name)), status, Text(_fitting(check.detail, console)))
    console.print(table)


def _print_facts(console: Console, facts: Sequence[ShownFact]) -> None:
    from rich.text import Text

    bound = any(fact.bound_by for fact in facts)
    columns = ("fact", "value", "says", "would be bound by") if bound else ("fact", "value", "vouched for by")
    table = _table("Facts", *columns)
    for fact in facts:
        row = [Text(plain(fact.name)), Text(_fitting(fact.value, console)), Text(fact.trust)]
        table.add_row(*row, *([Text(fact.bound_by)] if bound else []))
    console.print(table)


def _json(outcome: Outcome) -> dict[str, Any]:
    return {
        "result": outcome.result,
        "code": outcome.code,
        "message": outcome.message,
        "checks": [{"name": c.name, "status": c.status, "detail": c.detail} for c in outcome.checks],
        "claims": _claims(outcome.facts),
        **dict(outcome.extra),
    }


def _claims(facts: Iterable[ShownFact]) -> dict[str, dict[str, str]]:
    claims: dict[str, dict[str, str]] = {}
    for fact in facts:
        mark = {"value": fact.value, "trust": fact.trust}
        claims[fact.name] = mark | ({"bound_by": fact.bound_by} if fact.bound_by else {})
    return claims
