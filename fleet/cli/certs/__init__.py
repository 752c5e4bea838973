"""`baton certs`: a private CA for trials, and what it signs."""
