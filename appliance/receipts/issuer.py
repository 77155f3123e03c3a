"""Signs receipts and checkpoints, keeps each chain gap-free, and remembers receipts for later pick-up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from appliance.errors import NotFound, ReceiptPending
from appliance.receipts.claims import InstanceFacts, Place, Record, build
from client_sdk.wire import cose, digests, names
from client_sdk.wire.stream import Checkpoint

Sign = Callable[[bytes], bytes]


@dataclass(slots=True)
class _Chain:
    identifier: bytes
    sequence: int = 0
    previous: bytes | None = None


class ChainScope:
    """What one chain of receipts belongs to: an API identity, or a connection where no keys are configured.

    `store_key` is whose bounded share of the receipt store is used; None is the share of everybody without a key.
    """

    __slots__ = ("__weakref__", "store_key")

    def __init__(self, store_key: str | None) -> None:
        self.store_key = store_key


class Issuer:
    """Issues receipts under one Ed25519 key. `random_bytes` draws chain identifiers."""

    def __init__(
        self,
        *,
        receipt_public: bytes,
        sign: Sign,
        instance: InstanceFacts,
        random_bytes: Callable[[int], bytes],
        stored_per_identity: int,
    ) -> None:
        kid = cose.key_id(cose.okp_key(receipt_public, curve=names.CURVE_ED25519))
        self._receipt_header = cose.protected_header(kid=kid, typ=names.TYP_RECEIPT)
        self._checkpoint_header = cose.protected_header(kid=kid, typ=names.TYP_CHECKPOINT)
        self._sign = sign
        self._instance = instance
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._chains: WeakKeyDictionary[ChainScope, _Chain] = WeakKeyDictionary()
        self._store = ReceiptStore(per_identity=stored_per_identity)

    @property
    def store(self) -> ReceiptStore:
        return self._store

    def issue(self, record: Record, scope: ChainScope) -> bytes:
        """The signed receipt, salt included. Its place in the chain is assigned here, under one lock."""
        with self._lock:
            chain = self._chains.get(scope)
            if chain is None:
                chain = self._chains[scope] = _Chain(self._random_bytes(16))
            place = Place(chain=chain.identifier, sequence=chain.sequence, previous=chain.previous)
            payload = build(self._instance, record, place).encode()
            receipt = cose.sign1(
                protected=self._receipt_header, salt=record.subject.salt, payload=payload, sign=self._sign
            )
            chain.previous = digests.receipt_link(cose.redacted(receipt, limit_bytes=names.LIMIT_RECEIPT_BYTES))
            chain.sequence += 1
        self._store.keep(record.subject.cti, scope.store_key, receipt)
        return receipt

    def sign_checkpoint(self, checkpoint: Checkpoint, salt: bytes) -> bytes:
        return cose.sign1(protected=self._checkpoint_header, salt=salt, payload=checkpoint.encode(), sign=self._sign)


class ReceiptStore:
    """Receipts by id, bounded per API identity; without keys the 128-bit id is the capability."""

    def __init__(self, *, per_identity: int) -> None:
        self._per_identity = per_identity
        self._kept: dict[str | None, OrderedDict[bytes, bytes]] = {}
        self._pending: dict[bytes, str | None] = {}

    def expect(self, cti: bytes, store_key: str | None) -> None:
        """The answer `cti` has begun; its receipt will come."""
        self._pending[cti] = store_key

    def keep(self, cti: bytes, store_key: str | None, receipt: bytes) -> None:
        self._pending.pop(cti, None)
        kept = self._kept.setdefault(store_key, OrderedDict())
        kept[cti] = receipt
        while len(kept) > self._per_identity:
            kept.popitem(last=False)

    def get(self, cti: bytes, store_key: str | None) -> bytes:
        """The receipt `cti` of this identity. Raises ReceiptPending, NotFound (evicted, foreign and unknown alike)."""
        kept = self._kept.get(store_key)
        if kept is not None and cti in kept:
            return kept[cti]
        if cti in self._pending and self._pending[cti] == store_key:
            raise ReceiptPending("receipt_pending", "The answer is not finished; its receipt comes with its end.")
        raise NotFound("receipt_not_found", "No receipt with this id is kept for this identity.")
