"""python -m image.measure: PLAN in, reference-values.toml and its explanation out. Also writes enclave image files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from image.measure import eif, eventlog, plan, predict, report, tpm, uki
from image.measure.errors import MeasureError

_EXIT_REFUSED = 1


def main(arguments: list[str]) -> int:
    """Run one command; 0 on success, 1 with one line on standard error where it is refused, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m image.measure", description="Predict launch measurements offline.")
    commands = parser.add_subparsers(dest="command", required=True)
    values = commands.add_parser("reference-values", help="predict, write reference values, explain them")
    values.add_argument("plan", type=Path, help="what to measure (TOML)")
    values.add_argument("--out", type=Path, required=True, help="reference-values.toml to write")
    check = commands.add_parser("check-log", help="compare a log of a boot of this image with the prediction")
    check.add_argument("uki", type=Path)
    check.add_argument("log", type=Path)
    build = commands.add_parser("eif", help="write an enclave image file and print PCR0 to 2")
    build.add_argument("--kernel", type=Path, required=True)
    build.add_argument("--cmdline", type=Path, required=True, help="file with the command line")
    build.add_argument("--ramdisk", type=Path, action="append", required=True, help="in order; the first boots")
    build.add_argument("--name", required=True)
    build.add_argument("--version", required=True)
    build.add_argument("--kernel-version", required=True)
    build.add_argument("--built", required=True, help="text for the metadata, such as the source's date")
    build.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        return {"reference-values": _reference_values, "check-log": _check_log, "eif": _eif}[options.command](options)
    except (MeasureError, OSError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return _EXIT_REFUSED


def _reference_values(options: argparse.Namespace) -> int:
    prediction = predict.predict(plan.load(options.plan))
    options.out.write_text(prediction.reference.to_toml(), encoding="utf-8")
    print(report.render(prediction), end="")
    return 0


def _check_log(options: argparse.Namespace) -> int:
    log = eventlog.parse(options.log.read_bytes(), tpm.ALGORITHM)
    found = tpm.differences(log, tpm.predict(uki.parse(options.uki.read_bytes())))
    for line in found:
        print(line)
    return _EXIT_REFUSED if found else 0


def _eif(options: argparse.Namespace) -> int:
    image = eif.Eif(
        kernel=options.kernel.read_bytes(),
        cmdline=uki.parse_cmdline(options.cmdline.read_bytes()),
        ramdisks=tuple(path.read_bytes() for path in options.ramdisk),
        metadata=eif.make_metadata(options.name, options.version, options.kernel_version, options.built),
    )
    with options.out.open("wb") as file:
        eif.write_to(image, file)
    for number, value in enumerate(image.pcrs()):
        print(f"PCR{number} {value.hex()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
