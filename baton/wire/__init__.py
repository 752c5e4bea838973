"""What travels between processes and how it is read: codecs, versions, gRPC channels and options.

``proto/`` beside it holds the messages, generated code only.
"""
