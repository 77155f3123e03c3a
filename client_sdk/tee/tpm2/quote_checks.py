"""What every TPM quote is held against and shown as, whoever vouches for the key that signed it."""

from __future__ import annotations

from collections.abc import Iterable

from client_sdk.checks import CheckLog
from client_sdk.errors import Rejection
from client_sdk.tee.evidence import ForeignBinding, SessionBinding
from client_sdk.tee.tpm2.abi import HASHES, SHA256, Attest, pcr_digest
from client_sdk.tee.tpm2.policy import PcrSet
from client_sdk.wire import digests


def check_session(log: CheckLog, attest: Attest, binding: SessionBinding, *, name: str) -> None:
    """The quote was made for these claims; `name` is the check's."""
    log.equal(
        name, Rejection.EVIDENCE_BINDING, expected=digests.tpm_extra_data(binding.claims), actual=attest.extra_data
    )


def check_foreign(log: CheckLog, attest: Attest, binding: ForeignBinding) -> None:
    """The quote carries what the caller of another protocol expects, as far as it expects anything."""
    actual = attest.extra_data
    if binding.report_data is None and binding.nonce is None:
        log.not_checked("extra data", "no expected value was given")
    if binding.report_data is not None:
        expected = binding.report_data.ljust(len(actual), b"\x00")
        log.equal("extra data", Rejection.EVIDENCE_BINDING, expected=expected, actual=actual)
    if binding.nonce is not None:
        log.equal("nonce in the quote", Rejection.NONCE_MISMATCH, expected=binding.nonce, actual=actual)


def facts(prefix: str, attest: Attest) -> tuple[tuple[str, str], ...]:
    """Registers and clock as rows to show, each name beginning with `prefix`."""
    return (
        (f"{prefix} registers", selection_text(attest)),
        (f"{prefix} register digest", attest.pcr_digest.hex()),
        (f"{prefix} clock", f"{attest.clock_ms} ms, {'safe' if attest.safe else 'not safe'}"),
        (f"{prefix} reset count", str(attest.reset_count)),
        (f"{prefix} restart count", str(attest.restart_count)),
    )


def selection_text(attest: Attest) -> str:
    return " ".join(
        f"{HASHES.get(one.bank, hex(one.bank))}:{','.join(str(register) for register in one.registers)}"
        for one in attest.selections
    )


def quotes_one_of(attest: Attest, sets: Iterable[PcrSet], digest_bank: int) -> bool:
    """Whether exactly the registers of one of `sets` (of the SHA-256 bank) were quoted, with its values."""
    quoted = {(one.bank, register) for one in attest.selections for register in one.registers}
    for one in sets:
        values = {(SHA256, register): value for register, value in one.items()}
        if quoted == set(values) and pcr_digest(digest_bank, attest.selections, values) == attest.pcr_digest:
            return True
    return False
