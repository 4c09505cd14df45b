"""What the engine is and does before anything is searched: its baselines, its layers."""
