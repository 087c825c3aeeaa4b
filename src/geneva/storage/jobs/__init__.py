"""What is known of jobs: events, heartbeats, rows that failed."""
