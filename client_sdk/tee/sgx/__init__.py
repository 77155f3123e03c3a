"""Intel SGX: quotes of an enclave (version 3), for verifying peers that run in one."""
