"""What travels between processes and how it is read: one codec for each thing, versions, gRPC options.

``proto/`` beside it holds the messages, generated code only.
"""
