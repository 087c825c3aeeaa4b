"""Views: their definition and state in the table, and what happened to their source."""
