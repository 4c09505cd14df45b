"""What users read: tables, texts, figures, files."""
