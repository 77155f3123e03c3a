"""What a caller may demand of a certificate that carries evidence: the `[certificate]` table of a policy."""

from __future__ import annotations

from dataclasses import dataclass

from client_sdk.errors import PolicyFileError
from client_sdk.tables import check_nothing_left

DEFAULT_MAX_EVIDENCE_AGE_S = 86_400
_LONGEST_S = 100 * 366 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificatePolicy:
    """`max_evidence_age_s`: seconds since notBefore, whatever notAfter says (a key's evidence is no younger)."""

    max_evidence_age_s: int = DEFAULT_MAX_EVIDENCE_AGE_S


def parse_policy(table: dict[str, object], where: str) -> CertificatePolicy:
    """Raises PolicyFileError naming the key at fault."""
    age = table.pop("max_evidence_age_s", DEFAULT_MAX_EVIDENCE_AGE_S)
    check_nothing_left(table, where)
    if type(age) is not int or not 1 <= age <= _LONGEST_S:
        raise PolicyFileError(f"{where}.max_evidence_age_s: whole seconds, 1 to {_LONGEST_S}")
    return CertificatePolicy(max_evidence_age_s=age)
