"""What is made of finished and running requests for people: why one was slow, and lists of them."""
