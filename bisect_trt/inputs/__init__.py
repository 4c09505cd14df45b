"""Input files, and the copies that are made of inputs."""
