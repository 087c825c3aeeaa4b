"""Names that programs for Geneva on Ray import. Jobs run on Spark (`geneva.spark`)."""
