"""The columns that a view keeps for itself, hidden from users by default."""

SOURCE_ROW_ID = "__source_row_id"
"""Which row of the source a row of the view stands for."""
IS_SET = "__is_set"
"""Whether a row of the view has been filled."""
