"""One result record, written as CSV, JSON, HTML, Markdown and JUnit."""
