"""Errors of the appliance. `code` is API, the message is prose and never contains request content."""

from __future__ import annotations

import json
from typing import ClassVar


class ApplianceError(Exception):
    """An outcome that reaches the client as an OpenAI-shaped error.

    `code` is the stable machine name, `param` the request field at fault (a dotted path), `retry_after_s` the value of
    the Retry-After header.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(self, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The error as OpenAI's JSON object, one line of UTF-8."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False, separators=(",", ":")).encode()


class BadRequest(ApplianceError):
    status = 400
    kind = "invalid_request_error"


class Unauthorized(ApplianceError):
    status = 401
    kind = "authentication_error"


class Forbidden(ApplianceError):
    status = 403
    kind = "permission_error"


class NotFound(ApplianceError):
    status = 404
    kind = "invalid_request_error"


class MethodNotAllowed(ApplianceError):
    status = 405
    kind = "invalid_request_error"


class DeadlineExceeded(ApplianceError):
    status = 408
    kind = "timeout_error"


class ReceiptPending(ApplianceError):
    status = 409
    kind = "invalid_request_error"


class TooLarge(ApplianceError):
    status = 413
    kind = "invalid_request_error"


class UnsupportedMediaType(ApplianceError):
    status = 415
    kind = "invalid_request_error"


class Overloaded(ApplianceError):
    """429: the bounded queue is full. Always with Retry-After."""

    status = 429
    kind = "rate_limit_error"


class EngineFailed(ApplianceError):
    status = 500
    kind = "server_error"


class InternalError(ApplianceError):
    """An exception nobody foresaw. Its body is always the same bytes, so that a receipt can commit to them."""

    status = 500
    kind = "server_error"

    def __init__(self) -> None:
        super().__init__("internal_error", "The appliance failed to answer. This is a fault of its own.")


class Unavailable(ApplianceError):
    """503: alive, but not able to serve now (engine restarting, shutting down)."""

    status = 503
    kind = "server_error"


class AttestationUnavailable(ApplianceError):
    status = 503
    kind = "server_error"


class AnswerEnded(RuntimeError):
    """A fault of ours: an answer that has its receipt was to get another one, or to send more. Neither happens."""


class BootError(Exception):
    """The appliance refuses to start. Raised before any listener exists; the message says what to do next."""
