"""A running job, seen from outside: heartbeat, progress, bars, spans."""
