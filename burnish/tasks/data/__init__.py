"""Sources of rows: JSON lines, lists of a script, and tables that the package datasets reads."""
