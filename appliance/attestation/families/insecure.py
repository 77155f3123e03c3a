"""The family without hardware: a key made at boot signs H. It proves nothing, and everything that shows it says so."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from appliance.attestation.attester import Binding, Collected
from client_sdk.tee.insecure.abi import encode_item
from client_sdk.wire import cose
from client_sdk.wire.attestation import EvidenceItem
from client_sdk.wire.names import CURVE_ED25519, MODE_INSECURE, TYP_INSECURE_EVIDENCE


class InsecureAttester:
    """Signs report data with a key that signs nothing else and is never a reference value. `seed` is 32 bytes."""

    family = MODE_INSECURE
    mode = MODE_INSECURE

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._cose_key = cose.okp_key(self._key.public_key().public_bytes_raw(), curve=CURVE_ED25519)
        self._protected = cose.protected_header(kid=cose.key_id(self._cose_key), typ=TYP_INSECURE_EVIDENCE)

    def collect(self, binding: Binding) -> Collected:
        evidence = cose.sign1(protected=self._protected, salt=None, payload=binding.report_data, sign=self._key.sign)
        item = EvidenceItem(kind=self.family, content=encode_item(cose_key=self._cose_key, evidence=evidence))
        return Collected(evidence=(item,))
