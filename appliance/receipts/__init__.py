"""Receipts: what was sent is recorded as it is sent (transcript), put into claims, and signed (issuer)."""
