"""What TDX and SGX share: quotes certified by Intel's DCAP infrastructure, their collateral and their TCB status."""
