"""Spark: sessions, tasks on them, what its errors mean. The only room that imports pyspark."""
