"""What columns are loaded from: sources of keys and values, and how they are looked up."""
