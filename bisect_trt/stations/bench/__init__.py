"""Who computes and remembers: the run's folder, its emulators and engine, its journal."""
