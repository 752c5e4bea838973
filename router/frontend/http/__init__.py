"""What HTTP brings beside bodies and answers: methods, origins, encodings."""
