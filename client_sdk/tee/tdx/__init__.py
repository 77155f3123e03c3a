"""Intel TDX: quotes of a trust domain (version 4 and 5), its measured-boot logs and what a policy may demand."""
