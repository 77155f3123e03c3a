"""A second reader of the wire format, written from docs/ alone. It imports nothing of ours.

It reads receipts, checkpoints, attestation bundles and whole event streams, checks signatures and recomputes every
commitment. Run it on a file to see what is inside: `python tests/reference_decoder.py FILE [COSE_KEY_HEX]`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

TYPES = {
    kind: f"application/attested-inference-{kind}+cose"
    for kind in ("receipt", "checkpoint", "channel-proof", "insecure-evidence")
}


class Refused(Exception):
    """`code` is the published rejection code, or MALFORMED for anything wrong with the form."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


def need(condition: bool, why: str, code: str = "MALFORMED") -> None:
    if not condition:
        raise Refused(code, why)


# ---------------------------------------------------------------- CBOR: read, write back, compare


def read_cbor(data: bytes) -> Any:
    """One value in the one deterministic encoding."""
    value, rest = _item(memoryview(data), 0)
    need(not rest, "trailing bytes")
    need(write_cbor(value) == data, "not the deterministic encoding")
    return value


def _item(data: memoryview, depth: int) -> tuple[Any, memoryview]:
    need(len(data) > 0, "truncated")
    major, low = divmod(data[0], 32)
    size = {24: 1, 25: 2, 26: 4, 27: 8}.get(low, 0)
    need(low < 28 and len(data) > size, "truncated, indefinite or reserved")
    raw, data = bytes(data[1 : 1 + size]), data[1 + size :]
    number = int.from_bytes(raw, "big") if size else low
    if major == 7:
        return _simple(low, raw), data
    if major < 2:
        return (number if major == 0 else -1 - number), data
    need(number <= len(data), "longer than the data")
    if major < 4:
        content = bytes(data[:number])
        return (content if major == 2 else _utf8(content)), data[number:]
    need(major != 6, "tag")
    need(depth < 16, "nested too deep")
    if major == 4:
        items = []
        for _ in range(number):
            value, data = _item(data, depth + 1)
            items.append(value)
        return items, data
    return _entries(number, data, depth)


def _entries(count: int, data: memoryview, depth: int) -> tuple[dict[Any, Any], memoryview]:
    found: dict[Any, Any] = {}
    for _ in range(count):
        key, data = _item(data, depth + 1)
        need(type(key) in (int, str) and key not in found, "bad or repeated key")
        found[key], data = _item(data, depth + 1)
    return found, data


def _utf8(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise Refused("MALFORMED", "text is not UTF-8") from None


def _simple(low: int, raw: bytes) -> Any:
    if raw and low > 24:
        value = struct.unpack({25: ">e", 26: ">f", 27: ">d"}[low], raw)[0]
        need(value - value == 0, "not finite")
        return value
    need(low in (20, 21, 22), "simple value")
    return (False, True, None)[low - 20]


def write_cbor(value: Any) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"\xf6", True: b"\xf5", False: b"\xf4"}[value]
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(value.encode())) + value.encode()
    if isinstance(value, list):
        return _head(4, len(value)) + b"".join(map(write_cbor, value))
    pairs = sorted((write_cbor(key), write_cbor(item)) for key, item in value.items())
    return _head(5, len(pairs)) + b"".join(key + item for key, item in pairs)


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major * 32 + number])
    size = next(size for size in (1, 2, 4, 8) if number < 256**size)
    return bytes([major * 32 + 23 + size.bit_length()]) + number.to_bytes(size, "big")


def _float(value: float) -> bytes:
    for head, form in ((b"\xf9", ">e"), (b"\xfa", ">f")):
        try:
            if struct.unpack(form, struct.pack(form, value))[0] == value:
                return head + struct.pack(form, value)
        except OverflowError:
            continue
    return b"\xfb" + struct.pack(">d", value)


# ---------------------------------------------------------------- hashes


def D(label: str, data: bytes) -> bytes:
    return hashlib.sha256(b"attested-inference %s\0%s" % (label.encode(), data)).digest()


def C(salt: bytes, label: str, data: bytes) -> bytes:
    return hmac.new(hmac.new(salt, label.encode(), "sha256").digest(), data, "sha256").digest()


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


# ---------------------------------------------------------------- edwards25519, enough to multiply by eight

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
CURVE_D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]


def decompress(encoded: bytes) -> Point | None:
    """The point, with y reduced mod p as lenient libraries do, or None if there is none with that y."""
    number = int.from_bytes(encoded, "little")
    y, odd = (number & (2**255 - 1)) % P, number >> 255
    x2 = (y * y - 1) * pow(CURVE_D * y * y + 1, -1, P) % P
    x = pow(x2, (P + 3) // 8, P)
    if (x * x - x2) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - x2) % P:
        return None
    return (P - x if x % 2 != odd else x) % P, y


def add(a: Point, b: Point) -> Point:
    product = CURVE_D * a[0] * b[0] * a[1] * b[1] % P
    x = (a[0] * b[1] + b[0] * a[1]) * pow(1 + product, -1, P) % P
    return x, (a[1] * b[1] + a[0] * b[0]) * pow(1 - product, -1, P) % P


def order_divides_eight(encoded: bytes) -> bool:
    point = decompress(encoded)
    if point is None:
        return False
    for _ in range(3):
        point = add(point, point)
    return point == (0, 1)


# ---------------------------------------------------------------- COSE


def read_key(cose_key: bytes, curve: int = 6) -> bytes:
    key = read_cbor(cose_key)
    need(isinstance(key, dict) and set(key) == {1, -1, -2} and (key[1], key[-1]) == (1, curve), "not that OKP key")
    need(type(key[-2]) is bytes and len(key[-2]) == 32, "key size")
    public: bytes = key[-2]
    return public


def read_sign1(data: bytes, kind: str, cose_key: bytes | None) -> tuple[bytes, bytes | None]:
    """(payload, salt). With a key the signature is checked as well."""
    need(data[:1] == b"\xd2", "tag 18")
    parts = read_cbor(data[1:])
    need(type(parts) is list and [type(part) for part in parts] == [bytes, dict, bytes, bytes], "four parts")
    protected, unprotected, payload, signature = parts
    header = read_cbor(protected)
    need(type(header) is dict and set(header) == {1, 4, 16}, "protected header holds alg, kid, typ and nothing else")
    need(header[16] == TYPES[kind], "typ")
    need(type(header[4]) is bytes and len(header[4]) == 32 and len(signature) == 64, "sizes")
    salted = kind in ("receipt", "checkpoint") and set(unprotected) == {"salt"}
    need(salted or not unprotected, "unprotected header")
    salt = unprotected.get("salt")
    need(salt is None or (type(salt) is bytes and len(salt) == 32), "salt")
    if cose_key is not None:
        check_signature(header, cose_key, write_cbor(["Signature1", protected, b"", payload]), signature)
    return payload, salt


def check_signature(header: Mapping[int, Any], cose_key: bytes, message: bytes, signature: bytes) -> None:
    need(header[1] == -8, "algorithm", "BAD_ALGORITHM")
    need(header[4] == sha256(cose_key), "kid names another key", "WRONG_KEY")
    public = read_key(cose_key)
    need(not order_divides_eight(public), "key of small order", "BAD_KEY")
    need(not order_divides_eight(signature[:32]), "R of small order", "BAD_SIGNATURE")
    need(int.from_bytes(signature[32:], "little") < L, "S is not reduced", "BAD_SIGNATURE")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature:
        raise Refused("BAD_SIGNATURE", "signature") from None


# ---------------------------------------------------------------- receipts

EVALUATED = {-70011, -70012, -70014, -70016}
EMBEDDED = {-70011, -70016, -70017}


def read_receipt(data: bytes, cose_key: bytes | None = None) -> tuple[dict[Any, Any], bytes | None]:
    """(claims, salt). Sizes and types of every field are the CDDL's business; relations are checked here."""
    payload, salt = read_sign1(data, "receipt", cose_key)
    claims = read_cbor(payload)
    need(type(claims) is dict, "claims")
    need(claims.get(265) == "tag:attested-inference,2026:receipt-v1", "profile", "UNSUPPORTED_PROFILE")
    there = (EVALUATED | EMBEDDED) & set(claims)
    need(there in (set(), EVALUATED, EMBEDDED), "half evaluated")
    status, media = claims[-70013]["status"], claims[-70013]["media-type"]
    need(status != "complete" or bool(there), "complete but not evaluated")
    need(status != "refused" or not there, "refused but evaluated")
    need((media == "text/event-stream") == (-70015 in claims), "stream facts")
    made = claims.get(-70017, {"dimensions": 1, "native": 1})
    need(made["dimensions"] <= made["native"], "more dimensions than the model has")
    need((claims[-70001] == 0) == (claims[-70002] is None), "previous")
    last = claims.get(-70015, {}).get("checkpoint", [0])
    need(last[0] <= claims.get(-70015, {}).get("frames", 0), "the last checkpoint lies behind the last frame")
    return claims, salt


def link(receipt: bytes) -> bytes:
    """What the next receipt of the chain must call `previous`."""
    protected, _, payload, signature = read_cbor(receipt[1:])
    return D("receipt v1", b"\xd2" + write_cbor([protected, {}, payload, signature]))


def check_content(claims: Mapping[int, Any], salt: bytes, held: Mapping[str, Any]) -> list[str]:
    """Open every commitment whose content is in `held`; the names of those that opened. Raises on the first other."""
    wanted = []
    if "request" in held:
        body = held["request"]
        wanted.append(("request", body, claims[-70010]["body"], "REQUEST_MISMATCH"))
        need(claims[-70010]["length"] == len(body), "request length", "REQUEST_MISMATCH")
    if "response" in held:
        need(claims[-70013]["length"] == len(held["response"]), "response length", "RESPONSE_MISMATCH")
        wanted.append(("response", held["response"], claims[-70013]["body"], "RESPONSE_MISMATCH"))
    if "prompt_text" in held:
        wanted.append(("prompt-text", held["prompt_text"].encode(), claims[-70011]["text"], "OUTPUT_MISMATCH"))
        wanted.append(("prompt-tokens", tokens(held["prompt_tokens"]), claims[-70011]["tokens"], "OUTPUT_MISMATCH"))
    if "inputs" in held:
        texts, ids = held["inputs"], [tokens(each) for each in held["input_tokens"]]
        wanted.append(("prompt-text", write_cbor(texts), claims[-70011]["text"], "OUTPUT_MISMATCH"))
        wanted.append(("prompt-tokens", write_cbor(ids), claims[-70011]["tokens"], "OUTPUT_MISMATCH"))
        need(claims[-70017]["inputs"] == len(texts), "number of inputs", "OUTPUT_MISMATCH")
        packed = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in held["vectors"])
        wanted.append(("vectors", packed, claims[-70017]["vectors"], "OUTPUT_MISMATCH"))
    for number, choice in enumerate(held.get("outputs", ())):
        stated = claims[-70014][number]
        wanted.append((f"output-text/{number}", choice["text"].encode(), stated["text"], "OUTPUT_MISMATCH"))
        wanted.append((f"output-tokens/{number}", tokens(choice["tokens"]), stated["tokens"], "OUTPUT_MISMATCH"))
        need(stated["count"] == len(choice["tokens"]), "token count", "OUTPUT_MISMATCH")
    if "stop" in held:
        wanted.append(("stop", write_cbor(held["stop"]), claims[-70012]["stop"], "PARAMETER_MISMATCH"))
    for label, content, stated, code in wanted:
        need(C(salt, label, content) == stated, f"commitment {label}", code)
    return [label for label, *_ in wanted]


def tokens(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


# ---------------------------------------------------------------- streams


def blocks(stream: bytes) -> list[bytes]:
    parts = stream.split(b"\n\n")
    need(parts[-1] == b"", "the stream ends inside a block", "STREAM_TRUNCATED")
    return [part + b"\n\n" for part in parts[:-1]]


def check_stream(stream: bytes, cose_key: bytes, request: bytes) -> dict[Any, Any]:
    """Verify every checkpoint and the receipt at the end; the receipt's claims."""
    frames: list[bytes] = []
    seen: list[tuple[dict[str, Any], bytes]] = []
    claims: dict[Any, Any] | None = None
    for block in blocks(stream):
        if block.startswith(b": checkpoint "):
            seen.append(_checkpoint(_decode64(block, b": checkpoint "), cose_key, frames))
            need(seen[-1][1] == seen[0][1], "the salt changed", "STREAM_CHECKPOINT_MISMATCH")
        elif block.startswith(b": receipt "):
            claims, salt = read_receipt(_decode64(block, b": receipt "), cose_key)
            _final(claims, salt, frames, seen)
            check_content(claims, salt or b"", {"request": request})
        elif not block.startswith(b":") and block != b"data: [DONE]\n\n":
            need(claims is None, "a frame after the receipt", "STREAM_AFTER_RECEIPT")
            frames.append(block)
    if claims is None:
        raise Refused("STREAM_TRUNCATED", "no receipt")
    return claims


def chain(context: list[Any], salt: bytes, frames: Sequence[bytes]) -> bytes:
    value = D("stream v1", salt + write_cbor(context))
    for index, frame in enumerate(frames, 1):
        value = D("frame v1", value + struct.pack(">Q", index) + frame)
    return value


def read_checkpoint(data: bytes, cose_key: bytes | None = None) -> tuple[dict[str, Any], bytes | None]:
    payload, salt = read_sign1(data, "checkpoint", cose_key)
    body = read_cbor(payload)
    need(type(body) is dict, "checkpoint")
    need(body.get("profile") == "tag:attested-inference,2026:checkpoint-v1", "profile", "UNSUPPORTED_PROFILE")
    return body, salt


def _checkpoint(data: bytes, cose_key: bytes, frames: Sequence[bytes]) -> tuple[dict[str, Any], bytes]:
    body, salt = read_checkpoint(data, cose_key)
    if salt is None:
        raise Refused("STREAM_CHECKPOINT_MISMATCH", "a checkpoint on the stream keeps its salt")
    context = [body[key] for key in ("cti", "eat_nonce", "attestation", "channel", "request")]
    need(body["i"] == len(frames), "checkpoint index", "STREAM_CHECKPOINT_MISMATCH")
    need(body["h"] == chain(context, salt, frames), "checkpoint chain", "STREAM_CHECKPOINT_MISMATCH")
    return body, salt


def _final(
    claims: dict[Any, Any], salt: bytes | None, frames: Sequence[bytes], seen: Sequence[tuple[dict[str, Any], bytes]]
) -> None:
    context = [claims[7], claims.get(10), claims[-70004], claims[-70005], claims[-70010]["body"]]
    for body, checkpoint_salt in seen:
        stated = [body[key] for key in ("cti", "eat_nonce", "attestation", "channel", "request")]
        need(stated == context and checkpoint_salt == salt, "another stream's", "STREAM_CHECKPOINT_MISMATCH")
    facts = claims[-70015]
    need(facts["frames"] == len(frames), "frame count", "STREAM_CHAIN_MISMATCH")
    need(facts["chain"] == chain(context, salt or b"", frames), "chain", "STREAM_CHAIN_MISMATCH")
    last = [seen[-1][0]["i"], seen[-1][0]["h"]] if seen else None
    need(facts.get("checkpoint") == last, "last checkpoint", "STREAM_CHECKPOINT_MISMATCH")


def _decode64(block: bytes, prefix: bytes) -> bytes:
    text = block[len(prefix) : -2]
    return base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))


# ---------------------------------------------------------------- attestation


def read_request(data: bytes) -> dict[str, Any]:
    need(len(data) <= 256, "too long")
    request: dict[str, Any] = read_cbor(data)
    need(type(request) is dict and "nonce" in request and any(request["nonce"]), "zero nonce")
    return request


def read_claims(data: bytes) -> dict[str, Any]:
    claims: dict[str, Any] = read_cbor(data)
    need(type(claims) is dict, "claims")
    need(claims.get("profile") == "tag:attested-inference,2026:attestation-v1", "profile", "UNSUPPORTED_PROFILE")
    need(any(claims["nonce"]), "zero nonce")
    read_key(claims["receipt-key"])
    read_key(claims["channel-key"])
    return claims


def check_bundle(data: bytes, held: Mapping[str, bytes]) -> dict[str, Any]:
    """`held`: nonce, spki, exported and, for a continued bundle, the claims verified before. The claims in force."""
    bundle = read_cbor(data)
    need(type(bundle) is dict and "channel-proof" in bundle, "bundle")
    need(("claims" in bundle) == ("evidence" in bundle), "claims and evidence go together")
    binder = sha256(held["spki"] + held["exported"])
    raw = bundle.get("claims", held.get("claims"))
    claims = read_claims(raw)
    if "claims" in bundle:
        need(claims["nonce"] == held["nonce"], "nonce", "NONCE_MISMATCH")
        need(claims["tls-key"] == sha256(held["spki"]), "tls-key", "TLS_KEY_MISMATCH")
        need(claims["binder"] == binder, "binder", "BINDER_MISMATCH")
        _evidence(bundle["evidence"], raw)
    payload, _ = read_sign1(bundle["channel-proof"], "channel-proof", claims["channel-key"])
    proof = read_cbor(payload)
    need(proof["nonce"] == held["nonce"], "proof nonce", "NONCE_MISMATCH")
    need(proof["binder"] == binder, "proof binder", "BINDER_MISMATCH")
    need(proof["claims"] == sha256(raw), "proof claims", "CLAIMS_MISMATCH")
    return claims


def _evidence(items: Sequence[Any], claims: bytes) -> None:
    need(bool(items) and all(len(item) == 2 for item in items), "items")
    kind, content = items[0]
    need(kind == "insecure", "this reader knows the insecure family only", "FAMILY_NOT_ALLOWED")
    statement = read_cbor(content)
    signed, _ = read_sign1(statement["evidence"], "insecure-evidence", statement["key"])
    expected = hashlib.sha512(b"attested-inference report-data v1\0" + claims).digest()
    need(signed == expected, "H", "EVIDENCE_BINDING")
    stated = [device["evidence"] for device in read_cbor(claims)["devices"]]
    need(stated == [D("item v1", write_cbor(list(item))) for item in items[1:]], "devices", "EVIDENCE_BINDING")


# ---------------------------------------------------------------- show


def describe(data: bytes, cose_key: bytes | None) -> Any:
    if data[:1] != b"\xd2":
        bundle = read_cbor(data)
        claims = read_claims(bundle["claims"]) if "claims" in bundle else None
        return {"kind": "bundle", "claims": claims, "evidence": [item[0] for item in bundle.get("evidence", ())]}
    typ = read_cbor(read_cbor(data[1:])[0]).get(16)
    for kind in ("receipt", "checkpoint"):
        if typ == TYPES[kind]:
            claims, salt = (read_receipt if kind == "receipt" else read_checkpoint)(data, cose_key)
            return {"kind": kind, "salt": salt, "claims": claims, "signature": cose_key and "verified"}
    raise Refused("MALFORMED", f"nothing to show for type {typ!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def main(arguments: Sequence[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print("usage: reference_decoder.py FILE [COSE_KEY_HEX]", file=sys.stderr)
        return 2
    key = bytes.fromhex(arguments[1]) if len(arguments) == 2 else None
    try:
        print(json.dumps(_plain(describe(Path(arguments[0]).read_bytes(), key)), indent=2))
    except Refused as error:
        print(error, file=sys.stderr)
        return 10
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
