"""Charts and HTML pages: style, plots of records, and page templates."""
