"""What HTTP brings beside bodies and answers: origins, encodings, connections."""
