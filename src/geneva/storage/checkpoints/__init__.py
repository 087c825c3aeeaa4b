"""Results that are computed and not published: kept, found again, removed."""
