"""The insecure family: evidence without hardware, for development. Its key is never a reference value."""
