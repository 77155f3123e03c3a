"""AWS Nitro: attestation documents of Nitro Enclaves and of NitroTPM."""
