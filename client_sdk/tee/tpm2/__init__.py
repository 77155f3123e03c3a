"""TPM 2.0: quotes over platform configuration registers. Measured boot, not memory encryption."""
