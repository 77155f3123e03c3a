"""The one place where bytes on the wire are defined. Pure: no keys, no I/O, no clock, no network."""
