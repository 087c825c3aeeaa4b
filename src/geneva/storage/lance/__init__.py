"""Lance: tables, fragments, rows and their ids, SQL, transactions."""
