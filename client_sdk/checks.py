"""The list of checks that every verification produces, and the one place that maps a code to its error class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from client_sdk.errors import (
    AuthenticityError,
    Check,
    FreshnessError,
    MalformedError,
    PolicyError,
    Rejection,
    UndecidedError,
    VerificationError,
)
from client_sdk.wire.errors import WireError

_FRESHNESS = frozenset(
    {
        Rejection.NONCE_MISMATCH,
        Rejection.CONTINUATION_REFUSED,
        Rejection.CLOCK_SKEW,
        Rejection.ATTESTATION_TOO_OLD,
        Rejection.RECEIPT_NONCE_MISMATCH,
        Rejection.RECEIPT_TIME,
    }
)
_POLICY = frozenset(
    {
        Rejection.FAMILY_NOT_ALLOWED,
        Rejection.INSECURE_NOT_ALLOWED,
        Rejection.MODE_MISMATCH,
        Rejection.MEASUREMENT_NOT_ALLOWED,
        Rejection.DEBUG_NOT_ALLOWED,
        Rejection.TCB_NOT_ALLOWED,
        Rejection.GUEST_POLICY_NOT_ALLOWED,
        Rejection.PLATFORM_NOT_ALLOWED,
        Rejection.MODEL_NOT_ALLOWED,
        Rejection.CONFIG_NOT_ALLOWED,
        Rejection.DEVICE_NOT_ALLOWED,
        Rejection.ARITHMETIC_NOT_ALLOWED,
        Rejection.REQUIRED_CLAIM_MISSING,
        Rejection.RECEIPT_CHAIN_GAP,
    }
)


def error_class(code: Rejection) -> type[VerificationError]:
    """The class of the error tree a code belongs to."""
    if code.startswith("MALFORMED_") or code is Rejection.UNSUPPORTED_PROFILE:
        return MalformedError
    if code in _FRESHNESS:
        return FreshnessError
    if code in _POLICY:
        return PolicyError
    return AuthenticityError


def shown(value: object) -> str:
    """A value as text that is safe and useful in an error: bytes in hex, None as `none`."""
    if isinstance(value, bytes):
        return value.hex()
    return "none" if value is None else str(value)


class CheckLog:
    """Collects checks in the order they run. A failed one raises at once, with the whole list, itself last."""

    __slots__ = ("_checks",)

    def __init__(self) -> None:
        self._checks: list[Check] = []

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(self._checks)

    def passed(self, name: str, detail: str = "") -> None:
        self._checks.append(Check(name=name, status="passed", detail=detail))

    def not_checked(self, name: str, detail: str) -> None:
        self._checks.append(Check(name=name, status="not checked", detail=detail))

    def reject(self, name: str, code: Rejection, message: str, *, expected: str = "", actual: str = "") -> NoReturn:
        """Record the failed check and raise the error class of `code`."""
        self._checks.append(Check(name=name, status="failed", detail=message))
        raise error_class(code)(code, message, expected=expected, actual=actual, checks=self._checks)

    def require(self, condition: bool, name: str, code: Rejection, message: str) -> None:
        if not condition:
            self.reject(name, code, message)
        self.passed(name)

    def equal(self, name: str, code: Rejection, *, expected: object, actual: object) -> None:
        """Both values the same, type included (so that 1, 1.0 and True are three values); else the error shows both."""
        if type(expected) is not type(actual) or expected != actual:
            self.reject(name, code, f"{name} differs", expected=shown(expected), actual=shown(actual))
        self.passed(name)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One check that parses or authenticates: what it raises is recorded and raised again with the list."""
        try:
            yield
        except WireError as error:
            self._checks.append(Check(name=name, status="failed", detail=error.detail))
            raise MalformedError.of(error, checks=self._checks) from None
        except VerificationError as error:
            if (
                not error.checks or error.checks != self.checks
            ):  # else it was raised, and listed, by a check inside this step
                self._checks.append(Check(name=name, status="failed", detail=error.message))
                error.checks = self.checks
            raise
        except UndecidedError as error:
            if error.checks != self.checks:
                self.not_checked(name, error.message)
                error.checks = self.checks
            raise
        self.passed(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFact:
    """One displayed fact. `trust` says who stands behind it; `bound_by` names what would bind it, where nothing was
    verified.
    """

    name: str
    value: str
    trust: str
    bound_by: str = ""
