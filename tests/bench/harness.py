"""What the benchmarks share: a real appliance in its own processes, the bare loop to compare with, tables."""

from __future__ import annotations

import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from appliance.models.store import ModelStore, default_store_root

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
PROMPT = "Once upon a time, in a village by the sea, there lived"
START_LIMIT_S = 120
STOP_LIMIT_S = 30
COMPLETIONS = "/v1/completions"


def environment() -> dict[str, str]:
    """This environment without what the appliance would warn of."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LLAMA_", "GGML_"))}


def pulled_model() -> Path:
    """The weights of the demo model in the user's model store, fetched if they are not there."""
    command = [sys.executable, "-m", "appliance", "models", "pull", MODEL]
    subprocess.run(command, check=True, env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL)
    store = ModelStore(default_store_root(os.environ.get("XDG_DATA_HOME"), os.environ.get("HOME")))
    return store.verify(MODEL).paths[0]


# -- the appliance -----------------------------------------------------------------------------------------------------


class ServedAppliance:
    """`appliance serve` as a user starts it, on a free port of loopback, and a policy that accepts exactly it.

    `launcher` replaces `-m appliance` by a script that measures inside the serving process; `model` is a name in the
    user's model store.
    """

    def __init__(self, launcher: Sequence[str] = ("-m", "appliance"), *, model: str = MODEL) -> None:
        self._launcher = launcher
        self.model = model
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._log = Path(self._folder.name, "log")
        self.policy = Path(self._folder.name, "policy.toml")
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServedAppliance:
        self._make_policy()
        chosen = ["serve", "--model", self.model, "--attester", "insecure", "--listen", f"127.0.0.1:{self.port}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._launcher, *chosen], stdout=log, stderr=log, env=environment(), cwd=ROOT
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        self._folder.cleanup()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL where that does not help. Idempotent."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def api_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def worker_pid(self) -> int:
        return self.workers[0]

    @property
    def workers(self) -> tuple[int, ...]:
        """Every process that the API process has started and that still runs."""
        children: set[int] = set()
        for task in Path(f"/proc/{self.api_pid}/task").iterdir():
            children |= set(map(int, task.joinpath("children").read_text().split()))
        return tuple(sorted(children))

    def _make_policy(self) -> None:
        reference = Path(self._folder.name, "reference.toml")
        chosen = ["reference-values", "--model", self.model, "--attester", "insecure"]
        appliance = [sys.executable, "-m", "appliance", *chosen]
        client = [sys.executable, "-m", "client_sdk.cli.main", "policy", "init", "--unsafe-accept-insecure"]
        with reference.open("wb") as file:
            subprocess.run(appliance, check=True, stdout=file, stderr=subprocess.DEVNULL, env=environment(), cwd=ROOT)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        files = ["--from", str(reference), "-o", str(self.policy)]
        subprocess.run([*client, *files], check=True, env=environment(), cwd=ROOT, **quiet)  # type: ignore[call-overload]

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise SystemExit(f"the appliance did not start:\n{self._log.read_text()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def completion_request(tokens: int, *, stream: bool = True, prompt: str = PROMPT) -> dict[str, object]:
    """The request every benchmark asks: greedy, and by default a prompt after which the model goes on for long."""
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "top_k": 1,
        "seed": 0,
        "stream": stream,
    }


class RawClient:
    """The least a client can do: TLS 1.3 and reading. It attests and verifies nothing, so it costs little."""

    def __init__(self, port: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        plain = socket.create_connection(("127.0.0.1", port))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(plain)

    def post(self, request: dict[str, object]) -> Iterator[bytes]:
        """Send to /v1/completions; yields what arrives until the chunked body has ended."""
        body = json.dumps(request).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        self._socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = self._socket.recv(65_536)
            if not data:
                raise SystemExit("the appliance closed the connection")
            tail = (tail + data)[-16:]
            yield data

    def close(self) -> None:
        self._socket.close()


# -- the loop to compare with ------------------------------------------------------------------------------------------

_BARE = """
import json, sys, time
import llama_cpp as L

path, prompt, context, batch, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
quiet = L.llama_log_callback(lambda level, text, data: None)
L.llama_log_set(quiet, None)
L.llama_backend_init()
mp = L.llama_model_default_params()
model = L.llama_model_load_from_file(path.encode(), mp)
cp = L.llama_context_default_params()
cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = context, batch, batch, 1
cp.n_threads = cp.n_threads_batch = threads
cp.flash_attn_type, cp.no_perf = 1, True
ctx = L.llama_init_from_model(model, cp)
vocab = L.llama_model_get_vocab(model)
raw = prompt.encode()
buffer = (L.llama_token * 256)()
count = L.llama_tokenize(vocab, raw, len(raw), buffer, 256, False, False)
sampler = L.llama_sampler_chain_init(L.llama_sampler_chain_default_params())
L.llama_sampler_chain_add(sampler, L.llama_sampler_init_greedy())
memory = L.llama_get_memory(ctx)
one = (L.llama_token * 1)()
for line in sys.stdin:
    tokens = int(line)
    L.llama_memory_seq_rm(memory, 0, 0, -1)
    assert L.llama_decode(ctx, L.llama_batch_get_one(buffer, count)) == 0
    made = [L.llama_sampler_sample(sampler, ctx, -1)]
    start = time.perf_counter()
    while len(made) < tokens:
        one[0] = made[-1]
        assert L.llama_decode(ctx, L.llama_batch_get_one(one, 1)) == 0
        made.append(L.llama_sampler_sample(sampler, ctx, -1))
    print(json.dumps([time.perf_counter() - start, made]), flush=True)
"""


class BareLoop:
    """`llama_decode` in a loop with nothing around it, in a process of its own."""

    def __init__(self, model: Path, *, threads: int, context: int, n_batch: int) -> None:
        arguments = [str(model), PROMPT, str(context), str(n_batch), str(threads)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BARE, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, tokens: int) -> tuple[float, list[int]]:
        """Seconds from the first token to the last, and the tokens."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()
        elapsed, made = json.loads(self._process.stdout.readline())
        return elapsed, made

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.communicate()


# -- numbers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measure: its samples, its unit, and the target its median is held to ("" where there is none)."""

    name: str
    samples: Sequence[float]
    unit: str
    target: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles; the extremes of a few samples."""
        if len(self.samples) < 4:
            return min(self.samples), max(self.samples)
        low, _, high = statistics.quantiles(self.samples, n=4)
        return low, high

    @property
    def verdict(self) -> str:
        if not self.target:
            return ""
        relation, limit = self.target.split()[:2]
        met = self.median >= float(limit) if relation == ">=" else self.median <= float(limit)
        return "met" if met else "MISSED"


def report(bench: str, figures: Sequence[Figure], **facts: object) -> None:
    """Print the table, and the same as one line of JSON."""
    print(f"{'measure':<58} {'median':>9} {'quartiles':>19} {'n':>5}  target")
    for figure in figures:
        low, high = figure.spread
        shown = f"{low:.3f} .. {high:.3f}"
        print(
            f"{figure.name + ' [' + figure.unit + ']':<58} {figure.median:>9.3f} {shown:>19} {len(figure.samples):>5}  "
            f"{figure.target} {figure.verdict}".rstrip()
        )
    rows = [
        {
            "measure": f.name,
            "unit": f.unit,
            "median": round(f.median, 5),
            "quartiles": [round(bound, 5) for bound in f.spread],
            "samples": len(f.samples),
            "target": f.target,
            "verdict": f.verdict,
        }
        for f in figures
    ]
    load = round(os.getloadavg()[0], 2)
    print(json.dumps({"bench": bench, "load": load, **facts, "figures": rows}), flush=True)


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, from the scheduler's own nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int(task.joinpath("schedstat").read_text().split()[0])
    return total / 1e9


class Neighbours:
    """What the rest of the machine does meanwhile: on a busy machine the appliance, which uses two cores, loses more
    than a loop that uses one."""

    def __init__(self, ours: Sequence[int]) -> None:
        self._ours = (*ours, os.getpid())
        self._at = self._read()

    def cores(self) -> float:
        """Cores kept busy by others, time stolen by the host included, since the last call."""
        before, self._at = self._at, self._read()
        wall, busy, own = (now - then for now, then in zip(self._at, before, strict=True))
        return max(0.0, (busy - own) / wall)

    def _read(self) -> tuple[float, float, float]:
        fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
        idle = fields[3] + fields[4]
        busy = (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, sum(cpu_s(pid) for pid in self._ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one process (proc(5), smaps_rollup). `private` is anonymous memory, what a leak would be made of."""

    proportional: int
    resident: int
    private: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        """Raises PermissionError: both processes of the appliance are not dumpable, so this takes CAP_SYS_PTRACE."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {name: int(size) for name, size in (line.removesuffix(" kB").split(":") for line in lines)}
        return cls(proportional=kib["Pss"] << 10, resident=kib["Rss"] << 10, private=kib["Pss_Anon"] << 10)
