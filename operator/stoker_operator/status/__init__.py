"""Pure: a plan and what was observed → conditions, columns, words."""
