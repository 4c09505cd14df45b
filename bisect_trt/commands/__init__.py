"""The commands by their subject: words of the command line in, an exit code out."""
