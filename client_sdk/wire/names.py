"""Every name, number and limit that both programs must agree on. See docs/receipt-format.md for the CDDL."""

from __future__ import annotations

from typing import Final

# Profiles: a new rule set is a new profile string, never a silent change.
ATTESTATION_PROFILE: Final = "tag:attested-inference,2026:attestation-v1"
CHANNEL_PROOF_PROFILE: Final = "tag:attested-inference,2026:channel-proof-v1"
RECEIPT_PROFILE: Final = "tag:attested-inference,2026:receipt-v1"
CHECKPOINT_PROFILE: Final = "tag:attested-inference,2026:checkpoint-v1"

# COSE `typ` (RFC 9596): each verifier accepts exactly one, so one kind of signature never passes for another.
TYP_RECEIPT: Final = "application/attested-inference-receipt+cose"
TYP_CHECKPOINT: Final = "application/attested-inference-checkpoint+cose"
TYP_CHANNEL_PROOF: Final = "application/attested-inference-channel-proof+cose"
TYP_INSECURE_EVIDENCE: Final = "application/attested-inference-insecure-evidence+cose"

# COSE (RFC 9052, 9053)
TAG_SIGN1: Final = 18
ALG_EDDSA: Final = -8
HEADER_ALG: Final = 1
HEADER_CRIT: Final = 2
HEADER_KID: Final = 4
HEADER_TYP: Final = 16
CURVE_X25519: Final = 4
CURVE_ED25519: Final = 6

# CWT / EAT claim keys (RFC 8392, RFC 9711)
CLAIM_ISS: Final = 1
CLAIM_IAT: Final = 6
CLAIM_CTI: Final = 7
CLAIM_NONCE: Final = 10
CLAIM_PROFILE: Final = 265
# Private claim keys, from -70000 downwards (AIR owns -65537..-65599).
CLAIM_CHAIN: Final = -70000
CLAIM_SEQUENCE: Final = -70001
CLAIM_PREVIOUS: Final = -70002
CLAIM_MODE: Final = -70003
CLAIM_ATTESTATION: Final = -70004
CLAIM_CHANNEL: Final = -70005
CLAIM_MODEL: Final = -70006
CLAIM_CONFIG: Final = -70007
CLAIM_DEVICE: Final = -70008
CLAIM_ENGINE: Final = -70009
CLAIM_REQUEST: Final = -70010
CLAIM_PROMPT: Final = -70011
CLAIM_DECODING: Final = -70012
CLAIM_RESPONSE: Final = -70013
CLAIM_OUTPUT: Final = -70014
CLAIM_STREAM: Final = -70015
CLAIM_EXECUTION: Final = -70016
CLAIM_EMBEDDING: Final = -70017

MODE_PRODUCTION: Final = "production"
MODE_INSECURE: Final = "insecure"
MODES: Final = frozenset({MODE_PRODUCTION, MODE_INSECURE})

STATUS_COMPLETE: Final = "complete"
STATUS_ERROR: Final = "error"
STATUS_CANCELLED: Final = "cancelled"
STATUS_REFUSED: Final = "refused"
STATUS_DEADLINE: Final = "deadline"
STATUSES: Final = frozenset({STATUS_COMPLETE, STATUS_ERROR, STATUS_CANCELLED, STATUS_REFUSED, STATUS_DEADLINE})

# Commitment labels
LABEL_REQUEST: Final = "request"
LABEL_RESPONSE: Final = "response"
LABEL_PROMPT_TEXT: Final = "prompt-text"
LABEL_PROMPT_TOKENS: Final = "prompt-tokens"
LABEL_STOP: Final = "stop"
LABEL_TOOLS: Final = "tools"
LABEL_RESPONSE_FORMAT: Final = "response-format"
LABEL_LOGIT_BIAS: Final = "logit-bias"
LABEL_VECTORS: Final = "vectors"


def label_output_text(choice: int) -> str:
    return f"output-text/{choice}"


def label_output_tokens(choice: int) -> str:
    return f"output-tokens/{choice}"


# Evidence inside certificates
OID_CMW: Final = "1.3.6.1.5.5.7.1.35"
OID_CCC: Final = "2.23.133.5.4.9"
TAG_CCC: Final = 60000
HASH_SHA256: Final = 1  # Named Information Hash Algorithm Registry
CMW_IND_EVIDENCE: Final = 1 << 2
MEDIA_TYPE_PREFIX: Final = "application/vnd.attested-inference."

# Channel
EXPORTER_LABEL: Final = "Attestation"
EXPORTER_BYTES: Final = 32
SPKI_P256_BYTES: Final = 91

# HTTP
PATH_ATTESTATION: Final = "/.well-known/attestation"
PATH_ATTESTATION_JSON: Final = "/v1/attestation"
PATH_RECEIPTS: Final = "/v1/receipts/"
HEADER_INFERENCE_NONCE: Final = "x-inference-nonce"
HEADER_REQUEST_TIMEOUT: Final = "x-request-timeout"
HEADER_RECEIPT_ID: Final = "x-receipt-id"
HEADER_EXECUTION_RECEIPT: Final = "x-execution-receipt"
HEADER_AIR_RECEIPT: Final = "x-air-receipt"
MEDIA_CBOR: Final = "application/cbor"
MEDIA_COSE: Final = "application/cose"
MEDIA_JSON: Final = "application/json"
MEDIA_EVENT_STREAM: Final = "text/event-stream"
INFERENCE_ROUTES: Final = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/detokenize",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/tokenize",
    }
)

# Sizes
NONCE_BYTES: Final = 32
SALT_BYTES: Final = 32
CTI_BYTES: Final = 16
INFERENCE_NONCE_MIN_BYTES: Final = 8
INFERENCE_NONCE_MAX_BYTES: Final = 64
LIMIT_ATTESTATION_REQUEST_BYTES: Final = 256
LIMIT_ATTESTATION_BUNDLE_BYTES: Final = 1 << 20
LIMIT_RECEIPT_BYTES: Final = 64 << 10
LIMIT_CHECKPOINT_BYTES: Final = 2048
LIMIT_CHANNEL_PROOF_BYTES: Final = 2048
LIMIT_RECEIPT_HEADER_BYTES: Final = 8 << 10
MAX_NESTING: Final = 16

# Streams
CHECKPOINT_MAX_FRAMES: Final = 16
CHECKPOINT_MAX_DELAY_S: Final = 0.5
COMMENT_CHECKPOINT: Final = b": checkpoint "
COMMENT_RECEIPT: Final = b": receipt "
COMMENT_PADDING: Final = b": p "
DONE_BLOCK: Final = b"data: [DONE]\n\n"


def receipt_part(identifier: str) -> str:
    """The end of an answer's `id` (`chatcmpl-...`, `resp_...`) that names its receipt."""
    return identifier.replace("_", "-").rpartition("-")[2]
