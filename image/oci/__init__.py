"""A container image from the same root file system, as an OCI image layout, without a container engine."""
