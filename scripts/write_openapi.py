"""Writes docs/openapi.json, which is what /openapi.json serves. Run it after a change of a route."""

from __future__ import annotations

from pathlib import Path

from appliance.api.openapi import document_bytes

if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "openapi.json").write_bytes(document_bytes())
