"""Ask a confidential inference appliance and believe only what verifies.

Names are loaded when they are first used: an enclave that imports `client_sdk.wire` never loads client code.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from client_sdk.appraisal.verifier import AttestationResult as AttestationResult
    from client_sdk.client.answers import Answer as Answer
    from client_sdk.client.answers import Pending as Pending
    from client_sdk.client.answers import Verified as Verified
    from client_sdk.client.client import Appliance as Appliance
    from client_sdk.client.client import AsyncAppliance as AsyncAppliance
    from client_sdk.client.embeddings import Embeddings as Embeddings
    from client_sdk.client.tokens import Tokens as Tokens
    from client_sdk.errors import ApplianceError as ApplianceError
    from client_sdk.errors import AuthenticityError as AuthenticityError
    from client_sdk.errors import Check as Check
    from client_sdk.errors import FreshnessError as FreshnessError
    from client_sdk.errors import MalformedError as MalformedError
    from client_sdk.errors import PolicyError as PolicyError
    from client_sdk.errors import PolicyFileError as PolicyFileError
    from client_sdk.errors import Rejection as Rejection
    from client_sdk.errors import RequestError as RequestError
    from client_sdk.errors import SdkError as SdkError
    from client_sdk.errors import TransportError as TransportError
    from client_sdk.errors import UndecidedError as UndecidedError
    from client_sdk.errors import VerificationError as VerificationError
    from client_sdk.offline.saved import SaveError as SaveError
    from client_sdk.offline.saved import VerifiedSavedAnswer as VerifiedSavedAnswer
    from client_sdk.offline.saved import verify_saved as verify_saved
    from client_sdk.policy.policy import Policy as Policy
    from client_sdk.policy.policy import UnsafeAcceptInsecure as UnsafeAcceptInsecure
    from client_sdk.receipts.verify import VerifiedReceipt as VerifiedReceipt

_HOMES = {
    "client.answers": ("Answer", "Pending", "Verified"),
    "client.client": ("Appliance", "AsyncAppliance"),
    "client.embeddings": ("Embeddings",),
    "errors": (
        "ApplianceError",
        "AuthenticityError",
        "Check",
        "FreshnessError",
        "MalformedError",
        "PolicyError",
        "PolicyFileError",
        "Rejection",
        "RequestError",
        "SdkError",
        "TransportError",
        "UndecidedError",
        "VerificationError",
    ),
    "policy": ("Policy", "UnsafeAcceptInsecure"),
    "receipts": ("VerifiedReceipt",),
    "offline.saved": ("SaveError", "VerifiedSavedAnswer", "verify_saved"),
    "client.tokens": ("Tokens",),
    "appraisal.verifier": ("AttestationResult",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
