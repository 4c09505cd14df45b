"""Plans, outcomes, errors, files and limits: what every other folder uses."""
