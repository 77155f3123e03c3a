"""Receipts: to issue one, to verify one, one checkpoint, and their share of the time of a 128-token answer.

    python tests/bench/bench_receipts.py [--answers 8]

The first four are calls in this process, repeated. The share comes from an appliance whose receipt calls are under a
stop watch (metered_serve.py) and a client whose verification is: real answers over RA-TLS, all of both sides' work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.receipts.claims import Evaluation, InstanceFacts, Outcome, Record, Served
from appliance.receipts.issuer import ChainScope, Issuer
from appliance.receipts.transcript import OutputTranscript, StreamTranscript, Subject, prompt_facts, request_facts
from client_sdk import Appliance
from client_sdk.receipts.stream import StreamVerifier
from client_sdk.receipts.verify import verify_receipt
from client_sdk.wire import names
from client_sdk.wire.receipt import DeviceFacts, EngineFacts, ModelFacts
from tests.bench.harness import COMPLETIONS, Figure, ServedAppliance, completion_request, pulled_model, report
from tests.bench.metered_serve import StopWatch
from tests.simulators.attested import attested
from tests.simulators.insecure_appliance import Options
from tests.vectors import honest

TOKENS = 128
REPEATS = 400
PIECES = tuple(f" word{number}" for number in range(TOKENS))


def times_ms(call: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Milliseconds of each call, the first tenth left out."""
    taken = []
    for _ in range(repeats + repeats // 10):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken[repeats // 10 :]


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class Made:
    """An issuer under a real key, and a finished 128-token stream to issue receipts for."""

    def __init__(self) -> None:
        key = Ed25519PrivateKey.generate()
        self.issuer = Issuer(
            receipt_public=key.public_key().public_bytes_raw(),
            sign=key.sign,
            instance=InstanceFacts(
                iss="attested-inference",
                mode=names.MODE_INSECURE,
                config=digest("config"),
                device=DeviceFacts(kind="cpu", digest=digest("device")),
            ),
            random_bytes=os.urandom,
            stored_per_identity=1024,
        )
        self.scope = ChainScope(None)
        self.subject = Subject(
            cti=os.urandom(names.CTI_BYTES),
            salt=os.urandom(names.SALT_BYTES),
            iat=1_790_000_000,
            eat_nonce=os.urandom(32),
            attestation=digest("attestation"),
            channel=digest("channel"),
        )
        self.body = json.dumps(completion_request(TOKENS)).encode()
        self.output = OutputTranscript()
        self.stream = StreamTranscript(self.subject, digest("request"), clock=time.monotonic)
        for number, piece in enumerate(PIECES):
            self.output.add(piece, number.to_bytes(4, "little"))
            self.stream.add_frame(b'data: {"choices":[{"index":0,"text":"' + piece.encode() + b'"}]}\n\n')
        self.output.finish = "length"
        self.decoding = honest.whole_answer().decoding or {}

    def issue(self) -> bytes:
        """Everything from the finished answer to the signed receipt, every commitment included."""
        subject = self.subject
        prompt = prompt_facts(subject, [("Once upon a time" * 8, bytes(4 * 32))])
        execution = {"threads": 1, "batching": "none", "flash-attention": True, "template-date": None, "n-batch": 512}
        model = ModelFacts(
            name="smollm2-135m-instruct",
            identity=digest("identity"),
            weights=((98_362_432, digest("weights")),),
            tokenizer=digest("tokenizer"),
            chat_template=digest("template"),
            format="gguf",
        )
        engine = EngineFacts(name="llama.cpp", version="0.3.36", digest=digest("engine"))
        record = Record(
            subject=subject,
            request=request_facts(subject, method="POST", route=COMPLETIONS, body=self.body, complete=True),
            outcome=Outcome(
                status=names.STATUS_COMPLETE,
                http_status=200,
                media_type=names.MEDIA_EVENT_STREAM,
                body=None,
                stream=self.stream,
            ),
            engine=engine,
            served=Served(model=model, engine=engine),
            evaluation=Evaluation(prompt=prompt, decoding=self.decoding, outputs=(self.output,), execution=execution),
        )
        return self.issuer.issue(record, self.scope)

    def checkpoint(self) -> bytes:
        return self.issuer.sign_checkpoint(self.stream.take_checkpoint(), self.subject.salt)


def calls() -> list[Figure]:
    made, client = Made(), attested()
    whole = client.answer(Options(text="".join(PIECES)))
    streamed = client.stream(Options(pieces=PIECES))
    *blocks, last, _done = (block.raw for block in streamed.blocks)

    def verify_end() -> float:
        """The receipt block of a stream and its end, everything before it already verified."""
        verifier = client.verifier(streamed)
        for block in blocks:
            verifier.feed(block)
        start = time.perf_counter()
        verifier.feed(last)
        verifier.feed(names.DONE_BLOCK)
        verifier.finish()
        return (time.perf_counter() - start) * 1e3

    return [
        Figure(name="issue a receipt of a stream", samples=times_ms(made.issue), unit="ms", target="<= 0.3"),
        Figure(name="sign a checkpoint", samples=times_ms(made.checkpoint), unit="ms", target="<= 0.15"),
        Figure(
            name="verify_receipt, whole answer",
            samples=times_ms(lambda: verify_receipt(whole.receipt, whole.exchange, client.result, client.policy)),
            unit="ms",
            target="<= 1",
        ),
        Figure(
            name="verify the receipt at the end of a stream",
            samples=[verify_end() for _ in range(100)],
            unit="ms",
            target="<= 1",
        ),
    ]


def share(answers: int) -> list[Figure]:
    """CPU time of receipt work on both sides, in per cent of the wall time of the quickest of the streamed answers."""
    watch = StopWatch()
    for name in ("__init__", "feed", "finish"):
        watch.watch(StreamVerifier, name)
    walls, client_s = [], []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        meter = Path(folder, "meter.json")
        script = Path(__file__).with_name("metered_serve.py")
        with (
            ServedAppliance(launcher=(str(script), str(meter))) as served,
            Appliance(served.url, policy=served.policy) as client,
        ):
            for _ in range(answers + 1):
                watch.total_s = 0.0
                start = time.perf_counter()
                response = client.http.post(COMPLETIONS, json=completion_request(TOKENS))
                walls.append(time.perf_counter() - start)
                client_s.append(watch.total_s)
                if response.extensions["verified_receipt"].claims.output[0].count != TOKENS:
                    raise SystemExit("the answer is shorter than it should be")
            served.stop()
        server_s = json.loads(meter.read_text())
    rows = list(zip(walls, server_s, client_s, strict=True))[1:]
    quickest = min(walls)  # a machine that is slow because others use it must not make the share look small
    return [
        Figure(
            name=f"receipt work of both sides, {TOKENS}-token answer",
            samples=[100 * (made + checked) / quickest for _, made, checked in rows],
            unit="%",
            target="<= 1",
        ),
        Figure(name="of it, at the appliance", samples=[1e3 * made for _, made, _ in rows], unit="ms"),
        Figure(name="of it, at the client", samples=[1e3 * checked for _, _, checked in rows], unit="ms"),
        Figure(name="wall time of the answer", samples=[1e3 * wall for wall, _, _ in rows], unit="ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=8)
    options = parser.parse_args()
    pulled_model()
    report("receipts", [*calls(), *share(options.answers)])


if __name__ == "__main__":
    main()
