"""What the SDK costs before it does anything: its import, its command line, and the modules it must not load.

python tests/bench/bench_imports.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.harness import ROOT, Figure, environment, report

FORBIDDEN = ("fastapi", "uvicorn", "torch", "llama_cpp", "appliance")
_IMPORT = """
import sys, time
start = time.perf_counter()
from client_sdk import Appliance, Policy
print(time.perf_counter() - start, *{name.partition(".")[0] for name in sys.modules})
"""


def import_s() -> float:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True, env=environment(), cwd=ROOT
    )
    elapsed, *modules = done.stdout.split()
    loaded = sorted(set(FORBIDDEN) & set(modules))
    if loaded:
        raise SystemExit(f"`from client_sdk import Appliance, Policy` loads {', '.join(loaded)}")
    return float(elapsed)


def help_s() -> float:
    program = Path(sys.executable).with_name("appliance-client")
    start = time.perf_counter()
    subprocess.run([program, "--help"], check=True, stdout=subprocess.DEVNULL, env=environment(), cwd=ROOT)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    import_s()  # the first run may compile bytecode
    help_s()
    imports = [import_s() for _ in range(options.rounds)]
    helps = [help_s() for _ in range(options.rounds)]
    report(
        "imports",
        [
            Figure(name="from client_sdk import Appliance, Policy", samples=imports, unit="s", target="<= 0.6"),
            Figure(name="appliance-client --help, whole process", samples=helps, unit="s", target="<= 0.8"),
        ],
        not_loaded=list(FORBIDDEN),
    )


if __name__ == "__main__":
    main()
