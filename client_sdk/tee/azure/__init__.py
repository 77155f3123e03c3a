"""Azure confidential VMs on SEV-SNP: a report of the paravisor vouches for the key of a virtual TPM."""
