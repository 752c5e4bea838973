"""What is asked of a server and when: trace files, arrivals, prompts, sessions.

Nothing here sends a request; the only I/O is reading files.
"""
