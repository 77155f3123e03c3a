"""Revocation by lists that were given: what a list speaks of is checked by it, the rest is said to be unchecked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from client_sdk.checks import CheckLog
from client_sdk.tee import x509
from client_sdk.tee.x509 import Certificate, Crl


def check_revocation(log: CheckLog, name: str, path: Sequence[Certificate], crls: Iterable[Crl], now: float) -> None:
    """No certificate of `path` (leaf first, root last) is in a list of its issuer; `name` is the check's name.

    A list with the issuer's name that the issuer did not sign, or that is not valid at `now`, is refused, not ignored.
    Raises AuthenticityError through `log`.
    """
    lists = tuple(crls)
    unchecked = []
    for child, issuer in itertools.pairwise(path):
        matching = [crl for crl in lists if crl.issuer == child.issuer]
        for crl in matching:
            with log.step(f"{name}: {child.common_name()}"):
                x509.check_not_revoked(child, crl, issuer, now)
        if not matching:
            unchecked.append(child.common_name())
    if unchecked:
        log.not_checked(name, "no revocation list was given for " + ", ".join(unchecked))
