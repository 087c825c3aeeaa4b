"""Lance tables as a Spark data source: `spark.read.format("geneva")`, and writing."""
