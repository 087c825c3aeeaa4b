"""Computed columns: definitions, provenance, receipts, which values are right, publishing."""
