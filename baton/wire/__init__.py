"""Wire format between processes: codecs, versions, gRPC channels and TLS."""
