"""Receipts, verified against what was sent and received. The public names of this package are those of `verify`."""

from client_sdk.receipts.verify import Exchange as Exchange
from client_sdk.receipts.verify import StreamTally as StreamTally
from client_sdk.receipts.verify import VerifiedReceipt as VerifiedReceipt
from client_sdk.receipts.verify import verify_receipt as verify_receipt
