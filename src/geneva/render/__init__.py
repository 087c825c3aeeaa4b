"""Text and HTML for people, shared by notebooks, the command and the console."""
