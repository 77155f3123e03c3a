"""Evidence inside certificates (RA-TLS): who carries it where, and what ties it to the certificate's key."""
