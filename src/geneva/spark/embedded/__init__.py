"""The Spark that Geneva starts by itself: Java, its settings, its archive of classes."""
