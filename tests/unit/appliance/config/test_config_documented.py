"""docs/operations.md says what the program does: every setting, what is pinned, every metric, every route."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from appliance.api.app import build_app
from appliance.boot.boot import _register_levels
from appliance.config.settings import Config, ModelConfig, load
from appliance.keys import SCOPES
from appliance.listener.connection import ConnectionLimits
from appliance.listener.tls_server import make_protocol_class
from tests.unit.appliance.inference.service.rig import Rig

DOCUMENT = (Path(__file__).parents[4] / "docs" / "operations.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table whose first column has this heading."""
    lines = DOCUMENT.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    found = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def settings() -> Iterator[tuple[str, type, Any]]:
    for section in fields(Config):
        kind: Any = ModelConfig if section.name == "models" else section.default_factory
        prefix = "models[]" if section.name == "models" else section.name
        for entry in fields(kind):
            yield f"{prefix}.{entry.name}", get_type_hints(kind)[entry.name], entry


def test_every_setting_is_documented_as_it_is() -> None:
    names: dict[Any, str] = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true/false",
        tuple[str, ...]: "list of texts",
    }
    expected = []
    for name, kind, entry in settings():
        low, high = entry.metadata["low"], entry.metadata["high"]
        default = list(entry.default) if isinstance(entry.default, tuple) else entry.default
        expected.append(
            [
                f"`{name}`",
                names.get(kind, 'integer or "auto"'),
                "" if low is None else f"{low}..{high}",
                f"`{json.dumps(default)}`",
                "yes" if entry.metadata["digest"] else "no",
            ]
        )
    documented = rows("setting")
    assert [row[:-1] for row in documented] == expected
    assert all(len(row[-1]) > 10 for row in documented)


def test_what_is_out_of_the_digest_is_listed_exactly() -> None:
    listed = re.search(r"\*\*Out of it\*\*, and nothing else: (.*?)\. These", DOCUMENT, re.DOTALL)
    assert listed
    out = [f"`{name}`" for name, _, entry in settings() if not entry.metadata["digest"]]
    assert sorted(re.findall(r"`[^`]+`", listed[1])) == sorted(out)


def test_the_example_is_a_configuration() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert load(example, environ={}).models[0].name == "smollm2-135m-instruct"
    variables = re.findall(r"APPLIANCE_([A-Z_]+)=(\S+)`", DOCUMENT)
    assert variables
    load(None, environ={f"APPLIANCE_{name}": value for name, value in variables})


def test_every_metric_is_documented() -> None:
    rig = Rig()
    _register_levels(rig.service, make_protocol_class(contexts=None, limits=ConnectionLimits(), clock=time.monotonic))
    text = rig.metrics.render().decode()
    there = {
        (name.removesuffix("_total"), kind)
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
        if not name.endswith("_created")
    }
    assert {(row[0].strip("`"), row[1]) for row in rows("metric")} == there


def test_every_scope_and_route_is_documented() -> None:
    assert {row[0].strip("`") for row in rows("scope")} == SCOPES
    rig = Rig()
    app = build_app(service=rig.service, responder=None, ring=None, clock=time.time, max_body_bytes=1)  # type: ignore[arg-type]
    there = {
        (method, route.path.replace("{identifier}", "ID"))
        for route in app.routes
        for method in route.methods  # type: ignore[attr-defined]
    }
    documented = {tuple(row[0].strip("`").partition("?")[0].split(" ")) for row in rows("route")}
    assert documented == there
