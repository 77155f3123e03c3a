"""The comparisons between a receipt over vectors and an exchange; `receipts.verify_receipt` says when they run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.routes.chat import load_request, packed_tokens
from client_sdk.routes.commitment import commitment
from client_sdk.routes.embeddings import EmbeddingContent, numbers_of, read_embeddings
from client_sdk.wire import cbor, names
from client_sdk.wire.embedding import NUMBER_BYTES, EmbeddingFacts, joined
from client_sdk.wire.receipt import ReceiptClaims

_FIELDS = frozenset({"model", "input", "user", "encoding_format", "dimensions"})
_LENGTH_TOLERANCE = 1e-3  # float32 and thousands of dimensions leave less than a hundredth of it


def verify_embedding(
    log: CheckLog, claims: ReceiptClaims, request_body: bytes, response_body: bytes, salt: bytes | None
) -> None:
    """What was asked against what was done, and the vectors that came against those committed to.

    Raises VerificationError as `log` does.
    """
    facts, model, prompt = claims.embedding, claims.model, claims.prompt
    assert facts is not None
    assert model is not None
    assert prompt is not None
    request = load_request(request_body)
    if request is None:
        log.reject("parameters", Rejection.PARAMETER_MISMATCH, "the request is no JSON object with distinct keys")
    log.equal("model asked for", Rejection.MODEL_MISMATCH, expected=request.get("model"), actual=model.name)
    _parameters(log, request, facts)
    _inputs(log, request.get("input"), claims, salt)
    if claims.response.status != names.STATUS_COMPLETE:
        log.not_checked("vectors", f"the answer ended with status {claims.response.status}")
        return
    with log.step("answer well formed"):
        content = read_embeddings(response_body)
    _output(log, claims, facts, content, salt)


def _parameters(log: CheckLog, request: Mapping[str, object], facts: EmbeddingFacts) -> None:
    """A null asks for the default, as a field that is not there does."""
    code = Rejection.PARAMETER_MISMATCH
    for field, sent in request.items():
        if field not in _FIELDS and sent is not None:
            log.reject(f"parameter {field[:64]}", code, "the receipt states no effective value for this parameter")
    encoding, dimensions = request.get("encoding_format"), request.get("dimensions")
    expected = "float" if encoding is None else encoding
    log.equal("parameter encoding_format", code, expected=expected, actual=facts.encoding)
    expected = facts.native if dimensions is None else dimensions
    log.equal("parameter dimensions", code, expected=expected, actual=facts.dimensions)


def _inputs(log: CheckLog, sent: object, claims: ReceiptClaims, salt: bytes | None) -> None:
    """The receipt speaks of the inputs that were sent: texts by their text, token ids by the ids."""
    assert claims.prompt is not None
    assert claims.embedding is not None
    code = Rejection.REQUEST_MISMATCH
    inputs = sent if type(sent) is list and sent and type(sent[0]) is not int else [sent]
    log.equal("number of inputs", code, expected=len(inputs), actual=claims.embedding.inputs)
    if all(type(item) is str for item in inputs):
        content, label, committed = [str(item) for item in inputs], names.LABEL_PROMPT_TEXT, claims.prompt.text
        try:
            opened = content[0].encode() if len(content) == 1 else cbor.encode(content)
        except ValueError:
            log.reject("inputs", code, "an input has no UTF-8 form")
    else:
        packed = [packed_tokens(item) for item in inputs]
        ids = [item for item in packed if item is not None]
        log.require(len(ids) == len(inputs), "inputs", code, "the inputs are neither texts nor lists of token ids")
        log.equal("number of tokens", code, expected=sum(map(len, ids)) // 4, actual=claims.prompt.count)
        label, committed = names.LABEL_PROMPT_TOKENS, claims.prompt.tokens
        opened = ids[0] if len(ids) == 1 else cbor.encode(ids)
    commitment(log, "inputs as sent", code, salt, (label, opened, committed))


def _output(
    log: CheckLog, claims: ReceiptClaims, facts: EmbeddingFacts, content: EmbeddingContent, salt: bytes | None
) -> None:
    assert claims.model is not None
    assert claims.prompt is not None
    code = Rejection.OUTPUT_MISMATCH
    fits = names.receipt_part(content.response_id) == claims.cti.hex()
    log.require(fits, "response id", Rejection.RECEIPT_ID_MISMATCH, "the answer's id names another receipt")
    model = claims.model.name
    log.equal("model named in the answer", Rejection.MODEL_MISMATCH, expected=model, actual=content.model)
    log.equal("form of numbers", code, expected=facts.encoding, actual=content.encoding)
    log.equal("number of vectors", code, expected=facts.inputs, actual=len(content.vectors))
    sizes = {len(vector) // NUMBER_BYTES for vector in content.vectors}
    log.require(sizes == {facts.dimensions}, "dimensions", code, "a vector has other dimensions than the receipt says")
    counted = (claims.prompt.count, claims.prompt.count)
    log.equal("usage", code, expected=counted, actual=(content.prompt_tokens, content.total_tokens))
    commitment(log, "vectors", code, salt, (names.LABEL_VECTORS, joined(content.vectors), facts.vectors))
    log.require(_normalized(content.vectors), "length of vectors", code, "a vector is not normalized, as stated")


def _normalized(vectors: Sequence[bytes]) -> bool:
    """False for infinities and for what is no number, too."""
    return all(abs(math.hypot(*numbers_of(vector)) - 1.0) <= _LENGTH_TOLERANCE for vector in vectors)
