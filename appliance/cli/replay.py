"""`appliance replay`: evaluate a saved answer again, and say whether it is what its receipt says."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from appliance.config import settings as configuration
from appliance.engine.settings import VARIANTS
from appliance.errors import BootError

if TYPE_CHECKING:
    from appliance.config.settings import Config
    from appliance.models.store import ModelStore
    from appliance.replay.means import Wanted
    from appliance.replay.verdict import Verdict

EXIT_USAGE = 2
_FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command("replay")
@click.argument("directory", metavar="ANSWER-DIR", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option(
    "--model", required=True, metavar="FILE-or-NAME", help="The weights: a GGUF file, or a name in the store."
)
@click.option("--chat-template", type=_FILE, help="The operator's chat template, where the appliance has one.")
@click.option(
    "--config",
    "config_path",
    type=_FILE,
    help="The appliance's configuration, whose digest the receipt names: for what no receipt states.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads that compute. [default: all cores but one]")
@click.option(
    "--kernels", type=click.Choice(("auto", *VARIANTS)), default="auto", help="Variant of the kernels. [default: auto]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/replay.md).")
def replay(
    directory: Path,
    model: str,
    chat_template: Path | None,
    config_path: Path | None,
    threads: int | None,
    kernels: str,
    as_json: bool,
) -> None:
    """Evaluate a saved answer again on this machine and compare.

    ANSWER-DIR is what `appliance-client chat --save` wrote. Whether the receipt's key can be trusted is what
    `appliance-client verify` says; this says whether the weights, the request and the drawn seed give the very tokens
    that were signed. No TEE is needed, nothing listens and nothing is sent.

    Exit status 0: reproduced. 10: differs. 20: cannot be reproduced, and why. 2: wrong usage.
    """
    from appliance.replay.means import Wanted

    logging.getLogger("appliance").setLevel(logging.WARNING)
    environ = dict(os.environ)  # noqa: TID251 - composition root
    try:
        config = None if config_path is None else configuration.load_file(config_path, environ={})
        wanted = Wanted(
            model=model,
            store=_store(config, environ),
            python=sys.executable,
            cores=len(os.sched_getaffinity(0)),
            config=config,
            chat_template=chat_template,
            threads=threads,
            kernels=kernels,
        )
    except BootError as error:
        click.echo(f"appliance: {error}", err=True)
        sys.exit(EXIT_USAGE)
    verdict = asyncio.run(_replay(directory, wanted))
    click.echo(json.dumps(verdict.to_json(), ensure_ascii=False, indent=2) if as_json else _text(verdict))
    sys.exit(verdict.exit_status)


async def _replay(directory: Path, wanted: Wanted) -> Verdict:
    from appliance.models.progress import fractions, silent, terminal_progress
    from appliance.replay.audit import Around
    from appliance.replay.audit import replay as replay_saved

    with terminal_progress() if sys.stderr.isatty() else nullcontext(silent) as progress:
        around = Around(
            monotonic=time.monotonic,
            random_bytes=os.urandom,  # noqa: TID251 - composition root
            progress=fractions(progress),
        )
        return await replay_saved(directory, wanted, around)


def _store(config: Config | None, environ: dict[str, str]) -> ModelStore:
    from appliance.models.store import ModelStore, default_store_root

    directory = "" if config is None else config.store.models_dir
    return ModelStore(Path(directory or default_store_root(environ.get("XDG_DATA_HOME"), environ.get("HOME"))))


def _text(verdict: Verdict) -> str:
    """The verdict for people: in one word first."""
    lines = [verdict.outcome.value]
    if verdict.reason is not None:
        lines[0] += f" ({verdict.reason.value})"
    lines.append(f"  {verdict.message}")
    found = verdict.difference
    if found is not None:
        place = ", ".join(f"{name} {value}" for name, value in found.place.items())
        lines.append(f"  first difference: {found.what}{f' at {place}' if place else ''}")
        lines += [
            f"    in the answer: {json.dumps(found.answer, ensure_ascii=False)}",
            f"    in the replay: {json.dumps(found.replay, ensure_ascii=False)}",
        ]
    if verdict.compared:
        lines.append(f"  equal: {', '.join(verdict.compared)}")
    for name in ("receipt", "engine"):
        facts = verdict.facts.get(name)
        if isinstance(facts, dict):
            said = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
            lines.append(f"  {name}: {said}")
    return "\n".join(lines)
