"""Making and refreshing views."""
