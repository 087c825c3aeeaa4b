"""Loading columns from elsewhere by key: the source is staged, then columns are filled from it."""
