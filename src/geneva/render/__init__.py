"""Text and HTML for people: shared by messages, notebooks, the command line and the console."""
