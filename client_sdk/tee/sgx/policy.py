"""What a caller may demand of an SGX enclave: `[families.sgx]`. docs/families/sgx.md lists every key."""

from __future__ import annotations

from dataclasses import dataclass, field

from client_sdk.errors import PolicyFileError
from client_sdk.tables import check_nothing_left
from client_sdk.tee import pins
from client_sdk.tee.dcap.status import StatusPolicy, take_status_policy
from client_sdk.tee.sgx.abi import MR_BYTES

_U16 = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SgxPolicy:
    """Any-of sets (None: not demanded); `min_isv_svn` is the least security version accepted."""

    mr_enclave: frozenset[bytes] | None = None
    mr_signer: frozenset[bytes] | None = None
    isv_prod_id: frozenset[int] | None = None
    min_isv_svn: int | None = None
    status: StatusPolicy = field(default_factory=StatusPolicy)

    @property
    def count(self) -> int:
        return 1

    def to_table(self) -> dict[str, object]:
        table: dict[str, object] = {}
        if self.mr_enclave is not None:
            table["mr_enclave"] = pins.hex_list(self.mr_enclave)
        if self.mr_signer is not None:
            table["mr_signer"] = pins.hex_list(self.mr_signer)
        if self.isv_prod_id is not None:
            table["isv_prod_id"] = sorted(self.isv_prod_id)
        if self.min_isv_svn is not None:
            table["min_isv_svn"] = self.min_isv_svn
        return {**table, **self.status.to_table()}


def parse_policy(table: dict[str, object], where: str, report_only: bool) -> SgxPolicy:
    """Read `[families.sgx]`: MRENCLAVE, or MRSIGNER with product id and least security version.

    Raises PolicyFileError naming the key at fault.
    """
    policy = SgxPolicy(
        mr_enclave=pins.take_pins(table, "mr_enclave", MR_BYTES, where),
        mr_signer=pins.take_pins(table, "mr_signer", MR_BYTES, where),
        isv_prod_id=pins.take_integers(table, "isv_prod_id", where, low=0, high=_U16),
        min_isv_svn=pins.take_integer(table, "min_isv_svn", where, low=0, high=_U16),
        status=take_status_policy(table, where),
    )
    by_signer = policy.mr_signer is not None and policy.isv_prod_id is not None and policy.min_isv_svn is not None
    if policy.mr_enclave is None and not by_signer and not report_only:
        raise PolicyFileError(f"{where}: mr_enclave is needed, or mr_signer with isv_prod_id and min_isv_svn")
    check_nothing_left(table, where)
    return policy
