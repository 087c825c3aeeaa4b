"""The nouns that rooms share: rows, tables, computations, view queries, jobs. No storage here."""
