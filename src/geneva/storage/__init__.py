"""Everything durable. The only room that imports lance and lancedb."""
