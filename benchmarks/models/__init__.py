"""What is measured on: seeded networks of real sizes, exports, models with many inputs of one
kind."""
