"""AMD SEV-SNP: reports of confidential virtual machines, signed by a key of the processor or of its cloud provider."""
