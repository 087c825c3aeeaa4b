"""What to do, decided from facts alone: no storage, no Spark, no clock, no environment."""
