"""The whole command beside what others offer."""
