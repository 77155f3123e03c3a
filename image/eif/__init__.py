"""Enclave image files for AWS Nitro, from the image's own kernel and root file system, with the model in a ramdisk."""
