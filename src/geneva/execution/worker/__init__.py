"""What runs on a worker: the one function that is shipped, and what it is made of."""
