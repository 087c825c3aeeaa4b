"""Names of Ray's clusters that programs import; on Spark they mean "here"."""
