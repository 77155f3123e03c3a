"""Firmware for SEV-SNP and TDX, built from Debian's edk2 source: no package of Debian has the tables they need."""
